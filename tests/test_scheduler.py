"""Continuous batching: every stream has the same text as alone, and none waits for long."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metal_prefill import ClosedError, ContextOverflowError, KVMemoryError, Model, Scheduler
from metal_prefill._support.row_cost import RowCost
from metal_prefill.generation._batch_call import BatchCall
from metal_prefill.generation._scheduler import LEAST_PROMPT_ROWS, PROMPT_TURN, Stream, make_streams

TEXTS = ["ROMEO:\nBut soft", "JULIET:\n", "First Citizen:\nWe are", "KING:\nO my lord, what"]


@pytest.fixture
def cpu(demo_path: Path) -> Iterator[Model]:
    with Model(demo_path, device="cpu") as model:
        yield model


def alone(model: Model, prompt: Any, max_tokens: int, **options: Any) -> str:
    """Continue a prompt in a separate session."""
    with model.session() as session:
        return "".join(session.generate(prompt, max_tokens, **options))


def texts_of(pieces: Any, n: int) -> list[str]:
    """Join the pieces of each prompt."""
    texts = [""] * n
    for index, piece in pieces:
        texts[index] += piece
    return texts


@pytest.mark.parametrize("max_streams", [1, 3, 32])
def test_texts_match_those_of_single_prompts(cpu: Model, max_streams: int) -> None:
    options: list[dict[str, Any]] = [
        {"temperature": 0.8 if i % 2 else 0.0, "seed": i, "max_tokens": 5 + 3 * i} for i in range(8)
    ]
    prompts = [TEXTS[i % 4] for i in range(8)]
    expected = [alone(cpu, p, **o) for p, o in zip(prompts, options, strict=True)]
    pieces = cpu.generate_many(zip(prompts, options, strict=True), max_streams=max_streams)
    assert texts_of(pieces, 8) == expected
    assert cpu.position == 0


def test_metal_generates_for_many_prompts(demo: Model) -> None:
    n = 3 if demo.backend == "metal" else 8
    texts = texts_of(demo.generate_many(TEXTS[:3], n), 3)
    assert texts == [alone(demo, p, n) for p in TEXTS[:3]]


def test_stop_strings_end_a_text_as_they_do_alone(cpu: Model) -> None:
    whole = alone(cpu, TEXTS[0], 40)
    stop = whole[10:13]
    assert texts_of(cpu.generate_many([TEXTS[0]], 40, stop=stop), 1) == [whole[: whole.index(stop)]]


def test_each_text_has_its_finish_reason(demo_path: Path) -> None:
    with Model(demo_path, device="cpu", max_context=30) as model:
        scheduler = Scheduler(model)
        length = scheduler.submit([1, 2, 3], 4)
        context = scheduler.submit([1] * 20, 40)
        stopped = scheduler.submit([1, 2, 3], 20, stop=alone(model, [1, 2, 3], 20)[5])
        cancelled = scheduler.submit([4], 100)
        cancelled.cancel()
        while scheduler.streams:
            scheduler.step()
        reasons = [s.finish_reason for s in (length, context, stopped, cancelled)]
        assert reasons == ["length", "context", "stop", "cancelled"]
        assert model.stats()["kv_pool_bytes"] == model.stats()["prefix_bytes"]


def test_prompts_enter_as_others_end(cpu: Model) -> None:
    taken = 0

    def prompts() -> Iterator[list[int]]:
        nonlocal taken
        for i in range(100):
            taken += 1
            yield [i + 1, 5]

    begun = set()
    for index, _ in cpu.generate_many(prompts(), 4, max_streams=4):
        begun.add(index)
        assert taken <= max(begun) + 1 + 5  # they are not all read immediately


def test_memory_does_not_grow_with_the_number_of_prompts(demo_path: Path) -> None:
    most = {}
    for prompts in (10, 200):
        with Model(demo_path, device="cpu", prefix_memory=0) as model:
            texts = ([i % 50 + 1, 5] for i in range(prompts))
            pieces = model.generate_many(texts, 2, max_streams=4)
            most[prompts] = max(model.stats()["kv_pool_bytes"] for _ in pieces)
    assert most[200] == most[10] > 0


def test_a_decoding_stream_gets_a_token_in_every_pass(cpu: Model) -> None:
    scheduler = Scheduler(cpu)
    writing = scheduler.submit([1, 2, 3], 60, speculate="off")  # a correct draft would be a second token
    scheduler.step()
    for i in range(5):
        scheduler.submit([i + 1] * 500, 2)
    passes = 0
    while writing.finish_reason is None:
        before = len(writing._made)
        scheduler.step()
        passes += 1
        assert len(writing._made) == before + 1
    assert passes == 59


def test_prompts_of_different_namespaces_share_a_pass(cpu: Model) -> None:
    """A prompt that waited for another namespace to compute its prefix would reveal it by its time."""
    passes: dict[tuple[str, str], int] = {}
    for spaces in (("one", "one"), ("one", "two")):
        scheduler = Scheduler(cpu)
        prompt = [len(passes) + 1, *range(40)]
        for i, space in enumerate(spaces):
            scheduler.enter(make_streams(cpu.engine, [*prompt, i], 1, 1, prefix_namespace=space))
        scheduler.step()
        passes[spaces] = scheduler.last_pass.prompts
    assert passes == {("one", "one"): 42, ("one", "two"): 84}


def test_the_number_of_passes_a_prompt_waits_is_bounded(cpu: Model) -> None:
    n = 24
    scheduler = Scheduler(cpu, max_streams=n)
    streams = [scheduler.submit(np.random.default_rng(i).integers(1, 900, 400), 2) for i in range(n)]
    longest = 0
    while scheduler.streams:
        scheduler.step()
        longest = max(longest, *(s.passes_waited for s in streams))
    assert 0 < longest <= n / (LEAST_PROMPT_ROWS / PROMPT_TURN)


def test_a_short_prompt_does_not_wait_for_a_long_one(cpu: Model) -> None:
    scheduler = Scheduler(cpu)
    long = scheduler.submit(np.random.default_rng(1).integers(1, 900, 1000), 2)
    scheduler.step()
    short = scheduler.submit([1, 2, 3], 2)
    scheduler.step()
    assert len(short._made) == 1
    assert long._made == []


def test_exhausted_memory_makes_streams_wait(demo_path: Path) -> None:
    with Model(demo_path, device="cpu") as model:
        with model.session() as session:
            session.forward_prompt([1])
            page = int(session.stats()["kv_cache_bytes"])
        prompts = [np.random.default_rng(i).integers(1, 900, 100) for i in range(6)]
        expected = [alone(model, p, 40) for p in prompts]
    with Model(demo_path, device="cpu", kv_memory=5 * page, prefix_memory=0) as model:
        assert texts_of(model.generate_many(prompts, 40), 6) == expected


def test_a_prompt_that_never_fits_is_rejected_before_anything_is_computed(demo_path: Path) -> None:
    with Model(demo_path, device="cpu", kv_memory=1, prefix_memory=0) as model:  # one page
        limit = r"65 tokens do not fit: .* exceeds kv_memory of \d+ bytes \(1 pages of 64 positions\)"
        with pytest.raises(KVMemoryError, match=f"prompt 1: {limit}"):
            list(model.generate_many([[1] * 64, [1] * 65], 1))
        scheduler = Scheduler(model)
        with pytest.raises(KVMemoryError, match=limit):
            scheduler.submit([1] * 60, 10, min_tokens=6)  # of which the last one needs no memory
        assert not scheduler.busy
        with pytest.raises(KVMemoryError, match=limit):
            model.generate_beams([1] * 65, 1)
        assert model.stats()["kv_pool_bytes"] == 0
        assert len(texts_of(model.generate_many([[1] * 64], 1), 1)) == 1
        scheduler.submit([1] * 60, 10, min_tokens=5)
        assert scheduler.step()


def test_errors_of_single_prompts_are_raised_or_returned(cpu: Model) -> None:
    prompts: list[Any] = [[1, 2], [1 << 20], [3] * 2000, [4, 5]]
    with pytest.raises(ValueError, match="prompt 1: token id"):
        list(cpu.generate_many(prompts, 3))
    results = list(cpu.generate_many(prompts, 3, errors="return"))
    errors = {index: type(item) for index, item in results if isinstance(item, Exception)}
    assert errors == {1: ValueError, 2: ContextOverflowError}
    assert {index for index, item in results if isinstance(item, str)} == {0, 3}
    with pytest.raises(ValueError, match="errors must be"):
        cpu.generate_many([], errors="ignore")


def test_progress_counts_prompts_that_ended(cpu: Model) -> None:
    seen: list[tuple[int, int]] = []
    list(cpu.generate_many([[i + 1] for i in range(5)], 3, progress=lambda *counts: seen.append(counts)))
    assert seen[-1] == (5, 5)
    assert [done for done, _ in seen] == [1, 2, 3, 4, 5]


def test_tasks_share_one_engine_loop(cpu: Model) -> None:
    expected = [alone(cpu, p, 20) for p in TEXTS]

    async def text(prompt: str) -> str:
        return "".join([piece async for piece in cpu.generate_async(prompt, 20)])

    async def all_texts() -> list[str]:
        return await asyncio.gather(*(text(p) for p in TEXTS))

    assert asyncio.run(all_texts()) == expected
    assert asyncio.run(all_texts()) == expected  # in another event loop


def test_tasks_of_several_event_loops_run_at_the_same_time(cpu: Model) -> None:
    expected = [alone(cpu, p, 15) for p in TEXTS]
    texts = [""] * len(TEXTS)

    def run(i: int) -> None:
        async def text() -> str:
            return "".join([piece async for piece in cpu.generate_async(TEXTS[i], 15)])

        texts[i] = asyncio.run(text())

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(TEXTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == expected


def test_leaving_the_loop_cancels_the_rest(cpu: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    streams: list[Stream] = []
    enter = Scheduler.enter

    def noting(self: Scheduler, entering: list[Stream]) -> None:
        streams.extend(entering)
        enter(self, entering)

    monkeypatch.setattr(Scheduler, "enter", noting)

    async def first_piece() -> str:
        pieces = cpu.generate_async(TEXTS[0], 900)
        async for piece in pieces:
            await pieces.aclose()  # type: ignore[attr-defined]
            return piece
        return ""

    async def run() -> None:
        assert await first_piece()
        for _ in range(500):
            if streams[0].finish_reason is not None:
                break
            await asyncio.sleep(0.01)

    asyncio.run(run())
    assert streams[0].finish_reason == "cancelled"


def test_errors_reach_the_task(cpu: Model) -> None:
    async def run() -> None:
        with pytest.raises(ContextOverflowError, match="a prompt of 2000 tokens"):
            async for _ in cpu.generate_async([1] * 2000, 3):
                pass

    asyncio.run(run())
    cpu.close()

    async def closed() -> None:
        with pytest.raises(ClosedError):
            async for _ in cpu.generate_async([1], 3):
                pass

    asyncio.run(closed())


@pytest.mark.parametrize("max_streams", [1, 2, 32])
def test_answers_to_one_prompt_have_their_own_random_numbers(cpu: Model, max_streams: int) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "seed": 3}
    pieces = cpu.generate_many(TEXTS[:2], 20, n=3, max_streams=max_streams, **options)
    texts = texts_of(pieces, 6)
    assert texts[0] == alone(cpu, TEXTS[0], 20, **options)
    assert texts[3] == alone(cpu, TEXTS[1], 20, **options)
    assert len(set(texts)) == 6
    assert texts == texts_of(cpu.generate_many(TEXTS[:2], 20, n=3, **options), 6)


class CountingEngine:
    """An engine that counts the rows it is given."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.rows = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def forward_batch(self, requests: Any) -> Any:
        self.rows += sum(request.n_tokens for request in requests)
        return self._engine.forward_batch(requests)


def test_answers_share_one_prefill_on_each_device(demo: Model) -> None:
    ids = np.random.default_rng(0).integers(1, 900, 24 if demo.backend == "metal" else 200)
    scheduler = Scheduler(demo)
    engine: Any = CountingEngine(scheduler._core)
    scheduler._core = engine
    streams = scheduler.submit_answers(ids, 4, 3, temperature=1.0, seed=1)
    while scheduler.streams:
        scheduler.step()
    assert {s.finish_reason for s in streams} == {"length"}
    # The prompt once, its last token for each other answer, and of each the tokens but the last.
    assert engine.rows == len(ids) + 3 + 4 * 2


def test_answers_of_generate_share_one_prefill(cpu: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = np.random.default_rng(5).integers(1, 900, 300)
    engine: Any = CountingEngine(cpu.engine.core)
    monkeypatch.setattr(cpu.engine, "_core", engine)
    options: dict[str, Any] = {"temperature": 1.0, "seed": 3, "speculate": "off"}
    position, done = cpu.position, list[tuple[int, int]]()
    texts = texts_of(
        cpu.generate(ids, 5, n=3, progress=lambda *counts: done.append(counts), min_tokens=5, **options), 3
    )
    assert engine.rows == len(ids) + 2 + 3 * 4  # the last token once more for each other answer
    assert cpu.position == position
    assert done[-1] == (300, 300)
    assert texts == texts_of(cpu.generate_many([ids], 5, n=3, min_tokens=5, **options), 3)
    assert texts[0] == alone(cpu, ids, 5, min_tokens=5, **options)
    assert len(set(texts)) == 3
    pieces = list(cpu.stream(ids, 5, n=3, logprobs=1, min_tokens=5, **options))
    for i, text in enumerate(texts):
        own = [piece for answer, piece in pieces if answer == i]
        assert "".join(piece.text for piece in own) == text
        assert [piece.finish_reason for piece in own] == [None] * 4 + ["length"]
        assert all(piece.logprob is not None for piece in own)


def test_one_answer_has_a_number_too(cpu: Model) -> None:
    pieces = list(cpu.generate(TEXTS[0], 5, n=1))
    assert {answer for answer, _ in pieces} == {0}
    assert "".join(piece for _, piece in pieces) == alone(cpu, TEXTS[0], 5)


def test_invalid_numbers_of_answers_are_rejected_before_anything_is_computed(cpu: Model) -> None:
    with pytest.raises(ValueError, match="n must be between 1 and 4096, got 0"):
        cpu.generate([1], 2, n=0)
    with pytest.raises(ValueError, match="token id 1048576"):
        cpu.generate([1 << 20], 2, n=2)

    def stop(done: int, total: int) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        list(cpu.generate([1] * 50, 2, n=2, progress=stop))


def test_an_error_names_the_answer(cpu: Model) -> None:
    def wrong(ids: list[int]) -> list[int]:
        return [1 << 20]

    with pytest.raises(ValueError, match="answer 0: a draft of speculate: token id 1048576"):
        list(cpu.generate([1, 2, 1, 2], 20, n=2, speculate=wrong))


def test_answers_continue_if_the_first_ends_immediately(cpu: Model) -> None:
    scheduler = Scheduler(cpu)
    streams = scheduler.submit_answers([1, 2, 3], 3, 1, temperature=1.0, seed=1)
    while scheduler.streams:
        scheduler.step()
    assert [s.finish_reason for s in streams] == ["length"] * 3


def test_errors_name_the_prompt_of_answers(cpu: Model) -> None:
    results = list(cpu.generate_many([[1], [1 << 20]], 2, n=2, errors="return"))
    assert {i for i, r in results if isinstance(r, ValueError) and "prompt 1: token id" in str(r)} == {2, 3}
    with pytest.raises(ValueError, match="n must be between 1 and 4096, got 0"):
        cpu.generate_many([[1]], 2, n=0)


def test_pieces_match_those_of_single_prompts(cpu: Model) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "seed": 3, "logprobs": 2}
    pieces: list[list[Any]] = [[], []]
    for index, piece in cpu.stream_many(TEXTS[:2], 9, **options):
        pieces[index].append(piece)
    for prompt, made in zip(TEXTS[:2], pieces, strict=True):
        assert made == list(cpu.session().stream(prompt, 9, **options))


def call(model: Model, sessions: list[Any], prompts: list[list[int]], output: Any) -> BatchCall:
    return BatchCall(model.config, [session.native for session in sessions], prompts, output, None)


def test_calls_and_streams_share_passes(cpu: Model) -> None:
    rows = Scheduler(cpu)._core.pass_rows
    texts = [np.random.default_rng(i).integers(1, 900, rows).tolist() for i in range(6)]
    expected = [cpu.forward_batch([cpu.session()], [text], output="hidden")[0] for text in texts]
    alone_ = alone(cpu, TEXTS[0], 20)
    scheduler = Scheduler(cpu)
    writing = scheduler.submit(TEXTS[0], 20)
    ((_, made),) = scheduler.step()
    reading = scheduler.submit(np.random.default_rng(9).integers(1, 900, 3 * PROMPT_TURN), 1)
    calls = [scheduler.call(call(cpu, [cpu.session()], [text], "hidden")) for text in texts]
    order: list[int | str] = []
    while scheduler.busy:
        for stream, piece in scheduler.step():
            made += piece if stream is writing else ""
        order += [i for i, pending in enumerate(calls) if pending.results is not None and i not in order]
        order += ["prompt"] if reading.finish_reason and "prompt" not in order else []
    assert made == alone_
    assert [i for i in order if i != "prompt"] == [0, 1, 2, 3, 4, 5]
    assert 2 <= order.index("prompt") <= 4  # three turns of the prompt between those of the calls
    for pending, state in zip(calls, expected, strict=True):
        assert pending.results is not None
        np.testing.assert_array_equal(pending.results[0], state)


def test_a_cancelled_call_is_dropped(cpu: Model) -> None:
    scheduler = Scheduler(cpu)
    session = cpu.session()
    pending = scheduler.call(call(cpu, [session], [[1, 2, 3]], "hidden"))
    pending.cancelled = True
    assert scheduler.step() == []
    assert (scheduler.busy, session.position, scheduler.passes) == (False, 0, 0)


def test_a_call_returns_the_greedy_tokens_of_all_its_rows(cpu: Model) -> None:
    ids = [3, 1, 4, 1, 5]
    expected = cpu.forward_batch([cpu.session()], [ids], rows="all")[0]
    scheduler = Scheduler(cpu)
    writing = scheduler.submit(TEXTS[0], 2)
    pending = scheduler.call(BatchCall(cpu.config, [cpu.session().native], [ids], "greedy", "all"))
    while scheduler.busy:
        scheduler.step()
    assert writing.finish_reason == "length"
    assert pending.results == [expected.tolist()]


def passes_until_it_ends(scheduler: Scheduler, stream: Stream) -> list[int]:
    """Return the rows of each pass until a stream has ended."""
    rows = []
    while stream.finish_reason is None:
        scheduler.step()
        rows.append(scheduler.last_pass.writing + scheduler.last_pass.prompts)
    return rows


def single_rows(passes: list[int]) -> float:
    """Estimate the time of passes in passes of one row, where each further row adds 5 percent."""
    return sum(1 + 0.05 * (rows - 1) for rows in passes)


@pytest.mark.parametrize(("clients", "most"), [(1, 3), (16, 5)])
def test_long_prompts_delay_a_short_text_by_a_bounded_factor(cpu: Model, clients: int, most: int) -> None:
    options: dict[str, Any] = {"speculate": "off", "min_tokens": 8}
    scheduler = Scheduler(cpu)
    undisturbed = passes_until_it_ends(scheduler, scheduler.submit([1, 2, 3], 8, **options))
    assert undisturbed == [3] + [1] * 7
    for i in range(clients):
        scheduler.submit(np.random.default_rng(i).integers(1, 900, 1000), 8)
    scheduler.step()
    disturbed = passes_until_it_ends(scheduler, scheduler.submit([1, 2, 3], 8, **options))
    assert len(disturbed) == len(undisturbed)
    assert single_rows(disturbed) <= most * single_rows(undisturbed)
    assert min(disturbed) > LEAST_PROMPT_ROWS  # the long prompts get their share meanwhile


def test_long_prompts_alone_fill_passes(cpu: Model) -> None:
    full = cpu.engine.core.pass_rows
    scheduler = Scheduler(cpu)
    for i in range(3):
        scheduler.submit(np.random.default_rng(i).integers(1, 900, 900), 1)
    rows = []
    while scheduler.streams:
        scheduler.step()
        rows.append(scheduler.last_pass.prompts)
    assert rows == [full] * (2700 // full) + [2700 % full]


def test_short_prompts_alone_fill_passes(cpu: Model) -> None:
    full = cpu.engine.core.pass_rows
    scheduler = Scheduler(cpu)
    for i in range(20):
        scheduler.submit(np.random.default_rng(i).integers(1, 900, 60), 1)
    scheduler.step()
    assert scheduler.last_pass.prompts == full


def test_a_flow_of_short_prompts_does_not_starve_a_long_one(cpu: Model) -> None:
    scheduler = Scheduler(cpu)
    long = scheduler.submit(np.random.default_rng(0).integers(1, 900, 500), 1)
    for i in range(500 // LEAST_PROMPT_ROWS + 1):
        while scheduler.streams < 24:
            scheduler.submit(np.random.default_rng([i, scheduler.streams]).integers(1, 900, 60), 1)
        scheduler.step()
    assert long.finish_reason == "length"


def test_passes_waited_counts_the_passes_since_a_prompt_got_rows(cpu: Model) -> None:
    n = 12
    scheduler = Scheduler(cpu, max_streams=n)
    streams = [scheduler.submit(np.random.default_rng(i).integers(1, 900, 800), 1) for i in range(n)]
    waited, longest = [0] * n, 0
    while scheduler.streams:
        before = [s.computed for s in streams]
        scheduler.step()
        for i, (stream, had) in enumerate(zip(streams, before, strict=True)):
            waited[i] = waited[i] + 1 if stream.computed == had else 0
        running = [i for i, s in enumerate(streams) if s.finish_reason is None]
        assert [streams[i].passes_waited for i in running] == [waited[i] for i in running]
        longest = max([longest, *(waited[i] for i in running)])
    assert 0 < longest <= -(-n * PROMPT_TURN // cpu.engine.core.pass_rows)


def page_bytes(model: Model) -> int:
    with model.session() as session:
        session.forward_prompt([1])
        return int(session.stats()["kv_cache_bytes"])


def result_alone(model: Model, prompt: Any, max_tokens: int, **options: Any) -> tuple[str, type | None]:
    """Continue a prompt in a separate session; return its text and its error."""
    text = ""
    with model.session() as session:
        try:
            for piece in session.generate(prompt, max_tokens, **options):
                text += piece
        except KVMemoryError as error:
            return text, type(error)
    return text, None


def results_together(scheduler: Scheduler, streams: list[Stream]) -> list[tuple[str, type | None]]:
    texts = dict.fromkeys(streams, "")
    while scheduler.streams:
        for stream, piece in scheduler.step():
            texts[stream] += piece
    return [(texts[s], None if s.error is None else type(s.error)) for s in streams]


def test_streams_that_need_a_page_in_the_same_pass_both_get_their_text(demo_path: Path) -> None:
    with Model(demo_path, device="cpu") as model:
        page = page_bytes(model)
    with Model(demo_path, device="cpu", kv_memory=2 * page, prefix_memory=0) as model:
        prompts = [[1 + i] * 60 for i in range(2)]
        options: dict[str, Any] = {"min_tokens": 20, "speculate": "off"}
        expected = [result_alone(model, prompt, 20, **options) for prompt in prompts]
        scheduler = Scheduler(model)
        streams = [scheduler.submit(prompt, 20, **options) for prompt in prompts]
        assert results_together(scheduler, streams) == expected
        assert [error for _, error in expected] == [None, None]


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_a_stream_fails_for_memory_only_where_it_fails_alone(demo_path: Path, data: st.DataObject) -> None:
    with Model(demo_path, device="cpu") as model:
        page = page_bytes(model)
    pages = data.draw(st.integers(1, 4), label="pages")
    texts = data.draw(
        st.lists(
            st.tuples(st.integers(1, 64 * pages), st.integers(1, 90), st.integers(1, 3), st.booleans()),
            min_size=2,
            max_size=6,
        ),
        label="tokens of the prompt, of the text, kind of prompt, sampled",
    )
    prefix_memory = data.draw(st.sampled_from([0, 4 * page]), label="prefix_memory")
    with Model(demo_path, device="cpu", kv_memory=pages * page, prefix_memory=prefix_memory) as model:
        prompts = [np.random.default_rng(kind).integers(1, 900, length) for length, _, kind, _ in texts]
        options: list[dict[str, Any]] = [
            {"max_tokens": made, "seed": i, "temperature": 0.9 if sampled else 0.0}
            for i, (_, made, _, sampled) in enumerate(texts)
        ]
        expected = [result_alone(model, p, **o) for p, o in zip(prompts, options, strict=True)]
        scheduler = Scheduler(model, max_streams=data.draw(st.integers(2, 6), label="max_streams"))
        streams = [scheduler.submit(p, **o) for p, o in zip(prompts, options, strict=True)]
        assert results_together(scheduler, streams) == expected


def test_streams_enter_again_after_memory_ran_out(demo_path: Path) -> None:
    with Model(demo_path, device="cpu") as model:
        page = page_bytes(model)
    with Model(demo_path, device="cpu", kv_memory=6 * page, prefix_memory=0) as model:
        scheduler = Scheduler(model, max_streams=4)
        for i in range(4):
            scheduler.submit([1 + i] * 180, 8, min_tokens=8)  # three pages each
        least = 4
        while scheduler.streams:
            scheduler.step()
            least = min(least, scheduler.max_streams)
        assert least < 4
        for i in range(20):
            scheduler.submit([1 + i] * 5, 8, min_tokens=8)
        together: list[int] = []
        while scheduler.streams:
            scheduler.step()
            together.append(scheduler.last_pass.writing)
        assert max(together) == 4
        assert scheduler.max_streams == 4


def test_a_completely_cached_prompt_fits_like_a_new_one(demo_path: Path) -> None:
    """Where only the prefix cache shares a page, no copy of it is needed before the text continues in it."""
    ids = np.random.default_rng(0).integers(1, 900, 40)
    with Model(demo_path, device="cpu", kv_memory=1) as model:  # one page
        expected = alone(model, ids, 5)
        scheduler = Scheduler(model)
        for _ in range(2):
            assert results_together(scheduler, [scheduler.submit(ids, 5)]) == [(expected, None)]
        assert result_alone(model, ids, 5) == (expected, None)


@pytest.mark.parametrize("sampled", [False, True])
def test_drafts_that_do_not_fit_in_memory_are_dropped(
    demo_path: Path, monkeypatch: pytest.MonkeyPatch, sampled: bool
) -> None:
    monkeypatch.setattr(RowCost, "seconds", lambda self, rows: 1.0)  # as many drafts as allowed
    ids = np.random.default_rng(0).integers(1, 900, 60)
    options: dict[str, Any] = {"temperature": 1.0, "seed": 3} if sampled else {}
    with Model(demo_path, device="cpu", kv_memory=1) as model:  # one page
        tokens = [p.token for p in model.session().stream(ids, 5, speculate="off", **options)]
        options |= {"stop": tokens[4], "speculate": lambda so_far: [*tokens[len(so_far) - 60 :], *[7] * 9]}
        expected = model.tokenizer.decode(tokens[:4])
        assert result_alone(model, ids, 30, **options) == (expected, None)
        scheduler = Scheduler(model)
        assert results_together(scheduler, [scheduler.submit(ids, 30, **options)]) == [(expected, None)]


def test_short_prompts_delay_a_text_by_a_bounded_factor(cpu: Model) -> None:
    scheduler = Scheduler(cpu)
    writing = scheduler.submit([1, 2, 3], 9, speculate="off", min_tokens=9)
    scheduler.step()
    for i in range(30):
        scheduler.submit(np.random.default_rng(i).integers(1, 900, 200), 1)
    disturbed = passes_until_it_ends(scheduler, writing)
    assert len(disturbed) == 8
    assert PROMPT_TURN < min(disturbed) <= max(disturbed) <= 2 * PROMPT_TURN
