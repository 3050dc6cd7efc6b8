"""Products on tensors of Metal 4, against float64 products with the dequantized weights.

They are tested like matmul, with fewer types: the code that reads weights is the same.
"""

import pytest
from support.kernel_harness import Run
from support.matmul_harness import (
    TALL_TOKENS,
    TILES,
    check_edges,
    check_longer_rows,
    check_product,
    check_swiglu,
    check_swiglu_keeps_nan,
    columns,
)

KINDS = ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "F16", "BF16")


@pytest.mark.parametrize("kind", KINDS)
def test_all_supported_types(run: Run, kind: str) -> None:
    for cols, tile in ((8, "narrow"), (40, "narrow"), (256, "wide")):  # 40: a last step of eight columns
        check_product(run, "matmul_tensor", tile, kind, 70, columns(kind, cols), 33, seed=6)


@pytest.mark.parametrize("tile", TILES)
def test_tile_boundaries(run: Run, tile: str) -> None:
    for tokens in (1, 9, 31, 32, 33, 65):
        check_edges(run, "matmul_tensor", tile, tokens, ([64], [1], [40, 9, 11, 5]))


@pytest.mark.parametrize("tile", TILES)
def test_long_rows(run: Run, tile: str) -> None:
    check_product(run, "matmul_tensor", tile, "Q4_0", 66, 576, 70, seed=1)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "F16"])
def test_tall_tiles(run: Run, kind: str) -> None:
    for tokens, cols in ((TALL_TOKENS, 32), (TALL_TOKENS + 37, 96)):
        check_product(run, "matmul_tensor", "tall", kind, 70, columns(kind, cols), tokens, seed=6)


@pytest.mark.parametrize("more", [0, 1, 127, 128])
def test_the_last_tall_tile_adds_to_no_token_twice(run: Run, more: int) -> None:
    """It begins among the tokens of the tile before."""
    check_edges(run, "matmul_tensor", "tall", TALL_TOKENS + more, ([64], [1], [40, 9, 11, 5]))


@pytest.mark.parametrize(("kind", "act"), [("Q4_0", "silu"), ("F16", "gelu")])
def test_swiglu_of_tall_tiles(run: Run, kind: str, act: str) -> None:
    sizes = ((TALL_TOKENS, 32), (TALL_TOKENS + 1, 45), (2 * TALL_TOKENS - 1, 8))
    check_swiglu(run, "matmul_tensor_swiglu", "tall", kind, act, sizes)


def test_the_rest_of_a_longer_row_is_unchanged(run: Run) -> None:
    check_longer_rows(run, "matmul_tensor", "narrow")


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("kind", "act"), [("Q4_0", "silu"), ("Q4_K", "gelu"), ("F16", "silu")])
def test_swiglu(run: Run, kind: str, tile: str, act: str) -> None:
    check_swiglu(run, "matmul_tensor_swiglu", tile, kind, act)


def test_swiglu_propagates_nan(run: Run) -> None:
    check_swiglu_keeps_nan(run, "matmul_tensor_swiglu")
