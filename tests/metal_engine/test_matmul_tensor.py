"""Products on tensors of Metal 4, against float64 products with the dequantized weights.

They are tested as those of matmul are, with fewer types: how weights are read is the same code.
"""

from __future__ import annotations

import numpy as np
import pytest
from support.kernel_harness import Output, Run, Weights, near
from support.matmul_harness import ACTIVATIONS, TILES, activation, columns, matmul

KINDS = ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "F16", "BF16")


@pytest.mark.parametrize("kind", KINDS)
def test_it_reads_the_types_of_models(run: Run, kind: str) -> None:
    rng = np.random.default_rng(6)
    for cols, tile in ((8, "narrow"), (40, "narrow"), (256, "wide")):  # 40: a last step of eight columns
        cols = columns(kind, cols)
        w = Weights(rng, kind, [70], cols)
        x = rng.standard_normal((33, cols), np.float32)
        y = Output([33, 70])
        matmul(run, "matmul_tensor", tile, w, x, y, 70)
        near(y.check(), x.astype(np.float64) @ w.values.T)


@pytest.mark.parametrize("tile", TILES)
def test_the_edges_of_its_tiles(run: Run, tile: str) -> None:
    for tokens in (1, 9, 31, 32, 33, 65):
        rng = np.random.default_rng(tokens)
        for rows in ([64], [1], [40, 20, 5]):
            w = Weights(rng, "Q4_0", rows, 64)
            x = rng.standard_normal((tokens, 64), np.float32)
            before = rng.standard_normal((tokens, sum(rows)), np.float32)
            expected = x.astype(np.float64) @ w.values.T
            y = Output([tokens, sum(rows)])
            matmul(run, "matmul_tensor", tile, w, x, y, sum(rows))
            near(y.check(), expected)
            y = Output([tokens, sum(rows)], initial=before)
            matmul(run, "matmul_tensor", tile, w, x, y, sum(rows), accumulate=1)
            near(y.check(), before + expected)


@pytest.mark.parametrize("tile", TILES)
def test_long_rows(run: Run, tile: str) -> None:
    rng = np.random.default_rng(1)
    w = Weights(rng, "Q4_0", [66], 576)
    x = rng.standard_normal((70, 576), np.float32)
    y = Output([70, 66])
    matmul(run, "matmul_tensor", tile, w, x, y, 66)
    near(y.check(), x.astype(np.float64) @ w.values.T)


def test_it_leaves_the_rest_of_a_longer_row(run: Run) -> None:
    rng = np.random.default_rng(8)
    w = Weights(rng, "Q4_0", [40], 64)
    x = rng.standard_normal((40, 64), np.float32)
    y = Output([40, 100], initial=np.full((40, 100), 3.0))
    matmul(run, "matmul_tensor", "narrow", w, x, y, 40)
    near(y.check()[:, :40], x.astype(np.float64) @ w.values.T)
    assert (y.array[:, 40:] == 3).all()


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("kind", "act"), [("Q4_0", "silu"), ("Q4_K", "gelu"), ("F16", "silu")])
def test_swiglu(run: Run, kind: str, tile: str, act: str) -> None:
    rng = np.random.default_rng(9)
    cols = columns(kind, 64)
    for tokens, rows in ((33, 45), (65, 64), (3, 8)):
        w = Weights(rng, kind, [rows, rows], cols)
        x = rng.standard_normal((tokens, cols), np.float32)
        y = Output([tokens, rows], np.float16)
        matmul(run, "matmul_tensor_swiglu", tile, w, x, y, rows, activation=ACTIVATIONS[act])
        gate, up = np.split(x.astype(np.float64) @ w.values.T, 2, axis=1)
        near(y.check(), activation(gate, ACTIVATIONS[act]) * up)


def test_swiglu_keeps_what_is_not_a_number(run: Run) -> None:
    w = Weights(np.random.default_rng(10), "F32", [8, 8], 8)
    x = np.zeros((2, 8), np.float32)
    x[1, 3] = np.nan
    y = Output([2, 8], np.float16)
    matmul(run, "matmul_tensor_swiglu", "narrow", w, x, y, 8)
    assert np.isnan(y.check()).tolist() == [[False] * 8, [True] * 8]
