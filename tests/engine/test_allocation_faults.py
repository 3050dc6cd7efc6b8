"""Memory that runs out: each allocation of a call fails once; the call raises and has changed nothing.

Each uses a fresh engine, so that all allocations of a first call are included. The result of a call without a
failure is the expectation for the calls after a failure.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from support.allocation_faults import failing_allocation
from support.kinds import contents
from support.native_requests import choose
from support.small_models import write
from support.tiny_models import TINY_MODELS, VOCAB

from metal_prefill import DeviceError, Model, Session, _core
from metal_prefill.generation._sampling import Options, core_sampler

OUT_OF_MEMORY = (MemoryError, DeviceError)
FIRST = [(7 * i + 3) % VOCAB for i in range(70)]  # a page and a part of the next
SECOND = [(11 * i + 5) % VOCAB for i in range(90)]  # three chunks
State = tuple[list[int], list[bytes]]


@dataclass
class Inputs:
    """A model, a session saved after FIRST, and a sampler's choices after FIRST and SECOND[:5]."""

    path: Path
    state_path: Path
    chosen: list[int]
    has_snapshots: bool


# Pages alone, and next to states.
@pytest.fixture(scope="module", params=("gemma3", "qwen35"))
def inputs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    folder = tmp_path_factory.mktemp("faults")
    shape = TINY_MODELS[request.param]
    path = write(folder / "m.gguf", shape)
    with Model(path, device="cpu", threads=1) as model, model.session() as session:
        session.forward_prompt(FIRST)
        session.save(folder / "s.session")
        sampler, chosen = new_sampler(), SECOND[:5]
        for _ in range(8):
            last = chosen[-1:] if len(chosen) > 5 else chosen
            chosen += choose(session.native, last, 0, sampler)
    return Inputs(path, folder / "s.session", chosen[5:], bool(shape.conv_layers or shape.scan))


def new_sampler() -> _core.Sampler:
    sampler = core_sampler(Options(0.8), 7, FIRST[:4])
    sampler.report(3)
    return sampler


def state(session: Session) -> State:
    return session.tokens, contents(session)


class Sessions:
    """A model that has computed only FIRST, in a session that shares its pages with a fork."""

    def __init__(self, inputs: Inputs, device: str) -> None:
        self.model = Model(inputs.path, device=device, threads=1, chunk_tokens=40)
        self.inputs = inputs
        self.device = device
        self.used = self.model.session()
        self.used.forward_prompt(FIRST)
        self.fork = self.used.fork()
        self.empty = self.model.session()

    def states(self) -> list[State]:
        return [state(session) for session in (self.used, self.fork, self.empty)]

    def close(self) -> None:
        """Close all, and expect that only the prefix tree still holds pages."""
        for session in (self.used, self.fork, self.empty):
            session.close()
        stats = self.model.stats()
        assert stats["kv_pool_bytes"] == stats["prefix_bytes"]
        self.model.close()


def drafts(s: Sessions) -> int:
    sampler, chosen = new_sampler(), s.inputs.chosen
    try:
        given = choose(s.used.native, SECOND[:5] + chosen[:-1], 7, sampler)
        assert given == chosen
        return sampler.position
    except OUT_OF_MEMORY:
        assert sampler.position == 4
        raise


def load(s: Sessions) -> State:
    with s.model.load_session(s.inputs.state_path) as session:
        return state(session)


def fork(s: Sessions) -> State:
    with s.used.fork() as copy:
        return state(copy)


def save(s: Sessions) -> Path:
    saved = s.inputs.state_path.with_name("again.session")
    saved.write_text("before")
    try:
        s.used.save(saved)
    except OUT_OF_MEMORY:
        assert saved.read_text() == "before"
        raise
    return saved


def open_again(s: Sessions) -> int:
    with Model(s.model.path, device=s.device, threads=3) as model:  # a team to start and to stop
        return model.config.n_layers


CALLS: dict[str, Callable[[Sessions], object]] = {
    "open": open_again,
    "prompt": lambda s: s.used.forward_prompt_logits(SECOND).tobytes(),
    "token": lambda s: s.used.forward_token(5).tobytes(),
    "greedy token": lambda s: s.used.forward_token_greedy(5),
    "drafts": drafts,
    "score": lambda s: s.used.score(SECOND).tobytes(),
    "fork": fork,
    "save": save,
    "load": load,
}
CASES = [
    *(("cpu", call) for call in CALLS),
    # The others allocate nothing on the GPU that these do not.
    *(("metal", call) for call in ("score", "save", "load")),
]


def each_failure(
    make: Callable[[], Sessions], device: str, call: Callable[[Sessions], object], **options: Any
) -> Iterator[tuple[Sessions, Any, str]]:
    """Call it once for each of its allocations, which fails; yield the result or error, and which failed."""
    for nth in count(1):
        sessions = make()
        with failing_allocation(device, nth, **options) as fault:
            try:
                result = call(sessions)
            except OUT_OF_MEMORY as error:
                result = error.with_traceback(None)  # which would keep what the call had made
        yield sessions, result, f"allocation {nth}" if fault.came else ""
        sessions.close()
        if not fault.came:
            break
    assert nth > 1, "nothing was allocated"


@pytest.mark.parametrize(("device", "call"), CASES, indirect=["device"])
def test_a_call_without_memory_raises_and_changes_nothing(inputs: Inputs, device: str, call: str) -> None:
    def sessions() -> Sessions:
        return Sessions(inputs, device)

    plain = sessions()
    before, expected = plain.states(), CALLS[call](plain)
    plain.close()
    for used, given, failed in each_failure(sessions, device, CALLS[call]):
        raised = isinstance(given, OUT_OF_MEMORY)
        # A snapshot without memory is omitted, and the call succeeds.
        assert raised == bool(failed) or (inputs.has_snapshots and failed), failed
        if raised:
            assert used.states() == before, failed
            given = CALLS[call](used)
        assert given == expected, failed


def test_a_batch_without_memory_fails_some_sequences_and_leaves_others_unaffected(
    inputs: Inputs, device: str
) -> None:
    def call(s: Sessions) -> list[Any]:
        sessions, tokens = [s.used, s.fork, s.empty], [SECOND, FIRST[:9], FIRST]
        return s.model.forward_batch(sessions, tokens, output="logits", return_errors=True)

    plain = Sessions(inputs, device)
    before, expected = plain.states(), [logits.tobytes() for logits in call(plain)]
    after = plain.states()
    plain.close()
    errors: set[int] = set()
    for sessions, results, failed in each_failure(lambda: Sessions(inputs, device), device, call):
        each = [results] * 3 if isinstance(results, OUT_OF_MEMORY) else results
        for i, (result, held) in enumerate(zip(each, sessions.states(), strict=True)):
            if isinstance(result, OUT_OF_MEMORY):
                errors.add(i)
                assert held == before[i], f"{failed}, session {i}"
            else:
                assert held == after[i], f"{failed}, session {i}"
                assert result.tobytes() == expected[i], f"{failed}, session {i}"
    assert errors == {0, 1, 2}


def test_reuse_without_memory_never_keeps_wrong_rows(inputs: Inputs) -> None:
    """The session then has the prefix that it shares with the prompt, or its earlier tokens."""
    prompt = FIRST[:40] + SECOND

    def sessions_with_the_prompt_known() -> Sessions:
        sessions = Sessions(inputs, "cpu")
        with sessions.model.session() as other:
            other.forward_prompt(prompt[:120], reuse=True)
        return sessions

    def call(s: Sessions) -> int:
        return s.used.forward_prompt(prompt, reuse=True)

    plain = sessions_with_the_prompt_known()
    before, expected = state(plain.used), call(plain)
    ids, _ = state(plain.used)
    plain.close()
    lengths: set[int] = set()
    for sessions, token, _ in each_failure(sessions_with_the_prompt_known, "cpu", call):
        if isinstance(token, OUT_OF_MEMORY):
            held, held_rows = state(sessions.used)
            if (held, held_rows) != before:
                lengths.add(len(held))
                assert held == ids[: len(held)]
                with sessions.model.session() as alone:
                    alone.forward_prompt(held)
                    assert held_rows == state(alone)[1]
            token = call(sessions)
        assert token == expected
    assert lengths == {120}


def test_sessions_close_without_memory(inputs: Inputs) -> None:
    """Only their cached prefixes are lost."""

    def sessions_to_close() -> Sessions:
        sessions = Sessions(inputs, "cpu")
        sessions.used.forward_prompt(SECOND, reuse=True)
        return sessions

    for _, error, _ in each_failure(sessions_to_close, "cpu", lambda s: s.used.close(), with_gil=True):
        assert error is None
