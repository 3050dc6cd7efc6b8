"""Comparison of individual dispatches with the same step computed in float64.

A trace with contents contains the buffers of each dispatch before and after it ran. The step is recomputed
from the buffers before, so that only the faulty kernel is reported, not those that read its results. The CPU
engine's code unpacks the weights. For matrix products, only some rows are computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from metal_prefill import _core
from metal_prefill._support.dispatches import decode_args, layout_of
from metal_prefill.files._gguf_file import TENSOR_TYPES

Values = npt.NDArray[Any]
Expected = Iterator[tuple[Values, Values]]  # actual and expected results

_PAGE = _core.shader_constants["PAGE_POSITIONS"]
_SILU = _core.shader_constants["ACTIVATION_SILU"]
_GELU_ERF = _core.shader_constants["ACTIVATION_GELU_ERF"]
_INTERLEAVED = _core.shader_constants["ROPE_INTERLEAVED"]
_NAMES = _core.tensor_types()
_TYPES = {t.name.lower(): number for number, t in TENSOR_TYPES.items() if t.name in _NAMES}
_TILE, _ROW, _STATE_ROW, _CANDIDATE = map(layout_of, ("AttentionTile", "PassRow", "StateRow", "Candidate"))
_STATE_NONE = _core.shader_constants["STATE_NONE"]
_RUN = ("row", "tokens", "position", "pages", "end")  # of a tile: that of its run
_SAMPLED_ROWS = 24
_SAMPLED_TOKENS = 3
# Relative to the largest result. Kernels for few tokens are within 2e-4 of float64, those with operands in
# half precision within a few 1e-3; errors of a faulty kernel are larger by orders of magnitude.
_BOUND = 1e-2


@dataclass(frozen=True)
class Difference:
    """A result that differs from the expected value."""

    kernel: str
    index: int
    got: float
    expected: float

    def __str__(self) -> str:
        return f"{self.kernel}: value {self.index} is {self.got:.6g}, expected {self.expected:.6g}"


class Captured:
    """A dispatch with the contents of its buffers."""

    def __init__(self, dispatch: _core.Dispatch) -> None:
        self.kernel = dispatch.kernel
        self.args = decode_args(dispatch.args_struct, dispatch.args)
        self.grid = dispatch.grid
        self._dispatch = dispatch

    @property
    def offsets(self) -> list[int]:
        """Offsets of the stacked matrices, in bytes from the binding."""
        return [int(n) for n in np.frombuffer(self._dispatch.args, np.uint64, 3)]

    def before(self, binding: int, dtype: Any) -> Values:
        """Return the contents of a buffer, from its binding on, before the dispatch."""
        return _as(np.asarray(self._dispatch.before(binding)), dtype)

    def after(self, binding: int, dtype: Any) -> Values:
        """Return the contents of a buffer, from its binding on, after the dispatch."""
        return _as(np.asarray(self._dispatch.after(binding)), dtype)


def _as(data: npt.NDArray[np.uint8], dtype: Any) -> Values:
    size = np.dtype(dtype).itemsize
    values: Values = data[: data.size // size * size].view(dtype)
    return values


def _some(n: int, most: int) -> npt.NDArray[np.int64]:
    """Return at most `most` of n indices, including the first and the last."""
    return np.unique(np.linspace(0, n - 1, min(n, most)).astype(np.int64))


def _activate(x: Values, activation: int) -> Values:
    if activation == _GELU_ERF:
        exact: Values = 0.5 * x * (1.0 + np.array([math.erf(value) for value in x.ravel() / math.sqrt(2.0)]))
        return exact
    argument = x if activation == _SILU else 1.5957691216057308 * (x + 0.044715 * x**3)
    result: Values = x / (1.0 + np.exp(-argument))
    return result


def _normed(x: Values, weight: Values, eps: float) -> Values:
    result: Values = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight
    return result


class _Matrix:
    """Stacked weight matrices, unpacked by row."""

    def __init__(self, d: Captured, binding: int = 0) -> None:
        self._data = d.before(binding, np.uint8)
        self._type = _TYPES[_type_of(d.kernel)]
        self._columns = d.args["in_dim"]
        self._row_bytes = d.args["row_bytes"]
        self._offsets, self._rows = d.offsets, d.args["rows"]

    def rows(self, indices: npt.NDArray[np.int64]) -> Values:
        """Return rows of the stack, float64 ``[indices][columns]``."""
        ends = np.cumsum(self._rows)
        which = np.searchsorted(ends, indices, side="right")
        return self.rows_of(which, indices - (ends - self._rows)[which])

    def rows_of(self, which: npt.NDArray[np.int64], rows: npt.NDArray[np.int64]) -> Values:
        """Return one row of one matrix for each pair of `which` and `rows`."""
        found = []
        for matrix, row in zip(which, rows, strict=True):
            start = self._offsets[int(matrix)] + int(row) * self._row_bytes
            data = np.ascontiguousarray(self._data[start : start + self._row_bytes])
            found.append(_core.dequantize(self._type, data, self._columns))
        return np.array(found, np.float64)


def _type_of(kernel: str) -> str:
    words = [name for name in sorted(_TYPES, key=len, reverse=True) if f"_{name}" in kernel]
    return words[0]


def _embed(d: Captured) -> Expected:
    dim, row_bytes = d.args["dim"], d.args["row_bytes"]
    ids, table = d.before(1, np.int32), d.before(0, np.uint8)
    for token in _some(d.args["tokens"], _SAMPLED_TOKENS):
        start = int(ids[token]) * row_bytes
        row = _core.dequantize(
            _TYPES[_type_of(d.kernel)], np.ascontiguousarray(table[start : start + row_bytes]), dim
        )
        where = slice(token * dim, (token + 1) * dim)
        before = d.before(2, np.float32)[where] if d.args["accumulate"] else 0.0
        yield d.after(2, np.float32)[where], row.astype(np.float64) * d.args["scale"] + before


def _rmsnorm(d: Captured) -> Expected:
    dim, stride, adds = d.args["dim"], d.args["stride"], d.kernel == "rmsnorm_add"
    y_binding = 1 if d.kernel == "rmsnorm_in_place" else 2
    weight = d.before(0, np.float32)[:dim].astype(np.float64)
    x = d.before(1, np.float32)
    out = np.float16 if d.kernel.endswith("f16") else np.float32
    for token in _some(d.grid[0], _SAMPLED_TOKENS):
        row = slice(token * stride, token * stride + dim)
        expected = x[row].astype(np.float64)
        if d.args["has_weight"]:  # else a copy
            expected = _normed(expected, weight, d.args["eps"])
        yield d.after(y_binding, out)[row], expected + (d.before(y_binding, out)[row] if adds else 0.0)


def _layernorm(d: Captured) -> Expected:
    dim, stride, stream = d.args["dim"], d.args["stride"], d.kernel == "layernorm_stream"
    in_place = stream or d.kernel == "layernorm_in_place"
    weight, bias = (d.before(binding, np.float32)[:dim].astype(np.float64) for binding in (0, 1))
    addend = d.before(2, np.float32)[:dim] if in_place and d.args["has_addend"] else 0.0
    x_binding, y_binding = (3, 3) if in_place else (2, 3)
    x = d.before(x_binding, np.float32)
    out = np.float16 if d.kernel.endswith("f16") else np.float32
    for token in _some(d.grid[0], _SAMPLED_TOKENS):
        first = token * stride
        row = slice(first, first + dim)
        values = x[row].astype(np.float64) + addend
        expected = _normed(values - values.mean(), weight, d.args["eps"])
        expected = expected + (bias if d.args["has_bias"] else 0.0)
        yield d.after(y_binding, out)[row], expected
        if stream:
            yield d.after(4, np.float16)[row], expected


def _layernorm_twice(d: Captured) -> Expected:
    dim, eps = d.args["dim"], d.args["eps"]
    vectors = [d.before(binding, np.float32)[:dim].astype(np.float64) for binding in range(5)]
    weight, bias, addend, second_weight, second_bias = vectors
    for token in _some(d.grid[0], _SAMPLED_TOKENS):
        row = slice(token * dim, (token + 1) * dim)
        attended, x = (d.before(binding, np.float32)[row].astype(np.float64) for binding in (5, 6))
        attended = x + attended + (addend if d.args["has_addend"] else 0.0)
        stream = x + _normed(attended - attended.mean(), weight, eps) + (bias if d.args["has_bias"] else 0.0)
        expected = _normed(stream - stream.mean(), second_weight, eps)
        expected = expected + (second_bias if d.args["has_second_bias"] else 0.0)
        yield d.after(5, np.float32)[row], stream
        yield d.after(6, np.float32)[row], expected
        yield d.after(7, np.float16)[row], expected


def _add_bias(d: Captured) -> Expected:
    dim = d.args["dim"]
    bias = d.before(0, np.float32)[:dim].astype(np.float64)
    for token in _some(d.grid[1], _SAMPLED_TOKENS):
        row = slice(token * dim, (token + 1) * dim)
        yield d.after(1, np.float32)[row], d.before(1, np.float32)[row] + bias


def _product(d: Captured) -> Expected:
    """Yield matrix products with their fused steps: norm before, activation after, addition to the output."""
    args, kernel = d.args, d.kernel
    normed, gated = kernel.startswith("rmsnorm_"), "swiglu" in kernel
    activated = kernel.startswith("silu_")
    half = kernel.startswith("matmul")
    x_binding, y_binding = (2, 3) if normed else (1, 2)
    x = d.before(x_binding, np.float16 if half else np.float32)
    y_type = np.float16 if half and gated else np.float32
    adds = activated or kernel.endswith("_accumulate") or bool(args.get("accumulate"))
    width, stride = args["in_dim"], args["out_stride"]
    rows = _some(args["out_dim"], _SAMPLED_ROWS)
    matrix = _Matrix(d)
    weights = [matrix.rows(rows)]
    if gated:
        weights = [matrix.rows_of(np.full(len(rows), i), rows) for i in range(2)]
    for token in _some(args["tokens"], _SAMPLED_TOKENS):
        if activated:
            gate, up = x[token * 2 * width : (token + 1) * 2 * width].astype(np.float64).reshape(2, width)
            vector = _activate(gate, args["activation"]) * up
        else:
            vector = x[token * width : (token + 1) * width].astype(np.float64)
        if normed:
            vector = _normed(vector, d.before(1, np.float32)[:width].astype(np.float64), args["eps"])
        products = [w @ vector for w in weights]
        expected = _activate(products[0], args["activation"]) * products[1] if gated else products[0]
        where = token * stride + rows
        yield (
            d.after(y_binding, y_type)[where],
            expected + (d.before(y_binding, y_type)[where] if adds else 0.0),
        )


def _swiglu(d: Captured) -> Expected:
    n = d.args["ffn_dim"]
    out = np.float16 if d.kernel.endswith("f16") else np.float32
    columns = 2 * n if d.args["gated"] else n
    bias = d.before(0, np.float32)[:columns] if d.args["has_bias"] else 0.0
    for token in _some(d.args["tokens"], _SAMPLED_TOKENS):
        row = d.before(1, np.float32)[token * columns : (token + 1) * columns].astype(np.float64) + bias
        expected = _activate(row[:n], d.args["activation"]) * (row[n:] if d.args["gated"] else 1.0)
        yield d.after(2, out)[token * n : (token + 1) * n], expected


def _causal_conv(d: Captured) -> Expected:
    a = d.args
    channels, taps, stride = a["channels"], a["taps"], a["slot_stride"]
    filters = d.before(0, np.float32)[: channels * taps].reshape(channels, taps).astype(np.float64)
    bias = d.before(1, np.float32)[:channels].astype(np.float64) if a["has_bias"] else 0.0
    given = d.before(2, np.float32)[: a["tokens"] * a["in_stride"]].reshape(-1, a["in_stride"])
    rows = d.before(3, _STATE_ROW)
    before, after = d.before(4, np.float32), d.after(4, np.float32)
    out = d.after(5, np.float16 if d.kernel.endswith("f16") else np.float32)

    def part(row: int, index: int) -> Values:
        return given[row, index * channels :][:channels].astype(np.float64)

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

    for token in _some(a["tokens"] - a["first_out"], _SAMPLED_TOKENS):
        row = token + a["first_out"]
        expected = (inputs(rows[row]) * filters.T).sum(axis=0)
        expected = part(row, 1) * expected if a["gated"] else _activate(expected + bias, _SILU)
        yield out[token * channels : (token + 1) * channels], expected
    for row in np.flatnonzero(rows["after"][: a["tokens"]] != _STATE_NONE)[-_SAMPLED_TOKENS:]:
        start = int(rows["after"][row]) * stride
        yield after[start : start + (taps - 1) * channels], inputs(rows[row])[1:].reshape(-1)


def _rows_of(first: Any) -> list[int]:
    """Return the rows of the tokens of a sequence, from the table's row of its first token."""
    before_split = min(int(first["split"]), int(first["tokens"]))
    rows = [int(first["first"]) + token for token in range(before_split)]
    return rows + [int(first["rest"]) + token for token in range(int(first["tokens"]) - before_split)]


def _state_before(first: Any, held: Values, stride: int, shape: tuple[int, ...]) -> Values:
    """Return the state before a sequence's tokens of a pass, from slots that are `stride` numbers apart."""
    if first["before"] == _STATE_NONE:
        return np.zeros(shape)
    start = int(first["before"]) * stride
    return held[start : start + math.prod(shape)].reshape(shape).astype(np.float64)


def _scan(d: Captured) -> Expected:
    a = d.args
    heads, dim, rows, total = a["heads"], a["dim"], a["rows"], a["tokens"]
    groups = heads // a["heads_per_group"]
    rates, bias, skip = (d.before(i, np.float32)[:heads].astype(np.float64) for i in range(3))
    steps = d.before(3, np.float32)
    convolved = d.before(4, np.float32)[: total * (heads * dim + 2 * groups * rows)].reshape(total, -1)
    table = d.before(5, _STATE_ROW)
    held, after, out = d.before(6, np.float32), d.after(6, np.float32), d.after(7, np.float32)
    for first in table[total : total + d.grid[1]]:
        state = _state_before(first, held, a["slot_stride"], (heads, rows, dim))
        for row in _rows_of(first):
            x, b, c = np.split(convolved[row].astype(np.float64), [heads * dim, heads * dim + groups * rows])
            b, c = (np.repeat(part.reshape(groups, rows), heads // groups, axis=0) for part in (b, c))
            x, start = x.reshape(heads, dim), row * a["row_stride"] + a["dt_column"]
            step = np.logaddexp(0.0, steps[start : start + heads].astype(np.float64) + bias)
            state = np.exp(step * rates)[:, None, None] * state + (step[:, None] * b)[:, :, None] * x[:, None]
            if row >= a["first_out"]:
                y = (c[:, :, None] * state).sum(axis=1) + skip[:, None] * x
                yield out[row * heads * dim : (row + 1) * heads * dim], y.reshape(-1)
            if table["after"][row] != _STATE_NONE:
                start = int(table["after"][row]) * a["slot_stride"]
                yield after[start : start + state.size], state.reshape(-1)


def _scan_norm(d: Captured) -> Expected:
    a = d.args
    inner, groups = a["inner"], a["groups"]
    weight, gates, y = (d.before(i, np.float32).astype(np.float64) for i in range(3))
    out = d.after(3, np.float16 if d.kernel.endswith("f16") else np.float32)
    for token in _some(d.grid[0], _SAMPLED_TOKENS):
        row = token + a["first_out"]
        gate = gates[row * a["row_stride"] : row * a["row_stride"] + inner]
        gated = (_activate(gate, _SILU) * y[row * inner : (row + 1) * inner]).reshape(groups, -1)
        if a["has_weight"]:
            gated = gated / np.sqrt((gated**2).mean(axis=-1, keepdims=True) + a["eps"])
            gated = gated * weight[:inner].reshape(groups, -1)
        yield out[token * inner : (token + 1) * inner], gated.reshape(-1)


def _gated_delta(d: Captured) -> Expected:
    a = d.args
    heads, groups, keys, width, total = a["heads"], a["groups"], a["key_dim"], a["value_dim"], a["tokens"]
    decay, bias = (d.before(i, np.float32)[:heads].astype(np.float64) for i in range(2))
    given, rates, table = d.before(2, np.float32), d.before(3, np.float32), d.before(4, _STATE_ROW)
    held, after, out = d.before(5, np.float32), d.after(5, np.float32), d.after(6, np.float32)
    for first in table[total : total + d.grid[2]]:
        state = _state_before(first, held, a["slot_stride"], (heads, keys, width))
        rows = _rows_of(first)
        sampled = [rows[token] for token in _some(len(rows), _SAMPLED_TOKENS)]
        for row in rows:
            qkv = given[row * a["in_stride"] :][: 2 * groups * keys + heads * width].astype(np.float64)
            q, k, v = np.split(qkv, [groups * keys, 2 * groups * keys])
            q, k = (part.reshape(groups, keys) for part in (q, k))
            q, k = (part / np.sqrt((part**2).sum(-1, keepdims=True) + 1e-6) for part in (q, k))
            q, k = (np.tile(part, (heads // groups, 1)) for part in (q / np.sqrt(keys), k))
            rate = rates[row * a["rate_stride"] :][: 2 * heads].astype(np.float64)
            state = state * np.exp(decay * np.logaddexp(0.0, rate[:heads] + bias))[:, None, None]
            error = v.reshape(heads, width) - np.einsum("hk,hkv->hv", k, state)
            state = state + np.einsum("hk,hv->hkv", k, error / (1.0 + np.exp(-rate[heads:]))[:, None])
            if row in sampled:
                found = out[row * heads * width : (row + 1) * heads * width]
                yield found, np.einsum("hk,hkv->hv", q, state).reshape(-1)
            if table["after"][row] != _STATE_NONE:
                start = int(table["after"][row]) * a["slot_stride"]
                yield after[start : start + state.size], state.reshape(-1)


def _gated_norm(d: Captured) -> Expected:
    heads, dim, stride = d.args["heads"], d.args["dim"], d.args["gate_stride"]
    weight = d.before(0, np.float32)[:dim].astype(np.float64)
    out = d.after(3, np.float16 if d.kernel.endswith("f16") else np.float32)
    for token in _some(d.grid[1], _SAMPLED_TOKENS):
        row = slice(token * heads * dim, (token + 1) * heads * dim)
        x = d.before(1, np.float32)[row].astype(np.float64).reshape(heads, dim)
        gate = d.before(2, np.float32)[token * stride :][: heads * dim].astype(np.float64)
        yield out[row], _normed(x, weight, d.args["eps"]).ravel() * _activate(gate, _SILU)


def _gate_heads(d: Captured) -> Expected:
    a, dtype = d.args, np.float16 if d.kernel.endswith("f16") else np.float32
    heads, width, step = a["n_heads"], a["value_dim"], a["query_step"]
    for token in _some(a["tokens"], _SAMPLED_TOKENS):
        q = d.before(0, np.float32)[token * a["q_stride"] :][: heads * step].reshape(heads, step)
        gate = q[:, step // 2 :][:, :width].astype(np.float64).ravel()
        row = slice(token * heads * width, (token + 1) * heads * width)
        yield d.after(1, dtype)[row], d.before(1, dtype)[row] / (1.0 + np.exp(-gate))


def _queries(row: Values, args: dict[str, Any]) -> Values:
    """Return the queries at the beginning of a row of qkv, ``[head][key_dim]``."""
    heads, step = args["n_heads"], args["query_step"]
    result: Values = row[: heads * step].reshape(heads, step)[:, : args["key_dim"]]
    return result


def _rotated(d: Captured, args: dict[str, Any], row: Values, position: int) -> tuple[Values, Values, Values]:
    """Return q, k and v of a row of qkv: with bias, norms of heads and rotation, ``[head][dim]``."""
    heads, kv, key, value = args["n_heads"], args["n_kv_heads"], args["key_dim"], args["value_dim"]
    row = row.astype(np.float64)
    if args["has_bias"]:
        row = row + d.before(0, np.float32)[: row.size]
    q = _queries(row, args)
    k, v = np.split(row[heads * args["query_step"] :], [kv * key])
    k, v = k.reshape(kv, key), v.reshape(kv, value)
    if args["has_q_norm"]:
        q = _normed(q, d.before(1, np.float32)[:key].astype(np.float64), args["eps"])
    if args["has_k_norm"]:
        k = _normed(k, d.before(2, np.float32)[:key].astype(np.float64), args["eps"])
    n = args["rope_dim"]
    table = d.before(3, np.float32)[position * n : (position + 1) * n].reshape(n // 2, 2).astype(np.float64)
    first = np.arange(n // 2)
    first, second = (2 * first, 2 * first + 1) if args["style"] == _INTERLEAVED else (first, first + n // 2)
    for head in (q := q.copy(), k := k.copy()):
        a, b = head[:, first].copy(), head[:, second].copy()
        head[:, first] = a * table[:, 0] - b * table[:, 1]
        head[:, second] = a * table[:, 1] + b * table[:, 0]
    return q, k, v


class _Cache:
    """K or V of a sequence after a dispatch."""

    def __init__(
        self, d: Captured, binding: int, pages: int, args: dict[str, Any], dim: int, table: int
    ) -> None:
        self._values = d.after(binding, np.float16 if "_f16" in d.kernel else np.float32)
        self._pages = d.before(pages, np.uint32)[table:]
        self._stride, self._row = args["page_stride"], args["n_kv_heads"] * dim
        self._shape = (args["n_kv_heads"], dim)

    def at(self, position: int) -> Values:
        """Return all heads at a position, ``[kv_head][dim]``."""
        start = int(self._pages[position // _PAGE]) * self._stride + position % _PAGE * self._row
        return self._values[start : start + self._row].reshape(self._shape)

    def of(self, positions: range) -> Values:
        """Return all heads at some positions, ``[position][kv_head][dim]``."""
        return np.array([self.at(p) for p in positions], np.float64)


def _seen(position: int, end: int, window: int, both_ways: bool) -> range:
    """Return the positions that `position` attends to in a sequence of length `end`.

    With causal attention, a window ends at the position; with bidirectional attention, it is centred on it.
    """
    if both_ways:
        side = window // 2 if window else end
        return range(max(0, position - side), min(end, position + side + 1))
    return range(max(0, position + 1 - window) if window else 0, position + 1)


def _rope_append(d: Captured) -> Expected:
    a = d.args
    width = a["n_heads"] * a["query_step"] + a["n_kv_heads"] * (a["key_dim"] + a["value_dim"])
    for token in _some(d.grid[1], _SAMPLED_TOKENS):
        position, table = (int(d.before(5, _ROW)[name][token]) for name in ("position", "pages"))
        row = slice(token * width, (token + 1) * width)
        q, k, v = _rotated(d, a, d.before(4, np.float32)[row], position)
        if not a["skip_queries"]:
            yield _queries(d.after(4, np.float32)[row], a).ravel(), q.ravel()
        yield _Cache(d, 7, 6, a, a["key_dim"], table).at(position).ravel(), k.ravel()
        yield _Cache(d, 8, 6, a, a["value_dim"], table).at(position).ravel(), v.ravel()


def _attend(q: Values, keys: Values, values: Values, a: dict[str, Any], distances: Values) -> Values:
    group = a["n_heads"] // a["n_kv_heads"]
    keys, values = keys.repeat(group, 1), values.repeat(group, 1)
    scores = np.einsum("hd,phd->hp", q, keys) * a["scale"]
    if a["alibi_heads"]:
        head, whole = np.arange(a["n_heads"]), a["alibi_heads"]
        steps = np.where(head < whole, head + 1.0, head - whole + 0.5)
        scores -= (2.0 ** (-a["max_alibi_bias"] * steps / whole))[:, None] * distances
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    result: Values = np.einsum("hp,phd->hd", weights / weights.sum(-1, keepdims=True), values)
    return result


def _joined(partial: Values, splits: int) -> Values:
    """Combine the splits of a row, ``[head][split][value_dim + 2]``, which end with maximum and sum."""
    parts = partial[:, :splits].astype(np.float64)
    weight = np.exp(parts[..., -2:-1] - parts[..., -2:-1].max(1, keepdims=True))
    result: Values = (weight * parts[..., :-2]).sum(1) / (weight * parts[..., -1:]).sum(1)
    return result


def _rows_of_tiles(d: Captured, tiles: Values) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield the first and last row of each run that the tiles contain completely, in `_attention` order."""
    size, element = int(d.kernel.rsplit("_", 1)[1]), 2 if "_f16" in d.kernel else 4
    stacked, heads = 8 * _core.prefill_row_blocks(size, element), d.args["n_heads"] // d.args["n_kv_heads"]
    if d.kernel.startswith("attention_tensor"):
        stacked = _core.shader_constants["ATTENTION_TENSOR_ROWS"]
    for row, n, position, table, end in sorted({tuple(int(t[name]) for name in _RUN) for t in tiles}):
        firsts = tiles["first"][tiles["row"] == row]
        begin = -(-int(firsts.min()) // heads)
        whole = min(int(firsts.max()) + stacked, n * heads) // heads
        for i in sorted({begin, whole - 1}) if begin < whole else ():
            yield row + i, position + i, table, 1, end


def _attention(d: Captured) -> Expected:
    a, fused = d.args, d.kernel.startswith("rope_")
    prefill = d.kernel.startswith(("attention_prefill", "attention_tensor"))
    first = 3 if fused else -1  # the bindings of rope come first
    q_binding, rows_binding, pages, k, v, out = (first + i for i in range(1, 7))
    head, width = a["key_dim"], a["n_heads"] * a["value_dim"]
    stride = a["q_stride"]
    if prefill:
        wanted = list(_rows_of_tiles(d, d.before(rows_binding, _TILE)[: a["tiles"]]))
    else:
        rows = d.before(rows_binding, _ROW)
        wanted = []
        for i in _some(d.grid[2], _SAMPLED_TOKENS):
            position, table, splits = (int(rows[name][i]) for name in ("position", "pages", "splits"))
            wanted.append((int(i), position, table, splits, position + 1))
    for token, position, table, splits, end in wanted:
        row = d.before(q_binding, np.float32)[token * stride : (token + 1) * stride]
        keys, values = _Cache(d, k, pages, a, head, table), _Cache(d, v, pages, a, a["value_dim"], table)
        if fused:
            q, own_key, own_value = _rotated(d, a, row, position)
            yield keys.at(position).ravel(), own_key.ravel()
            yield values.at(position).ravel(), own_value.ravel()
        else:
            q = _queries(row, a).astype(np.float64)
        seen = _seen(position, end, a["window"], bool(a.get("both_ways")))
        distances = np.abs(np.array(seen, np.float64) - position)
        expected = _attend(q, keys.of(seen), values.of(seen), a, distances)
        if a["splits"] > 1 and not prefill:
            shape = (a["n_heads"], a["splits"], a["value_dim"] + 2)
            size = int(np.prod(shape))
            partial = d.after(out, np.float32)[token * size : (token + 1) * size].reshape(shape)
            yield _joined(partial, splits).ravel(), expected.ravel()
        else:
            got = d.after(out, np.float16 if prefill else np.float32)[token * width : (token + 1) * width]
            yield got, expected.ravel()


def _combine(d: Captured) -> Expected:
    a = d.args
    shape = (a["n_heads"], a["splits"], a["value_dim"] + 2)
    size, width = int(np.prod(shape)), a["n_heads"] * a["value_dim"]
    for token in _some(d.grid[1], _SAMPLED_TOKENS):
        partial = d.before(0, np.float32)[token * size : (token + 1) * size].reshape(shape)
        joined = _joined(partial, int(d.before(1, _ROW)["splits"][token]))
        yield d.after(2, np.float32)[token * width : (token + 1) * width], joined.ravel()


def _argmax_stage1(d: Captured) -> Expected:
    groups, n = d.grid[0], d.args["n"]
    for row in range(d.grid[1]):
        logits = d.before(0, np.float32)[row * n : (row + 1) * n]
        found = d.after(1, _CANDIDATE)[row * groups : (row + 1) * groups]
        inside = found["index"] < n
        yield np.where(inside, found["value"], -np.inf).max(keepdims=True), logits.max(keepdims=True)
        yield found["value"][inside], logits[found["index"][inside]]


def _argmax_stage2(d: Captured) -> Expected:
    n = d.args["n"]
    for row in range(d.grid[0]):
        candidates = d.before(0, _CANDIDATE)[row * n : (row + 1) * n]
        best = candidates[np.lexsort((candidates["index"], -candidates["value"]))[:1]]
        found = d.after(1, _CANDIDATE)[row : row + 1]
        yield found["value"], best["value"]
        yield found["index"].astype(np.float64), best["index"].astype(np.float64)


def _log_prob(d: Captured) -> Expected:
    n, targets = d.args["vocab_size"], d.before(1, np.int32)
    for token in _some(d.grid[0], _SAMPLED_TOKENS):
        logits = d.before(0, np.float32)[token * n : (token + 1) * n].astype(np.float64)
        best = logits.max()
        log_prob = logits[targets[token]] - best - np.log(np.exp(logits - best).sum())
        yield d.after(2, np.float32)[token : token + 1], np.array([log_prob if targets[token] >= 0 else 0.0])


# By the prefix of the kernel's name.
_STEPS: dict[str, Callable[[Captured], Expected]] = {
    "embed_": _embed,
    "rmsnorm_matvec_": _product,
    "rmsnorm_": _rmsnorm,
    "layernorm_twice": _layernorm_twice,
    "layernorm_": _layernorm,
    "add_bias": _add_bias,
    "silu_matvec_": _product,
    "matvec_": _product,
    "multi_token_matvec_": _product,
    "matmul_": _product,
    "swiglu_": _swiglu,
    "causal_conv_": _causal_conv,
    "scan_norm_": _scan_norm,
    "scan_": _scan,
    "gated_delta": _gated_delta,
    "gated_norm_": _gated_norm,
    "gate_heads_": _gate_heads,
    "rope_append_": _rope_append,
    "rope_attention_decode_": _attention,
    "attention_combine": _combine,
    "attention_": _attention,
    "argmax_stage1": _argmax_stage1,
    "argmax_stage2": _argmax_stage2,
    "log_prob": _log_prob,
}


def difference(dispatch: _core.Dispatch) -> Difference | None:
    """Return the first incorrect result of a dispatch, or None if all are correct.

    Raises
    ------
    KeyError
        If the kernel has no reference computation.
    """
    captured = Captured(dispatch)
    step = next((step for start, step in _STEPS.items() if dispatch.kernel.startswith(start)), None)
    if step is None:
        raise KeyError(dispatch.kernel)
    for got, expected in step(captured):
        bound = _BOUND * max(float(np.abs(expected[np.isfinite(expected)]).max(initial=0.0)), 1e-6)
        with np.errstate(invalid="ignore"):
            wrong = ~(np.abs(got.astype(np.float64) - expected) <= bound) & (got != expected)
        if wrong.any():
            index = int(np.argmax(wrong))
            return Difference(dispatch.kernel, index, float(got[index]), float(expected[index]))
    return None
