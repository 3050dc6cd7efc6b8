"""Shared by the tests of the kernels that multiply weights by many tokens."""

from collections.abc import Sequence

import numpy as np

from .kernel_harness import (
    CONSTANTS,
    Array,
    Doubles,
    Output,
    Run,
    Weights,
    block_columns,
    ceil_div,
    make_args,
    near,
)

SILU, GELU = CONSTANTS["ACTIVATION_SILU"], CONSTANTS["ACTIVATION_GELU"]
ACTIVATIONS = {"silu": SILU, "gelu": GELU}
TILES = {"narrow": 32, "wide": 64}
SIZES = TILES | {"split": 32}  # for a matmul also tiles with split columns
TALL_TOKENS = CONSTANTS["MATMUL_TALL_TOKENS"]  # of a tall tile, which has the rows of a wide one


def activation(x: Doubles, kind: int) -> Doubles:
    silu: Doubles = x / (1 + np.exp(-x))
    gelu: Doubles = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return silu if kind == SILU else gelu


def columns(kind: str, wanted: int) -> int:
    """Return the nearest length of a row that the type can have."""
    unit = block_columns(kind)
    return ceil_div(wanted, unit) * unit


def threads_of(tile: str) -> int:
    return CONSTANTS["MATMUL_THREADS"] * (CONSTANTS["MATMUL_PARTS"] if tile == "split" else 1)


def matmul(
    run: Run, kernel: str, tile: str, w: Weights, x: Array, y: Output, out_dim: int, **fields: int
) -> None:
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
        w.bytes,
        x.astype(np.float16),
        y.buffer,
        args,
        groups=(ceil_div(out_dim, tile_rows), ceil_div(tokens, TALL_TOKENS if tall else size)),
        threads=(threads_of(tile),),
    )


def check_product(
    run: Run, kernel: str, tile: str, kind: str, rows: int, cols: int, tokens: int, seed: int
) -> None:
    """Compare a product with that of the dequantized weights in float64."""
    rng = np.random.default_rng(seed)
    w = Weights(rng, kind, [rows], cols)
    x = rng.standard_normal((tokens, cols), np.float32)
    y = Output([tokens, rows])
    matmul(run, kernel, tile, w, x, y, rows)
    near(y.check(), x.astype(np.float64) @ w.values.T)


def check_edges(run: Run, kernel: str, tile: str, tokens: int, stacks: Sequence[list[int]]) -> None:
    """Compare products of stacks of matrices, by their rows, which take the place of results or are added."""
    rng = np.random.default_rng(tokens)
    for rows in stacks:
        w = Weights(rng, "Q4_0", rows, 64)
        x = rng.standard_normal((tokens, 64), np.float32)
        before = rng.standard_normal((tokens, sum(rows)), np.float32)
        expected = x.astype(np.float64) @ w.values.T
        y = Output([tokens, sum(rows)])
        matmul(run, kernel, tile, w, x, y, sum(rows))
        near(y.check(), expected)
        y = Output([tokens, sum(rows)], initial=before)
        matmul(run, kernel, tile, w, x, y, sum(rows), accumulate=1)
        near(y.check(), before + expected)


def check_longer_rows(run: Run, kernel: str, tile: str) -> None:
    """Check that the values after the results in a row of the output are unchanged."""
    rng = np.random.default_rng(8)
    w = Weights(rng, "Q4_0", [40], 64)
    x = rng.standard_normal((40, 64), np.float32)
    y = Output([40, 100], initial=np.full((40, 100), 3.0))
    matmul(run, kernel, tile, w, x, y, 40)
    near(y.check()[:, :40], x.astype(np.float64) @ w.values.T)
    assert (y.array[:, 40:] == 3).all()


def check_swiglu(
    run: Run,
    kernel: str,
    tile: str,
    kind: str,
    act: str,
    sizes: Sequence[tuple[int, int]] = ((33, 45), (65, 64), (3, 8)),
) -> None:
    """Compare products of gate and up that an activation joins, in whole tiles and parts: (tokens, rows)."""
    rng = np.random.default_rng(9)
    cols = columns(kind, 64)
    for tokens, rows in sizes:
        w = Weights(rng, kind, [rows, rows], cols)
        x = rng.standard_normal((tokens, cols), np.float32)
        y = Output([tokens, rows], np.float16)
        matmul(run, kernel, tile, w, x, y, rows, activation=ACTIVATIONS[act])
        gate, up = np.split(x.astype(np.float64) @ w.values.T, 2, axis=1)
        near(y.check(), activation(gate, ACTIVATIONS[act]) * up)


def check_swiglu_keeps_nan(run: Run, kernel: str) -> None:
    """See that a token that is not a number has no results that are."""
    w = Weights(np.random.default_rng(10), "F32", [8, 8], 8)
    x = np.zeros((2, 8), np.float32)
    x[1, 3] = np.nan
    y = Output([2, 8], np.float16)
    matmul(run, kernel, "narrow", w, x, y, 8)
    assert np.isnan(y.check()).tolist() == [[False] * 8, [True] * 8]
