"""Greedy text for which the GPU starts the next token before the host has seen the last one."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.forked import in_child
from support.kernels.emulated_gpu import command_buffers_of, require_emulator
from support.scheduled_texts import tokens_alone
from support.small_models import MODELS, write

from metal_prefill import DeviceError, Model, Session, SessionBusyError

pytestmark = [pytest.mark.emulator, pytest.mark.usefixtures("own_device")]

gpu = require_emulator()
PROMPT = [5 + 7 * i for i in range(40)]
TOKENS = 28  # beyond the first page, which ends at position 64
ONE_BY_ONE: Any = {"temperature": 0.0, "speculate": "off"}


@pytest.fixture
def session(model: Model) -> Iterator[Session]:
    with model.session() as session:
        yield session


@pytest.fixture(scope="module")
def wanted(model: Model) -> list[int]:
    return tokens_alone(model, PROMPT, TOKENS)


def tokens_of(session: Session, n: int = TOKENS, **options: Any) -> list[int]:
    return [piece.token for piece in session.stream(PROMPT, n, **{**ONE_BY_ONE, **options})]


def ahead(run: Any) -> list[int]:
    """Return how far ahead each command buffer of `run` was committed before the host saw earlier results."""
    return [buffer.ahead_of_host for buffer in command_buffers_of(run)]


def test_the_next_token_is_sent_before_the_host_waits_for_the_last(
    session: Session, wanted: list[int]
) -> None:
    before, made = gpu.counters(), list[int]()
    sent = ahead(lambda: made.extend(tokens_of(session)))
    after = gpu.counters()
    assert made == wanted
    assert session.position == len(PROMPT) + TOKENS - 1
    # But for the prompt, all find another in flight; nothing is sent after the last.
    assert sent == [0] + [1] * (TOKENS - 1)
    assert after.waits - before.waits == TOKENS  # one for each token

    def one_by_one() -> None:
        session.forward_prompt(PROMPT, reuse=True)
        for token in wanted[:5]:
            session.forward_token_greedy(token)

    assert set(ahead(one_by_one)) == {0}


@pytest.mark.parametrize(
    "options",
    [{"temperature": 0.7, "seed": 1}, {"logprobs": 0}, {"min_tokens": 3}],
    ids=lambda options: next(iter(options)),
)
def test_texts_that_need_the_host_between_tokens_do_not_run_ahead(
    session: Session, options: dict[str, Any]
) -> None:
    assert set(ahead(lambda: tokens_of(session, 6, **options))) == {0}


@pytest.mark.parametrize(("name", "ahead"), [("gemma4", False), ("gemma4, without inputs", True)])
def test_layers_with_inputs_need_the_host_between_tokens(tmp_path: Path, name: str, ahead: bool) -> None:
    with Model(write(tmp_path / "m.gguf", MODELS[name]), device="metal") as model:
        assert model.engine.core.runs_ahead == ahead


def test_work_after_a_stop_is_discarded(model: Model, session: Session, wanted: list[int]) -> None:
    stop = wanted[9]
    first = wanted.index(stop)
    assert tokens_of(session, stop=stop) == wanted[: first + 1]
    assert session.position == len(PROMPT) + first
    with model.session() as other:
        other.forward_prompt([*PROMPT, *wanted[:first]])
        np.testing.assert_allclose(session.forward_token(3), other.forward_token(3), atol=1e-3)
    assert tokens_of(session) == wanted


def test_appending_another_token_than_the_chosen_one_works(session: Session, wanted: list[int]) -> None:
    """The row that was written ahead is overwritten."""
    text = session.stream(PROMPT, TOKENS, **ONE_BY_ONE)
    first = next(text).token
    other = (first + 1) % 320
    logits = session.forward_token(other)
    with pytest.raises(SessionBusyError):
        next(text)
    session.rewind(len(PROMPT))
    session.forward_token(first)
    session.rewind(len(PROMPT))
    np.testing.assert_array_equal(session.forward_token(other), logits)
    assert session.forward_token_greedy(other) >= 0


def test_a_rewound_session_ignores_earlier_work_in_flight(session: Session, wanted: list[int]) -> None:
    """The next token has the same position and id, after another text."""
    text = session.stream(PROMPT, TOKENS, **ONE_BY_ONE)
    chosen = [next(text).token, next(text).token]
    position = session.position
    found = []
    for _ in range(2):
        session.rewind(0)
        session.forward_prompt(PROMPT[::-1])
        session.forward_token(chosen[0])
        assert session.position == position
        found.append(session.forward_token_greedy(chosen[1]))
    assert found[0] == found[1]


def test_forks_between_tokens_continue_as_they_would_alone(session: Session, wanted: list[int]) -> None:
    """A fork shares the page that the pass in flight writes to, until one of them writes."""
    made: list[int] = []
    forks = []
    for piece in session.stream(PROMPT, 5, **ONE_BY_ONE):
        made.append(piece.token)
        forks.append(session.fork())
    assert made == wanted[:5]
    for n, fork in enumerate(forks):
        assert [fork.forward_token_greedy(token) for token in wanted[n:7]] == wanted[n + 1 : 8]
        fork.close()


def test_copies_of_pages_wait_for_work_of_other_sessions(
    model: Model, session: Session, wanted: list[int]
) -> None:
    with model.session() as other:
        first, second = session.stream(PROMPT, 2, **ONE_BY_ONE), other.stream(PROMPT, 9, **ONE_BY_ONE)
        made = [next(first).token, next(second).token]  # the second token of each is in flight
        assert (
            next(first).token == wanted[1]
        )  # which leaves nothing of this session, and the pass of the other
        fork = session.fork()
        assert fork.forward_token_greedy(wanted[1]) == wanted[2]  # the fork takes a copy of the last page
        assert made == [wanted[0]] * 2
        assert [piece.token for piece in second] == wanted[1:9]
        fork.close()


def test_two_sessions_have_tokens_in_flight_at_once(model: Model, wanted: list[int]) -> None:
    """Each has two command buffers: none of the four uses memory that another still needs."""
    with model.session() as one, model.session() as two:
        texts = [session.stream(PROMPT, 8, **ONE_BY_ONE) for session in (one, two)]
        made: list[list[int]] = [[], []]

        def run() -> None:
            for _ in range(8):
                for tokens, text in zip(made, texts, strict=True):
                    tokens.append(next(text).token)

        sent = ahead(run)
        assert made == [wanted[:8], wanted[:8]]
    # When one session sends its next token, its last one and that of the other are in flight.
    assert max(sent) == 2
    assert sent.count(2) > 8


@pytest.mark.parametrize(("nth", "position"), [(1, 0), (2, 0), (3, len(PROMPT))])
def test_a_failed_commit_raises_and_changes_nothing(
    session: Session, wanted: list[int], nth: int, position: int
) -> None:
    """The prompt or a token sent ahead is not committed; nothing waits for passes that were never sent."""
    gpu.refuse_commit(nth, message="no more")
    with pytest.raises(gpu.ValidationError, match="commit: no more"):
        tokens_of(session, 5)
    assert session.position == position
    assert tokens_of(session, 5) == wanted[:5]


@pytest.mark.parametrize("nth", [1, 3])
def test_a_failure_affects_only_its_token(session: Session, wanted: list[int], nth: int) -> None:
    text = session.stream(PROMPT, TOKENS, **ONE_BY_ONE)
    made = [next(text).token]  # the second is in flight
    gpu.fail_command_buffer(nth, message="the GPU had enough")
    with pytest.raises(DeviceError, match=rf"at position {len(PROMPT) + nth}: the GPU had enough"):
        made.extend(piece.token for piece in text)
    assert made == wanted[: 1 + nth]
    assert session.position == len(PROMPT) + nth
    assert tokens_of(session) == wanted


def test_a_failure_of_unused_work_is_not_reported(session: Session, wanted: list[int]) -> None:
    gpu.fail_command_buffer(2, message="the GPU had enough")
    text = session.stream(PROMPT, TOKENS, **ONE_BY_ONE)
    assert next(text).token == wanted[0]
    del text
    assert session.forward_token_greedy(wanted[0] + 1) >= 0


def test_the_last_page_can_be_filled(path: Path, wanted: list[int]) -> None:
    """Running ahead needs a page earlier than the text does: without one, it waits."""
    with Model(path, device="metal", kv_memory=1) as model, model.session() as session:
        n = 64 - len(PROMPT) + 1
        assert tokens_of(session, n) == wanted[:n]
        assert session.position == 64


def test_the_context_can_be_filled(model: Model, wanted: list[int]) -> None:
    with model.session(max_context=50) as session:
        assert tokens_of(session) == wanted[:11]
        assert session.position == 50


def test_a_forked_process_does_not_wait_for_the_gpu(model: Model) -> None:
    session = model.session()
    text = session.stream(PROMPT, TOKENS, **ONE_BY_ONE)
    next(text)

    def in_fork() -> str:
        session.close()
        return "closed"

    assert in_child(in_fork) == "closed"
    assert next(text).token >= 0


def test_closing_waits_for_work_in_flight(path: Path) -> None:
    before = gpu.live_objects()  # of the model that other tests use
    with Model(path, device="metal") as model:
        next(model.session().stream(PROMPT, TOKENS, **ONE_BY_ONE))
    assert gpu.live_objects() == before


def test_threads_run_ahead_concurrently(model: Model, wanted: list[int]) -> None:
    def text(_: int) -> list[int]:
        with model.session() as session:
            return tokens_of(session, 10)

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(text, range(3))) == [wanted[:10]] * 3
