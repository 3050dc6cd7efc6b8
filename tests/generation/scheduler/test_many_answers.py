"""Several answers to one prompt share its prefill."""

from typing import Any

import numpy as np
import pytest
from support.scheduled_texts import TEXTS, alone, texts_of

from metal_prefill import Model, Piece, Scheduler


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

    def forward_pass(self, shares: Any) -> None:
        requests = [request for some, *_ in shares for request in some]
        before = sum(request.computed for request in requests)
        self._engine.forward_pass(shares)
        self.rows += sum(request.computed for request in requests) - before


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


def test_answers_to_a_prompt_share_one_prefill(cpu: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = np.random.default_rng(5).integers(1, 900, 300)
    engine: Any = CountingEngine(cpu.engine.core)
    monkeypatch.setattr(cpu.engine, "_core", engine)
    options: dict[str, Any] = {"temperature": 1.0, "seed": 3, "speculate": "off"}
    position = cpu.position
    texts = texts_of(cpu.generate_many([ids], 5, n=3, min_tokens=5, **options), 3)
    assert engine.rows == len(ids) + 2 + 3 * 4  # the last token once more for each other answer
    assert cpu.position == position
    assert texts[0] == alone(cpu, ids, 5, min_tokens=5, **options)
    assert len(set(texts)) == 3
    pieces = list(cpu.stream_many([ids], 5, n=3, logprobs=1, min_tokens=5, **options))
    for i, text in enumerate(texts):
        own = [piece for answer, piece in pieces if answer == i and isinstance(piece, Piece)]
        assert "".join(piece.text for piece in own) == text
        assert [piece.finish_reason for piece in own] == [None] * 4 + ["length"]
        assert all(piece.logprob is not None for piece in own)


def test_an_error_names_the_prompt_of_an_answer(cpu: Model) -> None:
    def wrong(ids: list[int]) -> list[int]:
        return [1 << 20]

    with pytest.raises(ValueError, match="prompt 0: a draft of speculate: token id 1048576"):
        list(cpu.generate_many([[1, 2, 1, 2]], 20, n=2, speculate=wrong))


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
