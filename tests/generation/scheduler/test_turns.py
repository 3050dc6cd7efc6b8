"""How passes are divided among prompts, texts and calls."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.scheduled_texts import TEXTS, alone, passes_until_it_ends

from metal_prefill import Model, Scheduler, Session, _core
from metal_prefill.generation import Stream
from metal_prefill.generation._scheduler import LEAST_PROMPT_ROWS, PROMPT_TURN, ROWS_PER_WRITING
from metal_prefill.generation._stream import PendingCall, make_streams


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


def test_prompts_of_one_namespace_compute_a_common_prefix_once(cpu: Model) -> None:
    """A prompt that waited for another namespace to compute its prefix would reveal it by its time."""
    for number, (spaces, rows) in enumerate(((("one", "one"), 42), (("one", "two"), 84))):
        scheduler = Scheduler(cpu)
        for i, space in enumerate(spaces):
            prompt = [number + 1, *range(40), i]
            scheduler.enter(make_streams(cpu.engine, prompt, 1, 1, prefix_namespace=space))
        scheduler.step()
        assert scheduler.last_pass.prompts == rows


def call_of(session: Session, ids: list[int]) -> PendingCall:
    """Return a call for the hidden state after these tokens."""
    return PendingCall([_core.Request.hidden(session.native, np.array(ids, np.int32))])


def test_calls_and_streams_share_passes(cpu: Model) -> None:
    rows = Scheduler(cpu)._core.pass_rows
    texts = [np.random.default_rng(i).integers(1, 900, rows).tolist() for i in range(6)]
    expected = [cpu.forward_batch([cpu.session()], [text], output="hidden")[0] for text in texts]
    alone_ = alone(cpu, TEXTS[0], 20)
    scheduler = Scheduler(cpu)
    writing = scheduler.submit(TEXTS[0], 20)
    ((_, made),) = scheduler.step()
    reading = scheduler.submit(np.random.default_rng(9).integers(1, 900, 3 * PROMPT_TURN), 1)
    calls = [call_of(cpu.session(), text) for text in texts]
    for call in calls:
        scheduler.call(call)
    order: list[int] = []
    while scheduler.busy:
        wrote = writing.finish_reason is None
        for stream, piece in scheduler.step():
            made += piece if stream is writing else ""
        order += [i for i, pending in enumerate(calls) if pending.results.done() and i not in order]
        assert reading.finish_reason is not None or scheduler.last_pass.prompts >= PROMPT_TURN
        assert not wrote or scheduler.last_pass.calls == LEAST_PROMPT_ROWS + ROWS_PER_WRITING
        assert wrote or scheduler.last_pass.calls == rows or len(order) == 6
    assert made == alone_
    assert order == [0, 1, 2, 3, 4, 5]
    for pending, state in zip(calls, expected, strict=True):
        np.testing.assert_array_equal(pending.results.result()[0], state)


def test_a_cancelled_call_is_dropped(cpu: Model) -> None:
    scheduler = Scheduler(cpu)
    session = cpu.session()
    pending = call_of(session, [1, 2, 3])
    scheduler.call(pending)
    pending.results.cancel()
    assert scheduler.step() == []
    assert (scheduler.busy, session.position, scheduler.passes) == (False, 0, 0)


def test_a_call_may_be_cancelled_during_its_pass(cpu: Model) -> None:
    call = call_of(cpu.session(), [1, 2, 3])
    cpu.engine.core.forward_pass([(call.requests, 3, 3)])
    call.results.cancel()
    call.finish()
    assert (call.done, call.left) == (True, [])


@pytest.mark.parametrize(("count", "length"), [(3, 900), (60, 60)])
def test_prompts_alone_fill_passes(cpu: Model, count: int, length: int) -> None:
    full = cpu.engine.core.pass_rows
    scheduler = Scheduler(cpu, max_streams=count)
    for i in range(count):
        scheduler.submit(np.random.default_rng(i).integers(1, 900, length), 1)
    rows = []
    while scheduler.streams:
        scheduler.step()
        rows.append(scheduler.last_pass.prompts)
    assert len(rows) > 2
    assert set(rows[:-1]) == {full}


def test_a_flow_of_short_prompts_does_not_starve_a_long_one(cpu: Model) -> None:
    scheduler = Scheduler(cpu)
    long = scheduler.submit(np.random.default_rng(0).integers(1, 900, 500), 1)
    for i in range(500 // LEAST_PROMPT_ROWS + 1):
        while scheduler.streams < 24:
            scheduler.submit(np.random.default_rng([i, scheduler.streams]).integers(1, 900, 60), 1)
        scheduler.step()
    assert long.finish_reason == "length"


def test_a_prompt_gets_rows_within_a_number_of_passes(cpu: Model) -> None:
    n = 12
    scheduler = Scheduler(cpu, max_streams=n)
    streams = [scheduler.submit(np.random.default_rng(i).integers(1, 900, 800), 1) for i in range(n)]
    waited, longest = [0] * n, 0
    while scheduler.streams:
        before = [s.computed for s in streams]
        scheduler.step()
        for i, (stream, had) in enumerate(zip(streams, before, strict=True)):
            waited[i] = waited[i] + 1 if stream.computed == had else 0
        assert all((s.started is None) == (s.computed == 0) for s in streams)
        running = [i for i, s in enumerate(streams) if s.finish_reason is None]
        longest = max([longest, *(waited[i] for i in running)])
    assert 0 < longest <= -(-n * PROMPT_TURN // cpu.engine.core.pass_rows)


def test_short_prompts_delay_a_text_by_a_bounded_factor(cpu: Model) -> None:
    scheduler = Scheduler(cpu)
    writing = scheduler.submit([1, 2, 3], 9, speculate="off", min_tokens=9)
    scheduler.step()
    for i in range(30):
        scheduler.submit(np.random.default_rng(i).integers(1, 900, 200), 1)
    disturbed = passes_until_it_ends(scheduler, writing)
    assert len(disturbed) == 8
    assert PROMPT_TURN < min(disturbed) <= max(disturbed) <= 2 * PROMPT_TURN


def test_scored_prompts_leave_long_prompts_their_part(cpu: Model) -> None:
    scheduler = Scheduler(cpu)
    prompts = [np.random.default_rng(i).integers(1, 900, 700).tolist() for i in range(6)]
    for prompt in prompts[:5]:
        scheduler.submit(prompt, 2, logprobs=2, prompt_logprobs=True)
    long = scheduler.submit(prompts[5], 1)
    scheduler.step()  # the first token of each scored prompt, which has no log probability
    before = long.ready_tokens
    scheduler.step()
    assert scheduler.last_pass.prompts == cpu.engine.core.pass_rows
    assert long.ready_tokens - before >= cpu.engine.core.pass_rows // 6


def test_scored_prompts_give_way_to_texts(cpu: Model) -> None:
    """Rows with log probabilities of a prompt count as rows of long prompts."""
    scheduler = Scheduler(cpu)
    n_prompts = 1 + 4 * scheduler._core.pass_rows // 500  # the first three passes compute less than these
    prompts = [np.random.default_rng(i).integers(1, 900, 500).tolist() for i in range(n_prompts)]
    options: dict[str, Any] = {"logprobs": 2, "prompt_logprobs": True}
    expected = [list(cpu.session().stream(prompt, 2, **options)) for prompt in prompts]
    scored = [scheduler.submit(prompt, 2, **options) for prompt in prompts]
    for _ in range(2):
        scheduler.step()
    assert scheduler.last_pass.prompts == scheduler._core.pass_rows  # nothing else is wanted
    writing = scheduler.submit([1, 2, 3], 30, speculate="off")
    made: dict[Stream, list[Any]] = {stream: [] for stream in (*scored, writing)}

    def step() -> None:
        for stream, piece in scheduler.step_pieces():
            made[stream].append(piece)

    step()
    while writing.finish_reason is None:
        assert all(stream.ready_tokens < stream.prompt_tokens for stream in scored)
        assert scheduler.writing == 1
        before = len(writing._made)
        step()
        assert len(writing._made) == before + 1
        assert scheduler.last_pass.prompts <= LEAST_PROMPT_ROWS + ROWS_PER_WRITING
    while scheduler.streams:
        step()
    for stream, pieces in zip(scored, expected, strict=True):
        assert made[stream] == pieces[-len(made[stream]) :]
