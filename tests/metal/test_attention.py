"""Attention kernels, against a float64 softmax over every visible key."""

from collections.abc import Callable
from typing import Any

import metal_kernels
import numpy as np
import pytest
from support.kernels.attention_case import PREFILL_SIZES, Case
from support.kernels.kernel_harness import Array, Doubles, Run, ceil_div
from support.paged import PAGE

SHAPES: list[dict[str, Any]] = [
    {"heads": (9, 3), "dims": (64, 64)},
    {"heads": (4, 4), "dims": (32, 32)},
    {"heads": (8, 1), "dims": (80, 80)},
    {"heads": (6, 2), "dims": (96, 64)},
    {"heads": (5, 1), "dims": (128, 128)},
    {"heads": (2, 1), "dims": (256, 256)},
    {"heads": (2, 2), "dims": (40, 72)},
    {"heads": (4, 1), "dims": (512, 512)},
    {"heads": (2, 1), "dims": (264, 392)},
    {"heads": (2, 2), "dims": (384, 40)},
]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "{}x{}_{}_{}".format(*s["heads"], *s["dims"]))
caches = pytest.mark.parametrize("cache", [np.float16, np.float32], ids=["f16", "f32"])


@shapes
@caches
def test_attention_decode(run: Run, shape: dict[str, Any], cache: type) -> None:
    for sequences in [[(1, 0)], [(1, 70)], [(3, 41)], [(1, 64), (2, 127), (1, 5)]]:
        case = Case(*sequences, cache=cache, **shape)
        for threads in (32, 256):
            case.decode(run, threads=threads)


def test_attention_decode_over_several_threadgroups(run: Run) -> None:
    for splits in [2, 5]:
        for sequence in [(1, 300), (2, 3)]:
            Case(sequence).decode(run, splits)


def test_attention_decode_in_a_window(run: Run) -> None:
    for splits in [1, 4]:
        Case((2, 200), (1, 60), (1, 10), window=50).decode(run, splits)  # the first splits see no key at all


@pytest.mark.parametrize("dims", PREFILL_SIZES)
@caches
def test_limited_scores(run: Run, dims: int, cache: type) -> None:
    """Most of the scores are beyond the limit."""
    case = Case((9, 120), (1, 70), dims=(dims, dims), cache=cache, spread=3.0, score_cap=1.5)
    case.decode(run, 2)
    case.prefill(run)


def test_a_row_of_attention_decode_is_bit_identical_to_that_row_alone(run: Run) -> None:
    """The other rows, and their numbers of threads and splits, have no influence."""
    for position in [30, PAGE - 2, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE - 1]:
        splits = 1 if position < PAGE else 2
        alone = Case((1, position)).decode(
            run, splits, threads=32 * min(8, ceil_div(position + 1, 4 * splits))
        )
        together = Case((2, 3), (1, position), (1, 400)).decode(run, [1, 1, splits, 3])
        np.testing.assert_array_equal(together[2], alone[0])


@shapes
@caches
def test_attention_prefill(run: Run, shape: dict[str, Any], cache: type) -> None:
    for sequences in [[(1, 0)], [(9, 0)], [(33, 0)], [(17, 45)], [(9, 120), (40, 0), (1, 70)]]:
        Case(*sequences, cache=cache, **shape).prefill(run)


@pytest.mark.emulator
@pytest.mark.parametrize("dims", [64, 128])
def test_attention_prefill_finds_the_elements_of_a_lane(run: Run, dims: int) -> None:
    emulator: Any = getattr(metal_kernels.testing_module(), "emulator", None)
    if emulator is None:
        pytest.skip("a GPU has a layout of its own")
    options = emulator.options()
    options.matrix_layout = emulator.MatrixLayout.CONSECUTIVE
    emulator.set_options(options)
    Case((33, 40), (1, 70), heads=(4, 2), dims=(dims, dims)).prefill(run)


@pytest.mark.parametrize("simdgroups", [1, 4])
def test_attention_prefill_at_tile_boundaries(run: Run, simdgroups: int) -> None:
    for tokens in [2, 7, 8, 31, 32, 129]:
        Case((tokens, 0)).prefill(run, simdgroups)


def test_attention_prefill_after_other_chunks(run: Run) -> None:
    for position in [31, 32, 33, PAGE - 12, PAGE - 1, PAGE, PAGE + 1, 512]:
        Case((12, position)).prefill(run)


def test_attention_at_any_position_within_a_page(run: Run) -> None:
    Case(*((1, p) for p in range(2 * PAGE)), heads=(3, 1), dims=(32, 32)).decode(run)
    Case(*((2, p) for p in range(2 * PAGE)), heads=(3, 1), dims=(32, 32)).prefill(run)


_RELATIVE: dict[str, Any] = {"heads": (3, 3), "both_ways": True, "relative_rows": 40}


@pytest.mark.parametrize("cache", [np.float16, np.float32])
@pytest.mark.parametrize("dims", [16, 64])
def test_relative_scores(run: Run, dims: int, cache: type) -> None:
    Case((50, 0), (3, 0), (130, 0), dims=(dims, dims), cache=cache, **_RELATIVE).added(run, 16)


# Prompts, in 8x8 matrices and on the matrix units of newer GPUs.
prompts = pytest.mark.parametrize("prefill", [Case.prefill, Case.prefill_on_tensors])
Prefill = Callable[..., Array]


@prompts
def test_prompts_in_a_window(run: Run, prefill: Prefill) -> None:
    for window in [1, 8, 40]:
        prefill(Case((50, 60), (20, 10), window=window), run)


@prompts
def test_bidirectional_prompts(run: Run, prefill: Prefill) -> None:
    for window in [0, 1, 16, 41]:
        prefill(Case((50, 0), (3, 0), (70, 0), window=window, both_ways=True), run)


@prompts
def test_prompts_with_alibi(run: Run, prefill: Prefill) -> None:
    for heads in [(8, 8), (12, 12), (6, 2), (1, 1)]:
        prefill(Case((50, 0), (3, 0), (100, 0), heads=heads, both_ways=True, max_alibi_bias=8.0), run)


@prompts
def test_prompts_with_a_position_bias(run: Run, prefill: Prefill) -> None:
    prefill(Case((50, 0), (3, 0), (140, 0), heads=(3, 3), both_ways=True, position_bias=True), run)


@prompts
def test_prompts_with_relative_positions(run: Run, prefill: Prefill) -> None:
    prefill(Case((50, 0), (3, 0), (140, 0), **_RELATIVE), run)


@pytest.mark.parametrize(
    ("prefill", "shape"),
    [*((Case.prefill, shape) for shape in SHAPES[:2]), (Case.prefill_on_tensors, SHAPES[0])],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
@pytest.mark.parametrize("sinks", [-30.0, 6.0, 200.0])
def test_prompts_with_sinks(run: Run, prefill: Prefill, shape: dict[str, Any], sinks: float) -> None:
    """Errors are relative to each head, whose values are smaller the larger its sink is."""
    case = Case((50, 0), (3, 0), (170, 0), **shape, window=65, both_ways=True, sinks=sinks)

    def compare(found: Array, expected: Doubles) -> None:
        for one, wanted in zip(*(x.reshape(case.n_heads, -1) for x in (found, expected)), strict=True):
            assert np.abs(one - wanted).max() <= 2e-3 * np.abs(wanted).max() + 1e-7  # a subnormal half

    prefill(case, run, compare=compare)


@pytest.mark.parametrize("position", [0, 100])
def test_attention_with_scores_far_apart(run: Run, position: int) -> None:
    case = Case((20, position), spread=60.0)
    case.decode(run, within=5e-4)  # float32 scores of about 200
    Case((20, position), spread=60.0, cache=np.float32).prefill(run)


HEADS = [((9, 3), 64), ((4, 4), 64), ((8, 1), 64), ((5, 1), 128), ((4, 2), 128)]
heads = pytest.mark.parametrize(("heads", "dims"), HEADS, ids=str)


@heads
@pytest.mark.parametrize(
    "sequences", [[(1, 0)], [(9, 0)], [(33, 0)], [(70, 45)], [(9, 120), (40, 0), (1, 70)]], ids=str
)
def test_attention_tensor(
    run: Run, heads: tuple[int, int], dims: int, sequences: list[tuple[int, int]]
) -> None:
    Case(*sequences, heads=heads, dims=(dims, dims)).prefill_on_tensors(run)


def test_attention_tensor_at_every_end_of_a_page(run: Run) -> None:
    """Positions after the last key hold NaN in the pages of the test."""
    for position in [0, 1, 30, 31, 32, PAGE - 12, PAGE - 1, PAGE, 2 * PAGE - 20]:
        for tokens in (2, 12, 33):
            Case((tokens, position)).prefill_on_tensors(run)


@pytest.mark.parametrize("dims", [64, 128])
def test_attention_tensor_with_limited_scores(run: Run, dims: int) -> None:
    Case((50, 60), (20, 10), dims=(dims, dims), spread=3.0, score_cap=1.5).prefill_on_tensors(run)


def test_attention_tensor_with_scores_far_apart(run: Run) -> None:
    """The maximum of a row rises so much that the weights of earlier keys vanish."""
    case = Case((40, 100), spread=30.0)
    errors: list[float] = []

    def note(found: Array, expected: Doubles) -> None:
        errors.append(float(np.abs(found - expected).max()))

    for prefill in (case.prefill, case.prefill_on_tensors):
        prefill(run, compare=note)
    assert max(errors[40:]) <= max(errors[:40]) + 2e-3
