"""Rotation and attention."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from metal_prefill import _core
from metal_prefill.gpu._kernel_checks.captured import Captured, Expected, Values, rms_normed
from metal_prefill.gpu._trace import layout_of

_PAGE = _core.shader_constants["PAGE_POSITIONS"]
_INTERLEAVED = _core.shader_constants["ROPE_INTERLEAVED"]
_TILE = layout_of("AttentionTile")
_ROW = layout_of("PassRow")
_RUN = ("row", "tokens", "position", "pages", "end")  # of a tile: the fields of its run


def _queries(row: Values, args: dict[str, Any]) -> Values:
    """Return the queries at the beginning of a row of qkv, ``[head][key_dim]``."""
    heads, step = args["n_heads"], args["query_step"]
    return row[: heads * step].reshape(heads, step)[:, : args["key_dim"]]


def _rotated(d: Captured, args: dict[str, Any], row: Values, position: int) -> tuple[Values, Values, Values]:
    """Return q, k and v, with which a row begins: with bias, norms of heads and rotation, ``[head][dim]``."""
    heads, kv, key, value = args["n_heads"], args["n_kv_heads"], args["key_dim"], args["value_dim"]
    row = row[: heads * args["query_step"] + kv * (key + value)].astype(np.float64)
    if args["has_bias"]:
        row = row + d.before(0, np.float32)[: row.size]
    q = _queries(row, args)
    if args["skip_keys"]:
        row, kv = row[: heads * args["query_step"]], 0
    k, v = np.split(row[heads * args["query_step"] :], [kv * key])
    k, v = k.reshape(kv, key), v.reshape(kv, value)
    if args["has_v_norm"]:
        v = rms_normed(v, np.ones(value), args["eps"])

    def normed(heads: Values, binding: int, has_norm: int) -> Values:
        return rms_normed(heads, d.floats(binding, key), args["eps"]) if has_norm else heads

    if not args["norm_after"]:
        q, k = normed(q, 1, args["has_q_norm"]), normed(k, 2, args["has_k_norm"])
    n = args["rope_dim"]
    table = d.floats(3, slice(position * n, (position + 1) * n)).reshape(n // 2, 2)
    first = np.arange(n // 2)
    first, second = (2 * first, 2 * first + 1) if args["style"] == _INTERLEAVED else (first, first + n // 2)
    for head in (q := q.copy(), k := k.copy()):
        a, b = head[:, first].copy(), head[:, second].copy()
        head[:, first] = a * table[:, 0] - b * table[:, 1]
        head[:, second] = a * table[:, 1] + b * table[:, 0]
    if args["norm_after"]:
        q, k = normed(q, 1, args["has_q_norm"]), normed(k, 2, args["has_k_norm"])
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


def rope_append(d: Captured) -> Expected:
    a = d.args
    stride, first = a["row_stride"], a.get("qkv_column", 0)
    for token in d.some(d.grid[1]):
        position, table = (int(d.before(5, _ROW)[name][token]) for name in ("position", "pages"))
        row = slice(token * stride + first, (token + 1) * stride + first)
        q, k, v = _rotated(d, a, d.before(4, np.float32)[row], position)
        if not a["skip_queries"]:
            yield _queries(d.after(4, np.float32)[row], a).ravel(), q.ravel()
        if a["skip_keys"]:
            continue
        yield _Cache(d, 7, 6, a, a["key_dim"], table).at(position).ravel(), k.ravel()
        yield _Cache(d, 8, 6, a, a["value_dim"], table).at(position).ravel(), v.ravel()


# Distances at which the steps of `position_bucket` in shaders/position_bias.h begin.
_BIAS_STEPS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 23, 32, 46, 64, 91)


def _attend(
    q: Values,
    keys: Values,
    values: Values,
    a: dict[str, Any],
    distances: Values,
    added: Values | float,
    sinks: Values | None,
) -> Values:
    group = a["n_heads"] // a["n_kv_heads"]
    keys, values = keys.repeat(group, 1), values.repeat(group, 1)
    scores = np.einsum("hd,phd->hp", q, keys) * a["scale"]
    if cap := a["score_cap"]:
        scores = cap * np.tanh(scores / cap)
    if a["alibi_heads"]:
        head, whole = np.arange(a["n_heads"]), a["alibi_heads"]
        steps = np.where(head < whole, head + 1.0, head - whole + 0.5)
        scores -= (2.0 ** (-a["max_alibi_bias"] * steps / whole))[:, None] * np.abs(distances)
    scores = scores + added
    if sinks is not None:  # scores without values
        scores = np.concatenate([scores, sinks[:, None]], axis=1)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hp,phd->hd", weights[:, : len(values)], values)


def _added(d: Captured, token: int, seen: range, distances: Values) -> Values | float:
    """Return the bias of the scores of the positions that a row sees, ``[head][position]``."""
    a, additions = d.args, d.before(5, np.float32)
    if a["position_bias"]:
        buckets = np.searchsorted(_BIAS_STEPS, np.abs(distances), "right") + 16 * (distances > 0)
        return additions[: 32 * a["n_heads"]].reshape(-1, a["n_heads"])[buckets].T
    if not a["added_keys"]:
        return 0.0
    size = a["n_heads"] * a["added_keys"]
    rows = additions[token * size : (token + 1) * size].reshape(a["n_heads"], -1)
    return rows[:, seen.start : seen.stop].astype(np.float64) * math.log(2)


def relative_scores(d: Captured) -> Expected:
    a = d.args
    heads, dim = a["n_heads"], a["key_dim"]
    tiles = d.before(4, _TILE)[: d.grid[1]]
    for tile in tiles[d.some(len(tiles))]:
        first, end = int(tile["first"]), int(tile["end"])
        keys = _Cache(d, 6, 5, {**a, "n_kv_heads": heads}, dim, int(tile["pages"])).of(range(end))
        for token in first + d.some(min(a["tile_rows"], int(tile["tokens"]) - first)):
            row, position = int(tile["row"]) + int(token), int(tile["position"]) + int(token)
            q = d.floats(3, slice(row * a["q_stride"], row * a["q_stride"] + heads * dim)).reshape(heads, dim)
            rows = d.before(2, np.float32)[a["context"] + position - np.arange(end)].astype(int)
            own_keys, queries = (
                d.before(i, np.float32)[: (rows.max() + 1) * heads * dim].reshape(-1, heads, dim)[rows]
                for i in (0, 1)
            )
            added = np.einsum("hd,phd->hp", q, own_keys) + np.einsum("phd,phd->hp", keys, queries)
            got = d.after(7, np.float32)[row * heads * a["keys"] :][: heads * a["keys"]]
            yield got.reshape(heads, -1)[:, :end].ravel(), (added * a["scale"] / math.log(2)).ravel()


def _joined(partial: Values, splits: int) -> Values:
    """Combine the splits of a row, ``[head][split][value_dim + 2]``, which end with maximum and sum."""
    parts = partial[:, :splits].astype(np.float64)
    weight = np.exp(parts[..., -2:-1] - parts[..., -2:-1].max(1, keepdims=True))
    return (weight * parts[..., :-2]).sum(1) / (weight * parts[..., -1:]).sum(1)


def _rows_of_tiles(d: Captured, tiles: Values) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield rows of each run that the tiles contain completely, as `attention` takes them."""
    size, element = int(d.kernel.rsplit("_", 1)[1]), 2 if "_f16" in d.kernel else 4
    stacked = 8 * _core.attention_sizes(size, element)["prefill_row_blocks"]
    heads = d.args["n_heads"] // d.args["n_kv_heads"]
    if d.kernel.startswith("attention_tensor"):
        stacked = _core.shader_constants["ATTENTION_TENSOR_ROWS"]
    for row, n, position, table, end in sorted({tuple(int(t[name]) for name in _RUN) for t in tiles}):
        firsts = tiles["first"][tiles["row"] == row]
        begin = -(-int(firsts.min()) // heads)
        whole = min(int(firsts.max()) + stacked, n * heads) // heads
        for i in begin + d.some(max(whole - begin, 0)):
            yield row + int(i), position + int(i), table, 1, end


def attention(d: Captured) -> Expected:
    a, fused = d.args, d.kernel.startswith("rope_")
    prefill = d.kernel.startswith(("attention_prefill", "attention_tensor"))
    first = 3 if fused else -1  # the bindings of rope come first
    q_binding, rows_binding, pages, k, v, out = (first + i for i in range(1, 7))
    out += 2 * prefill  # after the terms added to scores, and the sinks
    head, width = a["key_dim"], a["n_heads"] * a["value_dim"]
    stride = a["q_stride"]
    if prefill:
        wanted = list(_rows_of_tiles(d, d.before(rows_binding, _TILE)[: a["tiles"]]))
    else:
        rows = d.before(rows_binding, _ROW)
        wanted = []
        for i in d.some(d.grid[2]):
            position, table, splits = (int(rows[name][i]) for name in ("position", "pages", "splits"))
            wanted.append((int(i), position, table, splits, position + 1))
    for token, position, table, splits, end in wanted:
        row = d.before(q_binding, np.float32)[token * stride : (token + 1) * stride]
        keys, values = _Cache(d, k, pages, a, head, table), _Cache(d, v, pages, a, a["value_dim"], table)
        if fused:
            q, own_key, own_value = _rotated(d, a, row, position)
        else:
            q = _queries(row, a).astype(np.float64)
        if fused and not a["skip_keys"]:
            yield keys.at(position).ravel(), own_key.ravel()
            yield values.at(position).ravel(), own_value.ravel()
        seen = _seen(position, end, a["window"], bool(a.get("both_ways")))
        distances = np.array(seen, np.int64) - position
        added = _added(d, token, seen, distances) if prefill else 0.0
        sinks = d.floats(6, a["n_heads"]) if a["has_sinks"] else None
        expected = _attend(q, keys.of(seen), values.of(seen), a, distances, added, sinks)
        if a["splits"] > 1 and not prefill:
            shape = (a["n_heads"], a["splits"], a["value_dim"] + 2)
            size = int(np.prod(shape))
            partial = d.after(out, np.float32)[token * size : (token + 1) * size].reshape(shape)
            yield _joined(partial, splits).ravel(), expected.ravel()
        else:
            got = d.after(out, np.float16 if prefill else np.float32)[token * width : (token + 1) * width]
            yield got, expected.ravel()


def combine(d: Captured) -> Expected:
    a = d.args
    shape = (a["n_heads"], a["splits"], a["value_dim"] + 2)
    size, width = int(np.prod(shape)), a["n_heads"] * a["value_dim"]
    for token in d.some(d.grid[1]):
        partial = d.before(0, np.float32)[token * size : (token + 1) * size].reshape(shape)
        joined = _joined(partial, int(d.before(1, _ROW)["splits"][token]))
        yield d.after(2, np.float32)[token * width : (token + 1) * width], joined.ravel()
