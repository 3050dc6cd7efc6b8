"""Batches of greedy text, and texts with drafts, for which the GPU starts the next tokens early."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from support.kernels.emulated_gpu import command_buffers_of, require_emulator
from support.native_requests import choose
from support.scheduled_texts import tokens_alone
from support.small_models import SmallModel, write_with_nan

from metal_prefill import DeviceError, Model, Scheduler, _core
from metal_prefill.engine import RowCost
from metal_prefill.generation import Stream
from metal_prefill.generation._speculation import Acceptance, Best, LookupDrafter

pytestmark = [pytest.mark.emulator, pytest.mark.usefixtures("own_device")]

gpu = require_emulator()
VOCAB = 320
PROMPTS = [[(5 + i + 7 * k) % VOCAB for k in range(n)] for i, n in enumerate([40, 11, 58])]
TOKENS = 12  # of each text; the third one needs a second page
GREEDY: Any = {"speculate": "off"}


@pytest.fixture(scope="module")
def wanted(model: Model) -> list[list[int]]:
    return [tokens_alone(model, prompt, 2 * TOKENS) for prompt in PROMPTS]


class Pass(NamedTuple):
    """Contents of the label of a command buffer, and how far its pass was ahead of the host."""

    tokens: int
    sequences: int
    position: int  # -1: of several sequences
    ahead: int


def passes_of(run: Callable[[], object]) -> list[Pass]:
    passes = []
    for buffer in command_buffers_of(run):  # "3 tokens of 3 sequences", "1 tokens at position 7"
        words = buffer.label.split()
        several = words[2] == "of"
        passes.append(
            Pass(
                int(words[0]),
                int(words[3]) if several else 1,
                -1 if several else int(words[4]),
                buffer.ahead_of_host,
            )
        )
    return passes


class Streams:
    """A stream for each prompt, with separate options, and the tokens that they have so far."""

    def __init__(self, model: Model, *options: dict[str, Any]) -> None:
        self.scheduler = Scheduler(model)
        self.streams: list[Stream] = []
        self.made: list[list[int]] = []
        for prompt, own in zip(PROMPTS, options or ({},) * len(PROMPTS), strict=True):
            self.submit(prompt, **{**GREEDY, **own})

    def submit(self, prompt: list[int], max_tokens: int = TOKENS, **options: Any) -> None:
        self.streams.append(self.scheduler.submit(prompt, max_tokens, **options))
        self.made.append([])

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            for stream, piece in self.scheduler.step_pieces():
                self.made[self.streams.index(stream)].append(piece.token)

    def finish(self) -> list[list[int]]:
        """Compute until all streams have ended, and return their tokens."""
        while self.scheduler.busy:
            self.step()
        return self.made


def test_batches_run_ahead_and_return_the_same_tokens_as_single_sequences(
    model: Model, wanted: list[list[int]]
) -> None:
    texts, prompts, before = Streams(model), sum(map(len, PROMPTS)), gpu.counters()
    passes = passes_of(texts.finish)
    assert passes == [Pass(prompts, 3, -1, 0), Pass(3, 3, -1, 0), *[Pass(3, 3, -1, 1)] * (TOKENS - 2)]
    assert gpu.counters().waits - before.waits == TOKENS
    assert texts.made == [text[:TOKENS] for text in wanted]


def test_a_stopped_text_keeps_the_work_sent_for_others(model: Model, wanted: list[list[int]]) -> None:
    """The next pass of the others is not ahead; the later ones are."""
    text = wanted[1]
    n = next(i for i in range(3, TOKENS) if text[i] not in text[:i])
    texts = Streams(model, {}, {"stop": text[n]}, {})
    passes = passes_of(texts.finish)
    assert texts.made == [wanted[0][:TOKENS], text[: n + 1], wanted[2][:TOKENS]]
    assert texts.streams[1].finish_reason == "stop"
    assert passes[1:] == [
        Pass(3, 3, -1, 0),
        *[Pass(3, 3, -1, 1)] * n,  # the last of them was in flight at the stop
        Pass(2, 2, -1, 0),
        *[Pass(2, 2, -1, 1)] * (TOKENS - n - 3),
    ]


def test_a_cancelled_stream_releases_its_memory_and_others_continue(
    model: Model, wanted: list[list[int]]
) -> None:
    texts = Streams(model)
    texts.step(5)
    held = model.stats()["kv_pool_bytes"]
    texts.streams[2].cancel()
    texts.step()
    assert model.stats()["kv_pool_bytes"] < held
    assert texts.finish() == [wanted[0][:TOKENS], wanted[1][:TOKENS], wanted[2][:5]]


@pytest.mark.parametrize("late", [PROMPTS[1], PROMPTS[1][:5]], ids=["long", "short"])
def test_a_prompt_may_enter_while_others_are_in_flight(
    model: Model, wanted: list[list[int]], late: list[int]
) -> None:
    """A prompt of a few tokens could share their pass."""
    alone = tokens_alone(model, late, TOKENS)
    texts = Streams(model)

    def run() -> None:
        texts.step(4)
        texts.submit(late, **GREEDY)
        texts.step()

    # A long prompt waits for them; a short one is sent immediately.
    assert passes_of(run)[-2:] == [Pass(3, 3, -1, 1), Pass(len(late), 1, 0, int(len(late) <= 8))]
    assert texts.finish() == [*(text[:TOKENS] for text in wanted), alone]


def test_a_failure_affects_only_its_pass(model: Model, wanted: list[list[int]]) -> None:
    texts = Streams(model)
    texts.step(3)
    gpu.fail_command_buffer(1, message="the GPU had enough")  # the one after that is in flight
    texts.step()
    assert texts.made == [text[:4] for text in wanted]
    texts.step()
    for stream in texts.streams:
        assert isinstance(stream.error, DeviceError)
        assert str(stream.error) == "the GPU failed in 3 tokens of 3 sequences: the GPU had enough"
    for prompt in PROMPTS:
        texts.submit(prompt, **GREEDY)
    assert texts.finish()[3:] == [text[:TOKENS] for text in wanted]
    assert all(stream.error is None for stream in texts.streams[3:])


def test_a_lack_of_memory_for_running_ahead_is_not_an_error(model: Model, wanted: list[list[int]]) -> None:
    texts = Streams(model)
    texts.step()
    gpu.fail_allocation(30)
    assert texts.finish() == [text[:TOKENS] for text in wanted]


def test_nan_logits_end_only_their_stream(tmp_path: Path) -> None:
    """The row that was sent after them has no token and is discarded with the stream."""
    bad = 7
    path = write_with_nan(tmp_path / "m.gguf", SmallModel(layers=1, types={"*": "F32"}), bad)
    with Model(path, device="metal", prefix_memory=0) as model:
        expected = [piece.token for piece in model.session().stream([1, 2, 3], 6, **GREEDY)]
        assert bad not in expected
        texts = Streams(model)
        for prompt in ([1, 2, 3], [1, bad, 3]):
            texts.submit(prompt, 6, **GREEDY)
        assert texts.finish()[3:] == [expected, []]
    assert "is NaN" in str(texts.streams[4].error)


def greedy_tokens(
    model: Model, cores: Sequence[_core.Session], tokens: Sequence[Sequence[int]], *, continues: bool = False
) -> list[int]:
    """Append tokens to sessions in one batch and return the most probable token after each."""
    requests = [
        _core.Request.greedy(core, np.array(ids, np.int32), continues=continues)
        for core, ids in zip(cores, tokens, strict=True)
    ]
    return [chosen for (chosen,) in model.engine.core.forward_batch(requests)]


class Batch:
    """Sessions after a batch whose next tokens are in flight."""

    def __init__(self, model: Model) -> None:
        self.sessions = [model.session() for _ in PROMPTS]
        self.cores = [session.native for session in self.sessions]
        self.tokens = greedy_tokens(model, self.cores, PROMPTS, continues=True)


@pytest.fixture
def batch(model: Model) -> Iterator[Batch]:
    batch = Batch(model)
    yield batch
    for session in batch.sessions:
        session.close()


def test_sessions_take_their_rows_one_by_one(batch: Batch, wanted: list[list[int]]) -> None:
    before = gpu.counters().command_buffers
    for core, token, text in zip(batch.cores, batch.tokens, wanted, strict=True):
        assert choose(core, [token]) == [text[1]]
    assert gpu.counters().command_buffers == before  # only this is computed


def test_threads_take_their_rows_concurrently(batch: Batch, wanted: list[list[int]]) -> None:
    def follow(i: int) -> list[int]:
        text = [batch.tokens[i]]
        while len(text) < 6:
            text += choose(batch.cores[i], text[-1:])
        return text

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(follow, range(3))) == [text[:6] for text in wanted]


def test_each_session_reports_the_failure(model: Model, wanted: list[list[int]]) -> None:
    gpu.fail_command_buffer(2, message="the GPU had enough")
    batch = Batch(model)
    for core, token, prompt in zip(batch.cores[:2], batch.tokens, PROMPTS, strict=False):
        with pytest.raises(DeviceError, match="the GPU had enough"):
            choose(core, [token])
        assert core.position == len(prompt)
    batch.sessions[2].close()  # its row is discarded
    for core, text in zip(batch.cores[:2], wanted, strict=False):
        assert choose(core, [text[0]]) == [text[1]]


def test_diverging_sessions_do_not_affect_others(model: Model, batch: Batch, wanted: list[list[int]]) -> None:
    """One takes another token, one is forked and writes, one is closed and its pages are taken."""
    one, two, _ = batch.cores
    fork = two.fork()
    batch.sessions[2].close()
    with model.session() as other, model.session() as alone:
        assert other.forward_prompt(PROMPTS[2]) == wanted[2][0]
        another = (wanted[0][0] + 1) % VOCAB
        alone.forward_prompt(PROMPTS[0])
        assert choose(one, [another]) == [alone.forward_token_greedy(another)]
        for core in (two, fork):
            assert choose(core, [wanted[1][0]]) == [wanted[1][1]]
        assert other.forward_token_greedy(wanted[2][0]) == wanted[2][1]


def test_separately_sent_groups_merge(model: Model, batch: Batch, wanted: list[list[int]]) -> None:
    """A call takes rows of two passes in flight, and one of neither."""
    other = Batch(model)
    with model.session() as fresh:
        token = fresh.forward_prompt(PROMPTS[0])
        cores = [other.cores[1], fresh.native, batch.cores[2], other.cores[0]]
        tokens = [other.tokens[1], token, batch.tokens[2], other.tokens[0]]
        before = gpu.counters().command_buffers
        found = greedy_tokens(model, cores, [[token] for token in tokens])
    assert found == [wanted[1][1], wanted[0][1], wanted[2][1], wanted[0][1]]
    assert gpu.counters().command_buffers == before + 1
    for session in other.sessions:
        session.close()


@pytest.fixture
def steady_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace measured times by those of a GPU."""
    monkeypatch.setattr(RowCost, "seconds", lambda self, rows: 1 + 0.1 * (rows - 1))


@pytest.mark.usefixtures("steady_cost")
def test_texts_run_ahead_while_there_are_no_drafts(
    model: Model, wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafting starts a token later than it could: a pass in flight is not discarded."""
    prompt, truth = PROMPTS[0], wanted[0]

    class Scripted(LookupDrafter):
        """Drafts correctly after 6 tokens, until there are 14."""

        acceptance = Acceptance(0.9)
        made = -len(prompt)

        def append(self, tokens: Any, forced: bool = False) -> None:
            self.made += len(tokens)

        def best(self) -> Best:
            drafts = truth[self.made :] if 6 <= self.made < 14 else []
            return self.acceptance, lambda count: drafts[:count]

    monkeypatch.setattr("metal_prefill.generation._speculation.LookupDrafter", Scripted)
    text: list[int] = []
    with model.session() as session:
        passes = passes_of(lambda: text.extend(piece.token for piece in session.stream(prompt, 20)))
    n = len(prompt)
    assert passes == [
        Pass(n, 1, 0, 0),
        *[Pass(1, 1, n + made - 1, 1) for made in range(1, 7)],
        Pass(8, 1, n + 6, 0),  # 7 tokens so far: this adds 8
        Pass(1, 1, n + 14, 0),
        *[Pass(1, 1, n + made - 1, 1) for made in range(16, 20)],
    ]
    assert text == truth[:20]


@pytest.mark.usefixtures("steady_cost")
def test_drafts_change_no_text_and_discard_no_pass(model: Model, wanted: list[list[int]]) -> None:
    """The second text repeats itself."""
    text: list[int] = []
    with model.session() as session:
        passes = passes_of(lambda: text.extend(p.token for p in session.stream(PROMPTS[1], 2 * TOKENS)))
    assert text == wanted[1]
    positions = [p.position for p in passes]
    assert positions == sorted(set(positions))  # none is computed twice
    assert any(p.tokens > 1 and p.ahead == 0 for p in passes[1:])
    assert any(p.ahead for p in passes)
    drafted = {"speculate": "lookup"}
    assert Streams(model, *[drafted] * 3).finish() == [text[:TOKENS] for text in wanted]


def test_the_cost_of_a_pass_computed_early_is_its_gpu_time(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise single tokens would seem to take no time, and drafts never to pay."""
    noted: list[float] = []
    monkeypatch.setattr(RowCost, "note", lambda self, rows, seconds: noted.append(seconds))
    with model.session() as session:
        for _ in session.stream(PROMPTS[0], 6, **GREEDY):
            if noted:
                assert noted[-1] >= session.stats()["gpu_seconds"] > 0
            gpu.live_objects()  # waits until nothing runs
    assert len(noted) == 5
    texts = Streams(model)
    for _ in range(5):
        texts.step()
        gpu.live_objects()
    core = texts.streams[0].core
    assert core is not None
    assert noted[-1] >= core.stats()["gpu_seconds"] > 0
    for stream in texts.streams:
        stream.cancel()
    texts.finish()


def test_nothing_is_sent_after_a_known_last_token(model: Model, wanted: list[list[int]]) -> None:
    texts = Streams(model, {}, {"max_tokens": 5}, {})
    passes = passes_of(texts.finish)
    assert texts.made == [wanted[0][:TOKENS], wanted[1][:5], wanted[2][:TOKENS]]
    rows = [p.tokens for p in passes[1:]]
    assert rows == [3] * 4 + [2] * (TOKENS - 5)
