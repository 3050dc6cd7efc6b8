"""Kernels of state-space layers: the recurrence over the tokens of several sequences, and the gated norm."""

from __future__ import annotations

import numpy as np
import pytest
from support.kernel_harness import (
    CONSTANTS,
    Array,
    Output,
    Run,
    ceil_div,
    close,
    make_args,
    near,
)
from support.state_rows import BEFORE, LENGTHS, NONE, SLOTS, TOKENS, state_rows


def softplus(x: Array) -> Array:
    values: Array = np.logaddexp(0.0, x.astype(np.float64))
    return values


@pytest.mark.parametrize(
    ("kernel", "heads", "groups", "dim", "rows"),
    [("scan_128", 4, 1, 64, 128), ("scan_128", 6, 3, 12, 20), ("scan_256", 2, 2, 33, 200)],
)
def test_scan(run: Run, kernel: str, heads: int, groups: int, dim: int, rows: int) -> None:
    """Three sequences, two of which are divided: their last tokens follow those of the others."""
    rng = np.random.default_rng(dim)
    inner, mixed = heads * dim, heads * dim + 2 * groups * rows
    row_stride, dt_column, stride = heads + 9, 7, heads * rows * dim + 16
    a, bias = -rng.uniform(0.5, 2.0, heads), rng.standard_normal(heads)
    skip = rng.standard_normal(heads)
    projected = rng.standard_normal((TOKENS, row_stride)).astype(np.float32)
    projected[2, dt_column], projected[4, dt_column] = 40.0, -9.0  # softplus of large and small numbers
    convolved = rng.standard_normal((TOKENS, mixed)).astype(np.float32)
    states = rng.standard_normal((SLOTS, stride)).astype(np.float32)
    table, rows_of = state_rows()
    expected, after = np.zeros((TOKENS, inner)), states.astype(np.float64)
    for i, own in enumerate(rows_of):
        state = np.zeros((heads, rows, dim))
        if BEFORE[i] != NONE:
            state = states[BEFORE[i], : heads * rows * dim].reshape(heads, rows, dim).astype(np.float64)
        for row in own:
            x, b, c = np.split(convolved[row].astype(np.float64), [inner, inner + groups * rows])
            b, c = (np.repeat(part.reshape(groups, rows), heads // groups, axis=0) for part in (b, c))
            x = x.reshape(heads, dim)
            step = softplus(projected[row, dt_column : dt_column + heads] + bias)
            state = np.exp(step * a)[:, None, None] * state + np.einsum("h,hr,hd->hrd", step, b, x)
            expected[row] = (np.einsum("hr,hrd->hd", c, state) + skip[:, None] * x).reshape(-1)
            if table["after"][row] != NONE:
                after[table["after"][row], : heads * rows * dim] = state.reshape(-1)
    vectors = [v.astype(np.float32) for v in (a, bias, skip)]
    for first_out in (0, 5):
        out, held = Output([TOKENS, inner]), Output(states.shape, initial=states)
        args = make_args(
            "ScanArgs",
            heads=heads,
            heads_per_group=heads // groups,
            dim=dim,
            rows=rows,
            row_stride=row_stride,
            dt_column=dt_column,
            slot_stride=stride,
            tokens=TOKENS,
            first_out=first_out,
        )
        items = heads * ceil_div(dim, CONSTANTS["SCAN_COLUMNS"])
        run(
            kernel,
            *vectors,
            projected,
            convolved,
            table,
            held.buffer,
            out.buffer,
            args,
            groups=(ceil_div(items, 4), len(LENGTHS)),
            threads=(128, 1),
        )
        result = out.check()
        assert np.isnan(result[:first_out]).all()
        close(result[first_out:], expected[first_out:], 1e-5)
        close(held.check(), after, 1e-5)


@pytest.mark.parametrize(("groups", "size"), [(1, 96), (3, 20), (2, 700)])
@pytest.mark.parametrize("has_weight", [0, 1])
def test_scan_norm(run: Run, groups: int, size: int, has_weight: int) -> None:
    rng = np.random.default_rng(size)
    inner, tokens, first_out, row_stride = groups * size, 5, 2, groups * size + 13
    gates = (3 * rng.standard_normal((tokens, row_stride))).astype(np.float32)
    y = rng.standard_normal((tokens, inner)).astype(np.float32)
    weight = rng.standard_normal(inner).astype(np.float32)
    g = gates[:, :inner].astype(np.float64)
    gated = (y * (g / (1 + np.exp(-g)))).reshape(tokens, groups, size)
    if has_weight:
        gated = gated / np.sqrt((gated**2).mean(axis=-1, keepdims=True) + 1e-3)
        gated = gated * weight.reshape(groups, size)
    expected = gated.reshape(tokens, inner)[first_out:]
    args = make_args(
        "ScanNormArgs",
        inner=inner,
        groups=groups,
        row_stride=row_stride,
        first_out=first_out,
        has_weight=has_weight,
        eps=1e-3,
    )
    for name, dtype, check in (("scan_norm_f32", np.float32, close), ("scan_norm_f16", np.float16, near)):
        out = Output([tokens - first_out, inner], dtype)
        run(name, weight, gates, y, out.buffer, args, groups=(tokens - first_out, groups), threads=(64, 1))
        check(out.check(), expected)
