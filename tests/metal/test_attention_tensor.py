"""Attention on the matrix units of an M5, against a float64 softmax over every visible key."""

import numpy as np
import pytest
from support.attention_case import Case
from support.kernel_harness import Run, near
from support.paged import PAGE

HEADS = [((9, 3), 64), ((4, 4), 64), ((8, 1), 64), ((5, 1), 128), ((4, 2), 128)]
heads = pytest.mark.parametrize(("heads", "dims"), HEADS, ids=str)


@heads
@pytest.mark.parametrize(
    "sequences", [[(1, 0)], [(9, 0)], [(33, 0)], [(70, 45)], [(9, 120), (40, 0), (1, 70)]], ids=str
)
def test_attention_tensor(
    run: Run, heads: tuple[int, int], dims: int, sequences: list[tuple[int, int]]
) -> None:
    case = Case(*sequences, heads=heads, dims=(dims, dims))
    near(case.prefill_on_tensors(run), case.expected())


def test_attention_tensor_at_every_end_of_a_page(run: Run) -> None:
    """Positions after the last key hold NaN in the pages of the test."""
    for position in [0, 1, 30, 31, 32, PAGE - 12, PAGE - 1, PAGE, 2 * PAGE - 20]:
        for tokens in (2, 12, 33):
            case = Case((tokens, position))
            near(case.prefill_on_tensors(run), case.expected())


def test_attention_tensor_with_a_window(run: Run) -> None:
    for window in [1, 8, 40]:
        case = Case((50, 60), (20, 10), window=window)
        near(case.prefill_on_tensors(run), case.expected())


def test_attention_tensor_in_both_directions(run: Run) -> None:
    for window in [0, 1, 16, 41]:
        case = Case((50, 0), (3, 0), (70, 0), window=window, both_ways=True)
        near(case.prefill_on_tensors(run), case.expected())


def test_attention_tensor_with_alibi(run: Run) -> None:
    for heads in [(12, 12), (6, 2)]:
        case = Case((50, 0), (100, 0), heads=heads, both_ways=True, max_alibi_bias=8.0)
        near(case.prefill_on_tensors(run), case.expected())


def test_attention_tensor_with_relative_positions(run: Run) -> None:
    case = Case((50, 0), (300, 0), heads=(3, 3), both_ways=True, relative_rows=40)
    near(case.prefill_on_tensors(run), case.expected())


def test_attention_tensor_with_a_position_bias(run: Run) -> None:
    case = Case((50, 0), (300, 0), heads=(6, 6), both_ways=True, position_bias=True)
    near(case.prefill_on_tensors(run), case.expected())


@pytest.mark.parametrize("sinks", [-30.0, 0.0, 6.0, 200.0])
def test_attention_tensor_with_sinks(run: Run, sinks: float) -> None:
    case = Case((50, 0), (170, 0), window=65, both_ways=True, sinks=sinks)
    near(case.prefill_on_tensors(run), case.expected())


@pytest.mark.parametrize("dims", [64, 128])
def test_attention_tensor_with_limited_scores(run: Run, dims: int) -> None:
    case = Case((50, 60), (20, 10), dims=(dims, dims), spread=3.0, score_cap=1.5)
    near(case.prefill_on_tensors(run), case.expected())


def test_attention_tensor_with_scores_far_apart(run: Run) -> None:
    """The maximum of a row rises so much that the weights of earlier keys vanish."""
    case = Case((40, 100), spread=30.0)
    found, expected = case.prefill_on_tensors(run), case.expected()
    assert np.abs(found - expected).max() <= np.abs(case.prefill(run) - expected).max() + 2e-3
