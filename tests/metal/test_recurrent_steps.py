"""Kernels of recurrent layers: convolutions, state-space scans, gated delta rules, and gates of heads."""

from itertools import product
from typing import Any

import numpy as np
import pytest
from support.kernels.kernel_harness import CONSTANTS, STRUCTS, Array, Output, Run, ceil_div, check, make_args

# A pass of three sequences.
NONE = CONSTANTS["STATE_NONE"]
LENGTHS, DIVIDED = (6, 1, 9), (2, 0, 8)  # tokens of each sequence; those that follow the other sequences
BEFORE, SLOTS = (3, NONE, NONE), 7  # slot of the state before each sequence; number of slots
TOKENS = sum(LENGTHS)
# Slots of the states after tokens: (sequence, token).
_AFTER = {(0, 1): 0, (0, 5): 5, (1, 0): 6, (2, 7): 2, (2, 8): 1}


def state_rows() -> Array:
    """Return the table of the rows. The first row of each sequence is in it once more, after all rows."""
    leading = [n - d for n, d in zip(LENGTHS, DIVIDED, strict=True)]
    first, rest = np.cumsum([0, *leading]), np.cumsum([sum(leading), *DIVIDED])
    table = np.zeros(TOKENS + len(LENGTHS), STRUCTS["StateRow"])
    for i, n in enumerate(LENGTHS):
        own = [*range(first[i], first[i] + leading[i]), *range(rest[i], rest[i] + DIVIDED[i])]
        for token, row in enumerate(own):
            after = _AFTER.get((i, token), NONE)
            table[row] = (token, first[i], leading[i], rest[i], BEFORE[i], after, n)
        table[TOKENS + i] = table[own[0]]
    return table


class States:
    """Slots of states of so many values, of which only those after some tokens change."""

    def __init__(self, rng: np.random.Generator, size: int) -> None:
        self.size, self.stride = size, size + 16
        self.before = rng.standard_normal((SLOTS, self.stride)).astype(np.float32)
        self.held = Output(self.before.shape, initial=self.before)

    def assert_others_unchanged(self) -> None:
        expected, written = self.before.copy(), list(_AFTER.values())
        expected[written, : self.size] = self.held.check()[written, : self.size]
        np.testing.assert_array_equal(self.held.array, expected)


@pytest.mark.parametrize("kind", ["gated", "activated", "with a bias"])
@pytest.mark.parametrize("taps", [2, 3, 5])
@pytest.mark.parametrize("channels", [64, 200])
def test_causal_conv(run: Run, channels: int, taps: int, kind: str) -> None:
    """Two of three sequences are split: their last tokens follow those of the others."""
    rng = np.random.default_rng(taps)
    given = rng.standard_normal((TOKENS, 3, channels)).astype(np.float32)
    bias = rng.standard_normal(channels).astype(np.float32)
    filters = rng.standard_normal((channels, taps)).astype(np.float32)
    for first_out, dtype in product((0, 5), ("f32", "f16")):
        states, out = States(rng, (taps - 1) * channels), Output([TOKENS - first_out, channels], dtype)
        args = make_args(
            "CausalConvArgs",
            channels=channels,
            taps=taps,
            in_stride=3 * channels,
            slot_stride=states.stride,
            tokens=TOKENS,
            first_out=first_out,
            gated=kind == "gated",
            biased=kind == "with a bias",
        )
        buffers = (filters, bias, given, state_rows(), states.held.buffer, out, args)
        groups = (ceil_div(channels, 64), TOKENS)
        check(run, f"causal_conv_{dtype}", *buffers, groups=groups, threads=(64, 1))
        states.assert_others_unchanged()


@pytest.mark.parametrize(
    ("heads", "groups", "keys", "width"),
    [(2, 1, 32, 32), (6, 2, 20, 36), (4, 2, 40, 33), (3, 3, 128, 128), (2, 2, 256, 8)],
)
def test_gated_delta(run: Run, heads: int, groups: int, keys: int, width: int) -> None:
    rng = np.random.default_rng(heads)
    decay = -np.exp(rng.uniform(-4, 1, heads)).astype(np.float32)
    bias = rng.standard_normal(heads).astype(np.float32)
    given = rng.standard_normal((TOKENS, 2 * groups * keys + heads * width + 5)).astype(np.float32)
    rates = (3 * rng.standard_normal((TOKENS, 2 * heads + 3))).astype(np.float32)
    rates[0, :2] = 90, -90
    states, out = States(rng, heads * keys * width), Output([TOKENS, heads, width])
    args = make_args(
        "GatedDeltaArgs",
        heads=heads,
        groups=groups,
        key_dim=keys,
        value_dim=width,
        in_stride=given.shape[1],
        rate_stride=rates.shape[1],
        slot_stride=states.stride,
        tokens=TOKENS,
    )
    buffers = (decay, bias, given, rates, state_rows(), states.held.buffer, out, args)
    grid: dict[str, Any] = {"groups": (ceil_div(width, 16), heads, len(LENGTHS)), "threads": (128,)}
    check(run, "gated_delta", *buffers, within=1e-5, **grid)
    states.assert_others_unchanged()


@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize(("heads", "dim"), [(2, 32), (3, 36), (5, 128)])
def test_gated_norm(run: Run, heads: int, dim: int, dtype: str) -> None:
    rng = np.random.default_rng(dim)
    tokens = 5
    x = rng.standard_normal((tokens, heads, dim)).astype(np.float32)
    x[0, 0] = 0
    gate = (4 * rng.standard_normal((tokens, heads * dim + 7))).astype(np.float32)
    weight = rng.uniform(0.5, 1.5, dim).astype(np.float32)
    args = make_args("GatedNormArgs", heads=heads, dim=dim, gate_stride=gate.shape[1], eps=1e-5)
    buffers, groups = (weight, x, gate, Output(x.shape, dtype), args), (ceil_div(32 * heads, 64), tokens)
    check(run, f"gated_norm_{dtype}", *buffers, groups=groups, threads=(64, 1))


@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize(("heads", "dim"), [(2, 32), (3, 24)])
def test_gate_heads(run: Run, heads: int, dim: int, dtype: str) -> None:
    rng = np.random.default_rng(dim)
    tokens = 5
    q = (4 * rng.standard_normal((tokens, 2 * heads * dim + 11))).astype(np.float32)
    q[0, dim : dim + 2] = 100, -100
    columns = {"q_stride": q.shape[1], "query_step": 2 * dim}
    args = make_args("GateHeadsArgs", n_heads=heads, value_dim=dim, tokens=tokens, **columns)
    y = Output([tokens, heads, dim], dtype, initial=rng.standard_normal((tokens, heads, dim)))
    groups = (ceil_div(heads * dim, 64), tokens)
    check(run, f"gate_heads_{dtype}", q, y, args, groups=groups, threads=(64, 1))


@pytest.mark.parametrize("gated", [0, 1])
@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize(
    ("heads", "groups", "dim", "rows"), [(4, 1, 64, 128), (6, 3, 12, 20), (2, 2, 33, 200)]
)
def test_scan(run: Run, heads: int, groups: int, dim: int, rows: int, dtype: str, gated: int) -> None:
    """Two of three sequences are split: their last tokens follow those of the others."""
    rng = np.random.default_rng(dim)
    inner, mixed = heads * dim, heads * dim + 2 * groups * rows
    row_stride, dt_column = inner + heads + 9, inner + 7
    a, bias = -rng.uniform(0.5, 2.0, heads), rng.standard_normal(heads)
    vectors = [v.astype(np.float32) for v in (a, bias, rng.standard_normal(heads))]
    projected = rng.standard_normal((TOKENS, row_stride)).astype(np.float32)
    projected[2, dt_column], projected[4, dt_column] = 40.0, -9.0  # softplus of large and small numbers
    convolved = rng.standard_normal((TOKENS, mixed)).astype(np.float32)
    for first_out in (0, 5):
        states, out = States(rng, heads * rows * dim), Output([TOKENS - first_out, inner], dtype)
        args = make_args(
            "ScanArgs",
            heads=heads,
            heads_per_group=heads // groups,
            dim=dim,
            rows=rows,
            row_stride=row_stride,
            dt_column=dt_column,
            slot_stride=states.stride,
            tokens=TOKENS,
            first_out=first_out,
            gated=gated,
        )
        items = heads * ceil_div(dim, CONSTANTS["SCAN_COLUMNS"])
        check(
            run,
            f"scan_{dtype}_{128 if rows <= 128 else 256}",
            *(*vectors, projected, convolved, state_rows(), states.held.buffer, out, args),
            within=1e-5,
            groups=(ceil_div(items, 4), len(LENGTHS)),
            threads=(128, 1),
        )
        states.assert_others_unchanged()


@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize(("groups", "size"), [(1, 96), (3, 20), (2, 700)])
def test_scan_norm(run: Run, groups: int, size: int, dtype: str) -> None:
    rng = np.random.default_rng(size)
    inner, tokens, first_out, row_stride = groups * size, 5, 2, groups * size + 13
    gates = (3 * rng.standard_normal((tokens, row_stride))).astype(np.float32)
    y = rng.standard_normal((tokens - first_out, inner)).astype(np.float32)
    weight = rng.standard_normal(inner).astype(np.float32)
    args = make_args(
        "ScanNormArgs", inner=inner, groups=groups, row_stride=row_stride, first_out=first_out, eps=1e-3
    )
    buffers = (weight, gates, y, Output(y.shape, dtype), args)
    check(run, f"scan_norm_{dtype}", *buffers, groups=(tokens - first_out, groups), threads=(64, 1))
