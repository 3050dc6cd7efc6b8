"""Steps of recurrent layers."""

from collections.abc import Callable
from typing import Any

import numpy as np

from metal_prefill import _core
from metal_prefill.gpu._kernel_checks.attention import rope_append
from metal_prefill.gpu._kernel_checks.captured import SILU, Captured, Expected, Values, activate, rms_normed
from metal_prefill.gpu._trace import layout_of

_STATE_ROW = layout_of("StateRow")
_STATE_NONE = _core.shader_constants["STATE_NONE"]


def causal_conv(d: Captured) -> Expected:
    out = d.after(5, d.out)
    return _convolved(d, d.before(2, np.float32), out, filters=0, rows=3)


def rope_append_conv(d: Captured) -> Expected:
    yield from rope_append(d)
    inputs = d.before(4, np.float32)[d.args["conv_column"] :]
    yield from _convolved(d, inputs, d.after(13, np.float32), filters=9, rows=11)


def _convolved(d: Captured, given: Values, out: Values, *, filters: int, rows: int) -> Expected:
    """Compare a convolution. The biases are bound after the filters, and the states after the rows."""
    a = d.args
    channels, taps, stride = a["channels"], a["taps"], a["slot_stride"]
    weights = d.floats(filters, channels * taps).reshape(channels, taps)
    bias = d.floats(filters + 1, channels) if a["biased"] else 0.0
    table = d.before(rows, _STATE_ROW)
    before, after = d.before(rows + 1, np.float32), d.after(rows + 1, np.float32)

    def part(row: int, index: int) -> Values:
        return given[row * a["in_stride"] + index * channels :][:channels].astype(np.float64)

    def inputs(row: Values) -> Values:
        """Return the inputs of the filter for a row, ``[taps][channels]``."""
        found = np.zeros((taps, channels))
        for i in range(taps):
            token = int(row["token"]) - (taps - 1 - i)
            if token >= 0:
                split = int(row["split"])
                at = int(row["first"]) + token if token < split else int(row["rest"]) + token - split
                found[i] = part(at, 0) * (part(at, 2) if a["gated"] else 1.0)
            elif row["before"] != _STATE_NONE:
                start = int(row["before"]) * stride + (taps - 1 + token) * channels
                found[i] = before[start : start + channels]
        return found

    for token in d.some(a["tokens"] - a["first_out"]):
        row = token + a["first_out"]
        expected = (inputs(table[row]) * weights.T).sum(axis=0)
        expected = part(row, 1) * expected if a["gated"] else activate(expected + bias, SILU)
        yield out[token * channels : (token + 1) * channels], expected
    kept = np.flatnonzero(table["after"][: a["tokens"]] != _STATE_NONE)
    for row in kept[d.some(len(kept))]:
        start = int(table["after"][row]) * stride
        yield after[start : start + (taps - 1) * channels], inputs(table[row])[1:].reshape(-1)


def _rows_of(first: Any) -> list[int]:
    """Return the rows of the tokens of a sequence, from the table's row of its first token."""
    before_split = min(int(first["split"]), int(first["tokens"]))
    rows = [int(first["first"]) + token for token in range(before_split)]
    return rows + [int(first["rest"]) + token for token in range(int(first["tokens"]) - before_split)]


def _recurrence(
    d: Captured,
    table: int,  # binding of the table of rows; that of the states follows
    out: Values,  # outputs, from row `first_out` of the pass on
    sequences: int,
    shape: tuple[int, ...],  # of a state
    step: Callable[[Values, int], tuple[Values, Values]],  # of a token: the next state, and the output
) -> Expected:
    """Compare the outputs of tokens, and the states that are kept after some."""
    total, stride, skipped = d.args["tokens"], d.args["slot_stride"], d.args.get("first_out", 0)
    rows = d.before(table, _STATE_ROW)
    held, after = d.before(table + 1, np.float32), d.after(table + 1, np.float32)
    for first in rows[total : total + sequences]:
        state = np.zeros(shape)
        if first["before"] != _STATE_NONE:
            state = held[int(first["before"]) * stride :][: state.size].reshape(shape).astype(np.float64)
        for row in _rows_of(first):
            state, y = step(state, row)
            if row >= skipped:
                yield out[(row - skipped) * y.size :][: y.size], y
            if rows["after"][row] != _STATE_NONE:
                yield after[int(rows["after"][row]) * stride :][: state.size], state.reshape(-1)


def scan(d: Captured) -> Expected:
    a = d.args
    heads, dim, rows, total = a["heads"], a["dim"], a["rows"], a["tokens"]
    groups = heads // a["heads_per_group"]
    rates, bias, skip = (d.floats(i, heads) for i in range(3))
    projected = d.before(3, np.float32)
    convolved = d.before(4, np.float32)[: total * (heads * dim + 2 * groups * rows)].reshape(total, -1)

    def step(state: Values, row: int) -> tuple[Values, Values]:
        x, b, c = np.split(convolved[row].astype(np.float64), [heads * dim, heads * dim + groups * rows])
        b, c = (np.repeat(part.reshape(groups, rows), heads // groups, axis=0) for part in (b, c))
        x = x.reshape(heads, dim)
        gate = projected[row * a["row_stride"] :][: a["row_stride"]].astype(np.float64)
        delta = np.logaddexp(0.0, gate[a["dt_column"] :][:heads] + bias)
        state = np.exp(delta * rates)[:, None, None] * state + (delta[:, None] * b)[:, :, None] * x[:, None]
        y = ((c[:, :, None] * state).sum(axis=1) + skip[:, None] * x).reshape(-1)
        return state, y * activate(gate[: heads * dim], SILU) if a["gated"] else y

    out = d.after(7, np.float16 if d.kernel.startswith("scan_f16") else np.float32)
    yield from _recurrence(d, 5, out, d.grid[1], (heads, rows, dim), step)


def scan_norm(d: Captured) -> Expected:
    a = d.args
    inner, groups, first = a["inner"], a["groups"], a["first_out"] * a["row_stride"]
    rows = d.places(d.grid[0], inner)
    for row, gate in zip(rows, d.places(d.grid[0], inner, a["row_stride"]), strict=True):
        gates = d.floats(1, slice(gate.start + first, gate.stop + first))
        gated = (activate(gates, SILU) * d.floats(2, row)).reshape(groups, -1)
        expected = rms_normed(gated, d.floats(0, inner).reshape(groups, -1), a["eps"])
        yield d.after(3, d.out)[row], expected.ravel()


def gated_delta(d: Captured) -> Expected:
    a = d.args
    heads, groups, keys, width = a["heads"], a["groups"], a["key_dim"], a["value_dim"]
    decay, bias = (d.floats(i, heads) for i in range(2))
    given, rates = d.before(2, np.float32), d.before(3, np.float32)

    def step(state: Values, row: int) -> tuple[Values, Values]:
        qkv = given[row * a["in_stride"] :][: 2 * groups * keys + heads * width].astype(np.float64)
        q, k, v = np.split(qkv, [groups * keys, 2 * groups * keys])
        q, k = (part.reshape(groups, keys) for part in (q, k))
        q, k = (part / np.sqrt((part**2).sum(-1, keepdims=True) + 1e-6) for part in (q, k))
        q, k = (np.tile(part, (heads // groups, 1)) for part in (q / np.sqrt(keys), k))
        rate = rates[row * a["rate_stride"] :][: 2 * heads].astype(np.float64)
        state = state * np.exp(decay * np.logaddexp(0.0, rate[:heads] + bias))[:, None, None]
        error = v.reshape(heads, width) - np.einsum("hk,hkv->hv", k, state)
        state = state + np.einsum("hk,hv->hkv", k, error / (1.0 + np.exp(-rate[heads:]))[:, None])
        return state, np.einsum("hk,hkv->hv", q, state).reshape(-1)

    yield from _recurrence(d, 4, d.after(6, np.float32), d.grid[2], (heads, keys, width), step)


def gated_norm(d: Captured) -> Expected:
    heads, dim, tokens = d.args["heads"], d.args["dim"], d.grid[1]
    gates = d.places(tokens, heads * dim, d.args["gate_stride"])
    for row, gate in zip(d.places(tokens, heads * dim), gates, strict=True):
        normed = rms_normed(d.floats(1, row).reshape(heads, dim), d.floats(0, dim), d.args["eps"])
        yield d.after(3, d.out)[row], normed.ravel() * activate(d.floats(2, gate), SILU)
