"""Shared by the tests of the kernels that multiply weights by many tokens."""

from __future__ import annotations

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
)

SILU, GELU = CONSTANTS["ACTIVATION_SILU"], CONSTANTS["ACTIVATION_GELU"]
ACTIVATIONS = {"silu": SILU, "gelu": GELU}
TILES = {"narrow": 32, "wide": 64}


def activation(x: Doubles, kind: int) -> Doubles:
    silu: Doubles = x / (1 + np.exp(-x))
    gelu: Doubles = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return silu if kind == SILU else gelu


def columns(kind: str, wanted: int) -> int:
    """Return the nearest length of a row that the type can have."""
    unit = block_columns(kind)
    return ceil_div(wanted, unit) * unit


def matmul(
    run: Run, kernel: str, tile: str, w: Weights, x: Array, y: Output, out_dim: int, **fields: int
) -> None:
    """Dispatch a kernel of such products, its tiles narrow or wide, for ``[tokens][columns]`` in x."""
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
    size = TILES[tile]
    tile_rows = size // 2 if "swiglu" in kernel else size
    run(
        f"{kernel}_{w.kind.lower()}_{tile}",
        w.bytes,
        x.astype(np.float16),
        y.buffer,
        args,
        groups=(ceil_div(out_dim, tile_rows), ceil_div(tokens, size)),
        threads=(CONSTANTS["MATMUL_THREADS"],),
    )
