"""Kernels of layers with a recurrence, and gates of heads, on arrays of their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.kernel_harness import CONSTANTS, STRUCTS, Output, Run, ceil_div, close, make_args, near

Array = npt.NDArray[Any]
NONE = CONSTANTS["STATE_NONE"]
LENGTHS, DIVIDED = (6, 1, 9), (2, 0, 8)  # tokens of three sequences; those after the others in the pass
BEFORE, SLOTS = (3, NONE, NONE), 7


def table() -> tuple[Array, list[list[int]]]:
    """Rows of the pass, with those that begin each sequence after them, and the rows of each sequence."""
    heads = [n - d for n, d in zip(LENGTHS, DIVIDED, strict=True)]
    first, rest = np.cumsum([0, *heads]), np.cumsum([sum(heads), *DIVIDED])
    entries = np.zeros(sum(LENGTHS) + len(LENGTHS), STRUCTS["StateRow"])
    rows = []
    for i, n in enumerate(LENGTHS):
        own = [*range(first[i], first[i] + heads[i]), *range(rest[i], rest[i] + DIVIDED[i])]
        rows.append(own)
        for token, row in enumerate([*own, sum(LENGTHS) + i]):
            entries[row] = (token % n, first[i], heads[i], rest[i], BEFORE[i], NONE, n)
    # After the second and the last token of the first sequence, and the last ones of the others.
    for slot, (sequence, token) in zip((0, 5, 6, 1), ((0, 1), (0, 5), (1, 0), (2, 8)), strict=True):
        entries["after"][rows[sequence][token]] = slot
    return entries, rows


@pytest.mark.parametrize(
    ("heads", "groups", "keys", "width"), [(2, 1, 32, 32), (6, 2, 20, 36), (3, 3, 128, 128), (2, 2, 256, 8)]
)
def test_gated_delta(run: Run, heads: int, groups: int, keys: int, width: int) -> None:
    rng = np.random.default_rng(heads)
    tokens, size = sum(LENGTHS), heads * keys * width
    in_stride, stride = 2 * groups * keys + heads * width + 5, size + 16
    decay = -np.exp(rng.uniform(-4, 1, heads)).astype(np.float32)
    bias = rng.standard_normal(heads).astype(np.float32)
    given = rng.standard_normal((tokens, in_stride)).astype(np.float32)
    rates = (3 * rng.standard_normal((tokens, 2 * heads + 3))).astype(np.float32)
    rates[0, :2] = 90, -90
    states = rng.standard_normal((SLOTS, stride)).astype(np.float32)
    entries, rows = table()

    expected, after = np.empty((tokens, heads, width)), states.astype(np.float64)
    for i, own in enumerate(rows):
        state: Array = np.zeros((heads, keys, width))
        if BEFORE[i] != NONE:
            state = states[BEFORE[i], :size].reshape(state.shape).astype(np.float64)
        for row in own:
            wide = given[row].astype(np.float64)
            q, k, v = np.split(wide[: in_stride - 5], [groups * keys, 2 * groups * keys])
            q, k = (
                np.array([head / np.sqrt(head @ head + 1e-6) for head in part.reshape(groups, keys)])
                for part in (q, k)
            )
            alpha, beta = rates[row, :heads].astype(np.float64) + bias, rates[row, heads : 2 * heads]
            for h in range(heads):
                key, value = k[h % groups], v.reshape(heads, width)[h]
                state[h] *= np.exp(decay[h] * np.logaddexp(0, alpha[h]))
                rate = 1 / (1 + np.exp(-np.float64(beta[h])))
                state[h] += np.outer(key, rate * (value - key @ state[h]))
                expected[row, h] = q[h % groups] @ state[h] / np.sqrt(keys)
            if entries["after"][row] != NONE:
                after[entries["after"][row], :size] = state.ravel()

    out, held = Output([tokens, heads, width]), Output(states.shape, initial=states)
    args = make_args(
        "GatedDeltaArgs",
        heads=heads,
        groups=groups,
        key_dim=keys,
        value_dim=width,
        in_stride=in_stride,
        rate_stride=rates.shape[1],
        slot_stride=stride,
        tokens=tokens,
    )
    buffers = (decay, bias, given, rates, entries, held.buffer, out.buffer, args)
    run("gated_delta", *buffers, groups=(ceil_div(width, 16), heads, len(LENGTHS)), threads=(128,))
    close(out.check(), expected, 1e-5)
    close(held.check(), after, 1e-5)


@pytest.mark.parametrize(("heads", "dim"), [(2, 32), (3, 36), (5, 128)])
def test_gated_norm(run: Run, heads: int, dim: int) -> None:
    rng = np.random.default_rng(dim)
    tokens = 5
    x = rng.standard_normal((tokens, heads, dim)).astype(np.float32)
    x[0, 0] = 0
    gate = (4 * rng.standard_normal((tokens, heads * dim + 7))).astype(np.float32)
    weight = rng.uniform(0.5, 1.5, dim).astype(np.float32)
    wide, gates = x.astype(np.float64), gate[:, : heads * dim].astype(np.float64).reshape(x.shape)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * weight
    expected *= gates / (1 + np.exp(-gates))
    args = make_args("GatedNormArgs", heads=heads, dim=dim, gate_stride=gate.shape[1], eps=1e-5)
    for name, dtype, check in (("gated_norm_f32", np.float32, close), ("gated_norm_f16", np.float16, near)):
        y = Output(x.shape, dtype)
        groups = (ceil_div(32 * heads, 64), tokens)
        run(name, weight, x, gate, y.buffer, args, groups=groups, threads=(64, 1))
        check(y.check(), expected)


@pytest.mark.parametrize(("heads", "dim"), [(2, 32), (3, 24)])
def test_gate_heads(run: Run, heads: int, dim: int) -> None:
    rng = np.random.default_rng(dim)
    tokens = 5
    q = (4 * rng.standard_normal((tokens, 2 * heads * dim + 11))).astype(np.float32)
    q[0, dim : dim + 2] = 100, -100
    gates = q[:, : 2 * heads * dim].astype(np.float64).reshape(tokens, heads, 2, dim)[:, :, 1]
    args = make_args(
        *("GateHeadsArgs",),
        n_heads=heads,
        value_dim=dim,
        q_stride=q.shape[1],
        query_step=2 * dim,
        tokens=tokens,
    )
    for name, dtype, check in (("gate_heads_f32", np.float32, close), ("gate_heads_f16", np.float16, near)):
        before = rng.standard_normal((tokens, heads, dim)).astype(dtype)
        y = Output(before.shape, dtype, initial=before)
        groups = (ceil_div(heads * dim, 64), tokens)
        run(name, q, y.buffer, args, groups=groups, threads=(64, 1))
        check(y.check(), before.astype(np.float64) / (1 + np.exp(-gates)))
