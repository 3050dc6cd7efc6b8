"""Kernels that multiply weights by one token or a few, against float64 with the dequantized weights."""

from itertools import product
from typing import Any

import numpy as np
import pytest
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
    close,
    columns,
    make_args,
)
from support.small_models import COMMON_TYPES, TYPES


def matvec_args(w: Weights, out_dim: int, lanes: int = 8, **fields: Any) -> Array:
    given = {"tokens": 1, "out_stride": out_dim, "accumulate": 0, "activation": SILU} | fields
    given = {"eps": 0.0, "norm_threads": 0, "unused": 0} | given
    return make_args(
        "MatvecArgs", weights=w.stacked(), in_dim=w.cols, out_dim=out_dim, lanes_per_row=lanes, **given
    )


def matvec(
    run: Run,
    w: Weights,
    x: Array,
    y: Output,
    lanes: int = 8,
    swiglu: bool = False,
    threads: int = 64,
    **fields: Any,
) -> Array:
    """Multiply one token."""
    out_dim = len(y.array)
    run(
        f"matvec_{'swiglu_' if swiglu else ''}{w.kind.lower()}",
        *(w.bytes, x, y.buffer, matvec_args(w, out_dim, lanes, **fields)),
        groups=(ceil_div(out_dim, threads // lanes),),
        threads=(threads,),
    )
    return y.check()


@pytest.mark.parametrize("kind", TYPES)
def test_matvec(run: Run, kind: str) -> None:
    rng = np.random.default_rng(1)
    shapes = [(45, 8, 64), (33, 16, 32), (7, 32, 64)]
    for cols, (rows, lanes, threads) in product({columns(kind, n) for n in (8, 64, 576, 1536)}, shapes):
        w = Weights(rng, kind, [rows], cols)
        x = rng.standard_normal(cols, np.float32)
        close(matvec(run, w, x, Output([rows]), lanes, threads=threads), w.values @ x)


def test_matvec_reads_stacked_matrices_and_accumulates(run: Run) -> None:
    rng = np.random.default_rng(2)
    w = Weights(rng, "Q4_0", [13, 6, 5, 6], 576)
    x = rng.standard_normal(576, np.float32)
    before = rng.standard_normal(30, np.float32)
    close(matvec(run, w, x, Output([30], initial=before), accumulate=1), before + w.values @ x)


@pytest.mark.parametrize(("kind", "act"), [*product(TYPES, ["silu"]), ("Q4_0", "gelu")])
def test_matvec_swiglu(run: Run, kind: str, act: str) -> None:
    rng = np.random.default_rng(3)
    cols = columns(kind, 576)
    w = Weights(rng, kind, [37, 37], cols)
    x = rng.standard_normal(cols, np.float32)
    found = matvec(run, w, x, Output([37]), 16, swiglu=True, activation=ACTIVATION_CODES[act])
    gate, up = np.split(w.values @ x, 2)
    close(found, ACTIVATIONS[act](gate.astype(np.float64)) * up)


def multi_token(
    run: Run, w: Weights, x: Array, y: Output, lanes: int, swiglu: bool = False, **fields: Any
) -> Array:
    out_dim = sum(w.rows) // (2 if swiglu else 1)
    many = len(x) > CONSTANTS["MULTI_TOKEN_TILE"]
    rows = CONSTANTS["MANY_TOKEN_ROWS" if many else "FEW_TOKEN_ROWS"] // (2 if swiglu else 1)
    tile = CONSTANTS["MANY_TOKEN_TILE" if many else "MULTI_TOKEN_TILE"]
    stem = "multi_token_matvec_swiglu" if swiglu else "multi_token_matvec"
    run(
        f"{stem}_{w.kind.lower()}" + ("_accumulate" if fields.get("accumulate") else ""),
        w.bytes,
        x,
        y.buffer,
        matvec_args(w, out_dim, lanes, tokens=len(x), **fields),
        groups=(ceil_div(len(x), tile), ceil_div(out_dim, rows * 64 // lanes)),
        threads=(64,),
    )
    return y.check()


@pytest.mark.parametrize(("cols", "lanes"), [(32, 8), (64, 32), (576, 16), (1536, 32)])
@pytest.mark.parametrize("accumulate", [False, True])
def test_multi_token_matvec(run: Run, cols: int, lanes: int, accumulate: bool) -> None:
    for tokens in (1, 2, 3, 7, 8, 9, 31, 33):
        rng = np.random.default_rng(tokens)
        rows = [8, 4, 4, 3] if cols == 576 else [19]  # not a multiple of a threadgroup's rows
        w = Weights(rng, "Q4_0", rows, cols)
        x = rng.standard_normal((tokens, cols), np.float32)
        before = rng.standard_normal((tokens, 19), np.float32)
        y = Output([tokens, 19], initial=before if accumulate else None)
        found = multi_token(run, w, x, y, lanes, accumulate=accumulate)
        close(found, x.astype(np.float64) @ w.values.T + (before if accumulate else 0))


@pytest.mark.parametrize(("tokens", "stride"), [(20, 12), (2048, 9)])  # the largest batch
def test_multi_token_matvec_writes_only_its_columns(run: Run, tokens: int, stride: int) -> None:
    rng = np.random.default_rng(4)
    w = Weights(rng, "Q4_0", [9], 64)
    x = rng.standard_normal((tokens, 64), np.float32)
    y = Output([tokens, stride], initial=np.full((tokens, stride), 3.0))
    found = multi_token(run, w, x, y, 8, out_stride=stride)
    close(found[:, :9], x.astype(np.float64) @ w.values.T)
    assert (found[:, 9:] == 3).all()


@pytest.mark.parametrize(("kind", "lanes"), [*product(TYPES, [8]), *product(["Q4_0", "F32"], [32])])
def test_a_token_is_bit_identical_alone_and_in_a_batch(run: Run, kind: str, lanes: int) -> None:
    rng = np.random.default_rng(5)
    cols = columns(kind, 576)
    w = Weights(rng, kind, [45, 45], cols)
    x = rng.standard_normal((11, cols), np.float32)
    before = rng.standard_normal((11, 90), np.float32)
    alone, gated = Output([11, 90]), Output([11, 45])
    for t in range(11):
        alone.array[t] = matvec(run, w, x[t], Output([90], initial=before[t]), lanes, accumulate=1)
        gated.array[t] = matvec(run, w, x[t], Output([45]), lanes, swiglu=True)
    for n in (1, 2, 3, 4, 5, 8, 11):
        y, ffn = Output([n, 90], initial=before[:n]), Output([n, 45])
        found = multi_token(run, w, x[:n], y, lanes, accumulate=1)
        np.testing.assert_array_equal(found, alone.check()[:n])
        found = multi_token(run, w, x[:n], ffn, lanes, swiglu=True)
        np.testing.assert_array_equal(found, gated.check()[:n])


def rmsnorm_matvec(
    run: Run, w: Weights, norm: Array, x: Array, out_dim: int, lanes: int, threads: int, swiglu: bool = False
) -> Array:
    """Normalize one token, as so many threads do it, and multiply it."""
    y = Output([out_dim])
    run(
        f"rmsnorm_matvec_{'swiglu_' if swiglu else ''}{w.kind.lower()}",
        *(w.bytes, norm, x, y.buffer),
        matvec_args(w, out_dim, lanes, eps=1e-5, norm_threads=threads),
        groups=(ceil_div(out_dim, CONSTANTS["NORMED_MATVEC_ROWS"] * 64 // lanes),),
        threads=(64,),
    )
    return y.check()


def normed(run: Run, x: Array, norm: Array, threads: int) -> Array:
    """Return what rmsnorm_f32 makes of x."""
    y = Output([x.size])
    args = make_args("RmsnormArgs", dim=x.size, stride=x.size, has_weight=1, eps=1e-5)
    run("rmsnorm_f32", norm, x, y.buffer, args, groups=(1,), threads=(threads,))
    return y.check().astype(np.float32)


@pytest.mark.parametrize(
    ("kind", "cols", "threads"),
    [
        *((kind, 576, 160) for kind in TYPES),
        *product(["Q4_0", "F32"], [64], [32]),
        *(("Q4_0", *shape) for shape in [(576, 64), (1536, 384), (4352, 1024)]),
    ],
)
def test_rmsnorm_matvec_is_bit_identical_to_norm_and_product(
    run: Run, kind: str, cols: int, threads: int
) -> None:
    """A thread of the norm has one value of a row, or several."""
    rng = np.random.default_rng(cols)
    cols = columns(kind, cols)
    w = Weights(rng, kind, [19, 19], cols)
    x = (3 * rng.standard_normal(cols)).astype(np.float32)
    norm = rng.uniform(0.5, 1.5, cols).astype(np.float32)
    between = normed(run, x, norm, threads)
    for lanes, swiglu in product((8, 32), (False, True)):
        out_dim = 19 if swiglu else 38
        fused = rmsnorm_matvec(run, w, norm, x, out_dim, lanes, threads, swiglu)
        np.testing.assert_array_equal(fused, matvec(run, w, between, Output([out_dim]), lanes, swiglu))


@pytest.mark.parametrize(
    ("cols", "rows", "lanes"),
    [(576, 576, 32), (576, 192, 32), (576, 1536, 32), (1536, 576, 32), (576, 49152, 8)],
)
@pytest.mark.parametrize(("kind", "tolerance"), [("Q4_0", 2e-4), ("F32", 1e-4)])
def test_rmsnorm_matvec(run: Run, kind: str, tolerance: float, cols: int, rows: int, lanes: int) -> None:
    """Other types, shapes and lanes are bit-identical to kernels that are compared with float64."""
    rng = np.random.default_rng(11)
    w = Weights(rng, kind, [rows], cols)
    x = (3 * rng.standard_normal(cols)).astype(np.float32)
    norm = rng.uniform(0.5, 1.5, cols).astype(np.float32)
    found = rmsnorm_matvec(run, w, norm, x, rows, lanes, cols // 4)
    wide = x.astype(np.float64)
    close(found, w.values @ (wide / np.sqrt((wide**2).mean() + 1e-5) * norm), tolerance)


@pytest.mark.parametrize(("kind", "together"), [*product(TYPES, [4]), *product(COMMON_TYPES, [2])])
def test_matvec_rows_that_share_a_simdgroup_are_bit_identical_to_single_rows(
    run: Run, kind: str, together: int
) -> None:
    rng = np.random.default_rng(together)
    for cols, accumulate in ((8, 0), (576, 1), (1536, 0)):
        cols = columns(kind, cols)
        w = Weights(rng, kind, [13, 6, 5, 6], cols)
        x = rng.standard_normal(cols, np.float32)
        before = rng.standard_normal(30, np.float32)
        found = []
        for suffix, rows in (("", 1), (f"_rows{together}", together)):
            y = Output([30], initial=before)
            args = matvec_args(w, 30, 32, accumulate=accumulate)
            grid: dict[str, Any] = {"groups": (ceil_div(30, 2 * rows),), "threads": (64,)}
            run(f"matvec_{kind.lower()}{suffix}", w.bytes, x, y.buffer, args, **grid)
            found.append(y.check())
        np.testing.assert_array_equal(found[0], found[1])
        close(found[0], w.values @ x.astype(np.float64) + (before if accumulate else 0))
