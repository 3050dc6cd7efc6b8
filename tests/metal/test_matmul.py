"""Kernels that multiply weights by many tokens, in 8x8 matrices and on tensors of Metal 4, against float64.

Tensors have fewer types here: the code that reads weights is the same.
"""

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
from metal_kernels import KernelLibrary
from support.kernels.float64 import ACTIVATIONS
from support.kernels.kernel_harness import (
    ACTIVATION_CODES,
    CONSTANTS,
    SILU,
    Array,
    Output,
    Run,
    Weights,
    ceil_div,
    columns,
    make_args,
    near,
)
from support.small_models import COMMON_TYPES, TYPES

OTHER_TYPES = [kind for kind in TYPES if kind not in COMMON_TYPES]
ON_TENSORS = ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "F16", "BF16")
TILES = {"narrow": 32, "wide": 64}
SIZES = TILES | {"split": 32}  # for a matmul in 8x8 matrices also tiles with split columns
TALL_TOKENS = CONSTANTS["MATMUL_TALL_TOKENS"]  # of a tall tile, which has the rows of a wide one
each_tile = pytest.mark.parametrize(
    ("stem", "tile"), [*product(["matmul"], SIZES), *product(["matmul_tensor"], TILES)]
)


def threads_of(tile: str) -> int:
    return CONSTANTS["MATMUL_THREADS"] * (CONSTANTS["MATMUL_PARTS"] if tile == "split" else 1)


def matmul(
    run: Run, kernel: str, tile: str, w: Weights, x: Array, y: Output, out_dim: int, **fields: int
) -> Array:
    """Dispatch a kernel of such products, its tiles narrow, wide or split, for ``[tokens][columns]`` in x."""
    tokens, stride = len(x), y.array.shape[1]
    given = {"accumulate": 0, "activation": SILU} | fields
    args = make_args(
        "MatmulArgs",
        weights=w.stacked(),
        in_dim=w.cols,
        out_dim=out_dim,
        tokens=tokens,
        out_stride=stride,
        **given,
    )
    tall = tile == "tall"
    size = SIZES["wide" if tall else tile]
    tile_rows = size // 2 if "swiglu" in kernel else size
    run(
        f"{kernel}_{w.kind.lower()}_{tile}",
        *(w.bytes, x.astype(np.float16), y.buffer, args),
        groups=(ceil_div(out_dim, tile_rows), ceil_div(tokens, TALL_TOKENS if tall else size)),
        threads=(threads_of(tile),),
    )
    return y.check()


def check_product(
    run: Run, kernel: str, tile: str, kind: str, rows: int, cols: int, tokens: int, seed: int
) -> None:
    """Compare a product with that of the dequantized weights in float64. The rest of a row is unchanged."""
    rng = np.random.default_rng(seed)
    w = Weights(rng, kind, [rows], cols)
    x = rng.standard_normal((tokens, cols), np.float32)
    y = Output([tokens, rows + 60], initial=np.full((tokens, rows + 60), 3.0))
    found = matmul(run, kernel, tile, w, x, y, rows)
    near(found[:, :rows], x.astype(np.float64) @ w.values.T)
    assert (found[:, rows:] == 3).all()


@pytest.mark.parametrize(
    ("stem", "kind", "tile"),
    [
        *product(["matmul"], COMMON_TYPES, SIZES),
        *product(["matmul"], OTHER_TYPES, ["narrow"]),
        *product(["matmul_tensor"], ON_TENSORS, ["narrow", "wide"]),
    ],
)
def test_every_type_is_read(run: Run, stem: str, kind: str, tile: str) -> None:
    for cols in (8, 40, 256):  # 40: a last step of eight columns
        check_product(run, stem, tile, kind, 70, columns(kind, cols), 33, seed=6)


@pytest.mark.parametrize("stem", ["matmul", "matmul_swiglu"])
def test_kernels_report_their_number_of_threads(libraries: dict[str, KernelLibrary], stem: str) -> None:
    """A compiler then need not save registers for more."""
    for tile in SIZES if stem == "matmul" else TILES:
        kernel = f"{stem}_q4_0_{tile}"
        pipeline = libraries[kernel].pipeline(kernel)
        assert pipeline.max_threads == threads_of(tile)


def check_edges(run: Run, stem: str, tile: str, tokens: int) -> None:
    """Compare products of stacks of matrices, by their rows, which take the place of results or are added."""
    rng = np.random.default_rng(tokens)
    for rows in ([64], [1], [63], [40, 9, 11, 5]):
        w = Weights(rng, "Q4_0", rows, 64)
        x = rng.standard_normal((tokens, 64), np.float32)
        before = rng.standard_normal((tokens, sum(rows)), np.float32)
        expected = x.astype(np.float64) @ w.values.T
        near(matmul(run, stem, tile, w, x, Output(before.shape), sum(rows)), expected)
        y = Output(before.shape, initial=before)
        near(matmul(run, stem, tile, w, x, y, sum(rows), accumulate=1), before + expected)


@each_tile
def test_tile_boundaries(run: Run, stem: str, tile: str) -> None:
    for tokens in (1, 2, 7, 8, 9, 31, 32, 33, 64, 65):
        check_edges(run, stem, tile, tokens)


@each_tile
@pytest.mark.parametrize(
    ("cols", "rows", "tokens"), [(576, 192, 70), (1536, 96, 70), (2048, 64, 70), (64, 66, 512)]
)
def test_long_rows_and_many_tokens(run: Run, cols: int, rows: int, tokens: int, stem: str, tile: str) -> None:
    check_product(run, stem, tile, "Q4_0", rows, cols, tokens, seed=cols)


def test_split_columns_are_multiplied_once(run: Run) -> None:
    """Whole numbers make results exact: any part of the columns may have a step more or less."""
    for steps in range(1, 10):
        rng = np.random.default_rng(steps)
        cols = 32 * steps - 8
        w = Weights(rng, "F32", [40], cols)
        numbers = rng.integers(-8, 9, (40, cols))
        w.bytes[32:].view(np.float32)[:] = numbers.ravel()
        x = rng.integers(-8, 9, (33, cols))
        before = rng.integers(-8, 9, (33, 40))
        y = Output([33, 40], initial=before.astype(np.float32))
        found = matmul(run, "matmul", "split", w, x.astype(np.float32), y, 40, accumulate=1)
        np.testing.assert_array_equal(found, before + x @ numbers.T)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "F16"])
def test_tall_tiles(run: Run, kind: str) -> None:
    for tokens, cols in ((TALL_TOKENS, 32), (TALL_TOKENS + 37, 96)):
        check_product(run, "matmul_tensor", "tall", kind, 70, columns(kind, cols), tokens, seed=6)


@pytest.mark.parametrize("more", [0, 1, 127, 128])
def test_the_last_tall_tile_adds_to_no_token_twice(run: Run, more: int) -> None:
    """It begins among the tokens of the tile before."""
    check_edges(run, "matmul_tensor", "tall", TALL_TOKENS + more)


def check_swiglu(
    run: Run, kernel: str, tile: str, kind: str, act: str, sizes: Sequence[tuple[int, int]]
) -> None:
    """Compare products of gate and up that an activation joins, in whole tiles and parts: (tokens, rows)."""
    rng = np.random.default_rng(9)
    cols = columns(kind, 64)
    for tokens, rows in sizes:
        w = Weights(rng, kind, [rows, rows], cols)
        x = rng.standard_normal((tokens, cols), np.float32)
        y = Output([tokens, rows], np.float16)
        found = matmul(run, kernel, tile, w, x, y, rows, activation=ACTIVATION_CODES[act])
        gate, up = np.split(x.astype(np.float64) @ w.values.T, 2, axis=1)
        near(found, ACTIVATIONS[act](gate) * up)


@pytest.mark.parametrize(
    ("stem", "kind", "tile", "act"),
    [
        *product(["matmul"], COMMON_TYPES, TILES, ["silu"]),
        *product(["matmul"], OTHER_TYPES, ["narrow"], ["silu"]),
        *product(["matmul"], ["Q4_0"], TILES, ["gelu"]),
        *product(["matmul_tensor"], ["Q4_0", "F16"], TILES, ["silu"]),
        *product(["matmul_tensor"], ["Q4_K"], TILES, ["gelu"]),
    ],
)
def test_swiglu(run: Run, stem: str, kind: str, tile: str, act: str) -> None:
    check_swiglu(run, f"{stem}_swiglu", tile, kind, act, ((33, 45), (65, 64), (3, 8)))


@pytest.mark.parametrize(("kind", "act"), [("Q4_0", "silu"), ("F16", "gelu")])
def test_swiglu_of_tall_tiles(run: Run, kind: str, act: str) -> None:
    sizes = ((TALL_TOKENS, 32), (TALL_TOKENS + 1, 45), (2 * TALL_TOKENS - 1, 8))
    check_swiglu(run, "matmul_tensor_swiglu", "tall", kind, act, sizes)


def swiglu_alone(run: Run, gate_up: Array) -> Array:
    """Activate 4 values of gate by 4 of up, in half precision."""
    y = Output([1, 4], np.float16)
    args = make_args("SwigluArgs", ffn_dim=4, tokens=1, activation=SILU, gated=1, has_bias=0)
    run("swiglu_f16", gate_up, gate_up, y.buffer, args, groups=(1,), threads=(32,))
    return y.check()


def test_swiglu_stays_finite_in_half(run: Run) -> None:
    w = Weights(np.random.default_rng(10), "F32", [8, 8], 8)
    w.bytes[32:].view(np.float32)[:] = 40.0
    x = np.full((2, 8), 50.0, np.float32)
    assert (matmul(run, "matmul_swiglu", "narrow", w, x, Output([2, 8], np.float16), 8) == 65504).all()
    # 300 * 300 is more than half precision has.
    assert (swiglu_alone(run, np.full((1, 8), 300.0, np.float32)) == 65504).all()


@pytest.mark.parametrize("stem", ["matmul", "matmul_tensor"])
def test_swiglu_in_half_propagates_nan(run: Run, stem: str) -> None:
    w = Weights(np.random.default_rng(10), "F32", [8, 8], 8)
    x = np.zeros((2, 8), np.float32)
    x[1, 3] = np.nan
    found = matmul(run, f"{stem}_swiglu", "narrow", w, x, Output([2, 8], np.float16), 8)
    assert np.isnan(found).tolist() == [[False] * 8, [True] * 8]
    gate_up = np.zeros((1, 8), np.float32)
    gate_up[0, 2] = np.nan
    assert np.isnan(swiglu_alone(run, gate_up)).tolist() == [[False, False, True, False]]
