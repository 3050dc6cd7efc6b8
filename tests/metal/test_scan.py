"""Kernels of state-space layers: the recurrence over the tokens of several sequences, and the gated norm."""

import numpy as np
import pytest
from support.kernel_harness import CONSTANTS, Array, Output, Run, ceil_div, close, make_args, near
from support.state_rows import BEFORE, LENGTHS, NONE, SLOTS, TOKENS, state_rows


def softplus(x: Array) -> Array:
    values: Array = np.logaddexp(0.0, x.astype(np.float64))
    return values


@pytest.mark.parametrize("gated", [0, 1])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(
    ("heads", "groups", "dim", "rows"), [(4, 1, 64, 128), (6, 3, 12, 20), (2, 2, 33, 200)]
)
def test_scan(run: Run, heads: int, groups: int, dim: int, rows: int, half: bool, gated: int) -> None:
    """Three sequences, two of which are divided: their last tokens follow those of the others."""
    rng = np.random.default_rng(dim)
    inner, mixed = heads * dim, heads * dim + 2 * groups * rows
    row_stride, dt_column, stride = inner + heads + 9, inner + 7, heads * rows * dim + 16
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
            if gated:
                gate = projected[row, :inner].astype(np.float64)
                expected[row] *= gate / (1 + np.exp(-gate))
            if table["after"][row] != NONE:
                after[table["after"][row], : heads * rows * dim] = state.reshape(-1)
    vectors = [v.astype(np.float32) for v in (a, bias, skip)]
    for first_out in (0, 5):
        out = Output([TOKENS - first_out, inner], np.float16 if half else np.float32)
        held = Output(states.shape, initial=states)
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
            gated=gated,
        )
        items = heads * ceil_div(dim, CONSTANTS["SCAN_COLUMNS"])
        run(
            f"scan_{'f16' if half else 'f32'}_{128 if rows <= 128 else 256}",
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
        if half:
            near(out.check(), expected[first_out:])
        else:
            close(out.check(), expected[first_out:], 1e-5)
        close(held.check(), after, 1e-5)


@pytest.mark.parametrize(("groups", "size"), [(1, 96), (3, 20), (2, 700)])
def test_scan_norm(run: Run, groups: int, size: int) -> None:
    rng = np.random.default_rng(size)
    inner, tokens, first_out, row_stride = groups * size, 5, 2, groups * size + 13
    gates = (3 * rng.standard_normal((tokens, row_stride))).astype(np.float32)
    y = rng.standard_normal((tokens - first_out, inner)).astype(np.float32)
    weight = rng.standard_normal(inner).astype(np.float32)
    g = gates[first_out:, :inner].astype(np.float64)
    gated = (y * (g / (1 + np.exp(-g)))).reshape(tokens - first_out, groups, size)
    gated = gated / np.sqrt((gated**2).mean(axis=-1, keepdims=True) + 1e-3)
    expected = (gated * weight.reshape(groups, size)).reshape(tokens - first_out, inner)
    args = make_args(
        "ScanNormArgs", inner=inner, groups=groups, row_stride=row_stride, first_out=first_out, eps=1e-3
    )
    for name, dtype, check in (("scan_norm_f32", np.float32, close), ("scan_norm_f16", np.float16, near)):
        out = Output([tokens - first_out, inner], dtype)
        run(name, weight, gates, y, out.buffer, args, groups=(tokens - first_out, groups), threads=(64, 1))
        check(out.check(), expected)
