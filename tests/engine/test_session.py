"""Behaviour of sessions on every engine: position, errors, reuse, forks, threads, progress."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.missing import resident_bytes
from support.small_models import SmallModel, with_tensor, write

from metal_prefill import ClosedError, ContextOverflowError, Model, Session, _core, synth

PROMPT = list(range(100, 140))


def continuation(session: Session, token: int, n: int) -> list[int]:
    """Greedy tokens after `token`, which is not in the cache yet."""
    made = []
    for _ in range(n):
        token = session.forward_token_greedy(token)
        made.append(token)
    return made


def test_greedy_token_is_the_argmax_of_the_logits(demo: Model) -> None:
    session = demo.session()
    token = session.forward_prompt(PROMPT)
    assert session.position == len(PROMPT)
    following = session.forward_token_greedy(token)
    assert session.position == len(PROMPT) + 1
    session.reset()
    assert session.position == 0
    assert token == int(np.argmax(session.forward_prompt_logits(PROMPT)))
    assert following == int(np.argmax(session.forward_token(token)))


def test_the_lowest_id_wins_a_tie(device: str, tmp_path: Path) -> None:
    """Tokens with the same embedding have the same logit; their rows are near to each other, or far."""
    plain = write(tmp_path / "plain.gguf", SmallModel(layers=1, embedding="F32", types={"*": "F32"}))
    with Model(plain, device=device) as model:
        best = model.forward_prompt([1, 2, 3])
    for others in ((best ^ 1,), (best ^ 1, (best + 100) % 320), ((best + 200) % 320,)):
        assert not {best, *others} & {1, 2, 3}

        def copy(values: Any, others: tuple[int, ...] = others) -> None:
            rows = values.reshape(320, -1)
            rows[list(others)] = rows[best]

        path = with_tensor(tmp_path / "tied.gguf", plain, "token_embd.weight", copy)
        with Model(path, device=device) as model:
            logits = model.session().forward_prompt_logits([1, 2, 3])
            assert np.flatnonzero(logits == logits.max()).tolist() == sorted((best, *others))
            assert model.forward_prompt([1, 2, 3]) == min(best, *others)


def test_invalid_tokens_are_rejected_and_nothing_changes(demo: Model) -> None:
    session = demo.session()
    first = session.forward_prompt(PROMPT)
    invalid: Any
    for invalid in ([], [[1, 2]], [1.0], [5, -1], [5, 1 << 30]):
        for call in (session.forward_prompt, session.forward_prompt_logits):
            with pytest.raises((TypeError, ValueError), match=r"prompt|token"):
                call(invalid)
    for token in (-1, 1 << 31, 1 << 40):
        for forward in (session.forward_token, session.forward_token_greedy):
            with pytest.raises(ValueError, match="outside the vocabulary"):
                forward(token)
    assert session.position == len(PROMPT)
    expected = session.forward_token(first)
    session.rewind(len(PROMPT))
    np.testing.assert_array_equal(session.forward_token(first), expected)


def test_overflow_of_the_context_changes_nothing(device: str, fast_demo_path: Path) -> None:
    with Model(fast_demo_path, device=device, max_context=48) as model, model.session() as session:
        first = session.forward_prompt(PROMPT)
        with pytest.raises(ContextOverflowError, match=r"40 \+ 9 .* 48"):
            session.forward_prompt(PROMPT[:9])
        assert session.position == 40
        expected = continuation(session, first, 8)
        assert session.position == 48
        with pytest.raises(ContextOverflowError, match="48"):
            session.forward_token(expected[-1])
        session.rewind(40)
        assert continuation(session, first, 8) == expected


def test_reuse_counts_the_whole_prompt_against_the_context(device: str, fast_demo_path: Path) -> None:
    with Model(fast_demo_path, device=device, max_context=len(PROMPT)) as model, model.session() as session:
        expected = session.forward_prompt(PROMPT)
        with pytest.raises(ContextOverflowError, match=r"0 \+ 41"):
            session.forward_prompt([*PROMPT, 1], reuse=True)
        assert session.position == len(PROMPT)
        assert session.forward_prompt(PROMPT, reuse=True) == expected
        assert session.stats()["tokens_reused"] == len(PROMPT) - 1
        session.forward_prompt(PROMPT[:30], reuse=True)
        assert (session.position, session.stats()["tokens_reused"]) == (30, 29)


def test_a_text_that_is_scored_has_two_tokens_and_leaves_the_position(demo: Model) -> None:
    scores = demo.score(PROMPT)
    assert scores.shape == (len(PROMPT) - 1,)
    assert scores.dtype == np.float32
    assert demo.position == 0
    with pytest.raises(ValueError, match="two tokens"):
        demo.score([5])


def test_ctrl_c_stops_between_chunks(device: str, fast_demo_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        if done == 16:
            signal.raise_signal(signal.SIGINT)

    with Model(fast_demo_path, device=device, chunk_tokens=16) as model:
        with pytest.raises(KeyboardInterrupt):
            model.forward_prompt(PROMPT, progress=interrupt)
        assert 16 <= model.position < 40


def test_a_closed_model_raises(demo: Model, tmp_path: Path) -> None:
    session = demo.session()
    session.save(tmp_path / "saved")
    session.close()
    demo.close()
    calls: list[Callable[[Model], object]] = [
        lambda m: m.forward_prompt([1]),
        lambda m: m.forward_token(1),
        lambda m: m.score([1, 2]),
        lambda m: m.score_many([[1, 2]]),
        lambda m: m.reset(),
        lambda m: m.stats(),
        lambda m: m.position,
        lambda m: m.session(),
        lambda m: m.load_session(tmp_path / "saved"),
        lambda m: m.device,
        lambda _: session.save(tmp_path / "again"),
    ]
    for call in calls:
        with pytest.raises(ClosedError, match="closed"):
            call(demo)
    demo.close()
    assert "closed" in repr(demo)


@pytest.mark.slow
@pytest.mark.skipif(
    _core.has_emulator and _core.emulator.sanitizer == "address",
    reason="AddressSanitizer keeps freed memory for a while, to see who still uses it",
)
def test_close_releases_the_memory_of_a_session(tmp_path: Path) -> None:
    shape: dict[str, Any] = {"layers": 4, "dim": 64, "heads": 16, "kv_heads": 16, "head_dim": 128, "ffn": 64}
    path = synth.synthesize(tmp_path / "m.gguf", preset="tiny", context=1024, vocab=288, **shape)
    with Model(path, device="cpu", kv_dtype="f32") as model:
        sessions = [model.session() for _ in range(60)]  # a pool keeps the memory of a few
        for session in sessions:
            session.forward_prompt([1] * 60)
        held = sum(session.stats()["kv_cache_bytes"] for session in sessions)
        before = resident_bytes()
        for session in sessions:
            session.close()
        assert before - resident_bytes() > 0.9 * held > 150e6


def test_the_environment_selects_the_device(
    device: str, demo_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("METAL_PREFILL_DEVICE", device)
    for asked in ("auto", "cpu", "metal"):
        with Model(demo_path, device=asked) as model:
            assert model.backend == device
    monkeypatch.setenv("METAL_PREFILL_DEVICE", "gpu")
    with pytest.raises(ValueError, match=r"METAL_PREFILL_DEVICE must be one of auto, cpu, metal; got 'gpu'"):
        Model(demo_path, device="cpu")


def test_sessions_have_the_limit_of_their_model(demo_path: Path, tmp_path: Path) -> None:
    with Model(demo_path, device="cpu", max_context=8) as model:
        with model.session() as session:
            assert session.max_context == 8
            with pytest.raises(ContextOverflowError, match="exceeds the context of 8"):
                session.forward_prompt([1] * 9)
            session.save(tmp_path / "state")
        with model.load_session(tmp_path / "state") as loaded:
            assert loaded.max_context == 8
        with model.session(max_context=16) as longer:
            assert longer.max_context == 16
