"""Scoring many prompts: the same values as one by one, with shared prefixes computed once."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.computed_tokens import ComputedTokens

from metal_prefill import ContextOverflowError, KVMemoryError, Model
from metal_prefill.tasks import _text_passes

RNG = np.random.default_rng(11)
SHARED = RNG.integers(1, 1000, 40)
TAILS = [RNG.integers(1, 1000, n) for n in (5, 1, 12, 5)]
PROMPTS: list[npt.NDArray[np.int64]] = [
    np.concatenate([SHARED, TAILS[0]]),
    RNG.integers(1, 1000, 9),  # shares nothing
    np.concatenate([SHARED, TAILS[1]]),
    np.concatenate([SHARED, TAILS[2]]),
    SHARED,  # a prefix of others
    np.concatenate([SHARED[:17], TAILS[3]]),  # shares less
    np.concatenate([SHARED, TAILS[0]]),  # again
    SHARED[:2],
]


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens that went through the layers, session by session."""
    return ComputedTokens(monkeypatch).counts


def test_scores_match_single_prompts(demo: Model) -> None:
    together = demo.score_many(PROMPTS)
    for prompt, scores in zip(PROMPTS, together, strict=True):
        alone = demo.score(prompt)
        assert scores.dtype == np.float32
        assert scores.shape == alone.shape
        if demo.backend == "cpu":  # the same bits however a prompt is split
            np.testing.assert_array_equal(scores, alone)
        else:
            # Operands are in half precision: each differs from float32 by up to 2e-4 of the largest.
            np.testing.assert_allclose(scores, alone, atol=4e-4 * np.abs(alone).max())
    assert demo.position == 0
    assert demo.score_many([]) == []


def test_a_shared_prefix_is_computed_once(demo: Model, computed: list[int]) -> None:
    demo.score_many([np.concatenate([SHARED, [i, i + 1]]) for i in range(10)])
    # The first computes all but its last token; each other one the last shared token, and one of its own.
    assert sum(computed) == len(SHARED) + 1 + 9 * 2


@pytest.mark.parametrize("order", [range(8), range(7, -1, -1), [3, 1, 4, 0, 7, 6, 5, 2]])
def test_order_changes_neither_results_nor_work(
    device: str, demo: Model, computed: list[int], order: Sequence[int]
) -> None:
    scores = demo.score_many([PROMPTS[i] for i in order])
    beginnings = {tuple(p[:n]) for p in PROMPTS for n in range(1, len(p))}
    # Each prefix once. Where prompts diverge, the last shared token again; fewer than 16 are not shared.
    assert len(beginnings) <= sum(computed) < len(beginnings) + 16 * len(PROMPTS)
    if device == "cpu":
        for i, result in zip(order, scores, strict=True):
            np.testing.assert_array_equal(result, demo.score(PROMPTS[i]))


def test_results_do_not_share_memory(demo: Model) -> None:
    first, second = demo.score_many([SHARED, SHARED])
    first[:] = 0
    assert second.all()


def test_progress_counts_prompts(demo: Model) -> None:
    seen: list[tuple[int, int]] = []
    demo.score_many(PROMPTS[:3], progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (3, 3)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    with pytest.raises(ZeroDivisionError):
        demo.score_many(PROMPTS, progress=lambda done, total: 1 // 0)


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        ([], ValueError, "prompt 1: the prompt is empty"),
        ([5], ValueError, "prompt 1: at least 2 tokens are needed, got 1"),
        ([5, 1 << 20], ValueError, "prompt 1: token id 1048576 at index 1"),
        ([1.5, 2.5], TypeError, "prompt 1: .* float64"),
        ([1] * 1026, ContextOverflowError, "prompt 1: 1026 tokens exceed the limit of 1025"),
    ],
)
def test_an_invalid_prompt_is_named_before_anything_is_computed(
    demo: Model, computed: list[int], bad: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        demo.score_many([PROMPTS[0], bad, PROMPTS[1]])
    assert computed == []


def test_a_prompt_that_fails_in_a_later_part_is_named(
    demo_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_text_passes, "MOST_TEXTS", 2)
    with (
        Model(demo_path, device="cpu", kv_memory=245760, prefix_memory=0) as small,  # two pages
        pytest.raises(KVMemoryError, match="prompt 3: "),
    ):
        small.score_many([[1, 2], [1, 3], [1, 4], [1] * 200])


def test_the_longest_prompt_fills_the_context(bundled: Model) -> None:
    (scores,) = bundled.score_many([[1] * 1025])
    assert scores.shape == (1024,)
