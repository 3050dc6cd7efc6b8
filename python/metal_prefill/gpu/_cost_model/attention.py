"""Work of rotation and attention."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from metal_prefill import _core
from metal_prefill.gpu._cost_model.operations import (
    BLOCK,
    FLOAT,
    HALF,
    LOOP,
    SIMD,
    Ops,
    Work,
    dispatch_work,
)
from metal_prefill.gpu._dispatches import Dispatch

PREFILL_KEYS = _core.shader_constants["PREFILL_KEYS"]
PAGE_POSITIONS = _core.shader_constants["PAGE_POSITIONS"]


def _cache_bytes(kernel: str) -> int:
    return HALF if "_f16" in kernel else FLOAT


def _rotation(a: dict[str, Any]) -> Ops:
    """Return the instructions of a head's simdgroup."""
    rounds = ceil(a["key_dim"] / 2 / SIMD)
    ops: Ops = Ops(alu=24, slow=10) + (Ops(alu=14, slow=4, memory=5) + LOOP) * rounds
    if a["has_q_norm"] or a["has_k_norm"]:
        ops += Ops(alu=8, shuffle=5, rsqrt=1, memory=4) + LOOP * 2
    return ops


def rope(d: Dispatch) -> Work:
    a = d.args
    simdgroups = d.threads // SIMD
    heads, tokens = d.grid[0] * simdgroups, d.grid[1]
    ops = _rotation(a)
    kv = a["n_kv_heads"] * (a["key_dim"] + a["value_dim"])
    queries = 0 if a["skip_queries"] else a["n_heads"] * a["key_dim"]
    row = (2 * queries + kv) * FLOAT + kv * _cache_bytes(d.kernel)
    table = tokens * a["rope_dim"] * FLOAT
    return dispatch_work(
        d,
        ops=ops,
        trips=3,  # the row's entry in the table first
        cached=tokens * row + table + _pages(d) + tokens * 2 * FLOAT,
        fetched=tokens * row + table * heads,
    )


def _first_key(d: Dispatch, position: int) -> int:
    """Return the first key that the row at a position sees."""
    window: int = d.args["window"]
    before = window // 2 if d.args["both_ways"] else window - 1
    return max(position - before, 0) if window else 0


def _keys_after(d: Dispatch, end: int) -> int:
    """Return how many later keys a row sees, within a sequence of `end` keys."""
    if not d.args["both_ways"]:
        return 0
    return d.args["window"] // 2 or end


def _visible(d: Dispatch) -> float:
    """Return the mean number of keys that the rows of the dispatch see."""
    seen = [p + 1 - _first_key(d, p) for position, n in d.runs for p in range(position, position + n)]
    return sum(seen) / len(seen)


def _keys(d: Dispatch) -> int:
    """Return how many keys the rows of the dispatch see, each once for each sequence."""
    return sum(position + n - _first_key(d, position) for position, n in d.runs)


def _pages(d: Dispatch) -> int:
    """Return the bytes of block tables that are read."""
    first = [_first_key(d, position) if "window" in d.args else position for position, _ in d.runs]
    last = [position + n - 1 for position, n in d.runs]
    return sum(
        (b // PAGE_POSITIONS - a // PAGE_POSITIONS + 1) * FLOAT for a, b in zip(first, last, strict=True)
    )


def attention_decode(d: Dispatch) -> Work:
    a = d.args
    size = int(d.kernel.rsplit("_", 1)[1])
    chunks = size // 32
    splits, groups_y, tokens = d.grid
    simdgroups = d.threads // SIMD
    shared = a["n_heads"] / a["n_kv_heads"]
    heads = ceil(shared / (groups_y / a["n_kv_heads"]))
    keys = _visible(d)
    steps = ceil(ceil(keys / splits) / (4 * simdgroups))
    of_head = Ops(alu=8 * chunks + 8, shuffle=3, exp=1)
    ops = (Ops(memory=2 * chunks) + of_head * heads + LOOP) * steps
    join = Ops(alu=12 + 8 * chunks, shuffle=6 + 8 * chunks, exp=2, memory=5 * chunks)
    ops += (Ops(memory=chunks, alu=4 * chunks) + join) * heads
    outputs = ceil(heads * a["value_dim"] / d.threads)
    ops += Ops(alu=4, exp=1, memory=4) * (simdgroups * outputs) + Ops(rcp=1) + LOOP * 2
    element = _cache_bytes(d.kernel)
    row = a["n_kv_heads"] * (a["key_dim"] + a["value_dim"]) * element
    all_keys = _keys(d)
    kv, own = keys * row, min(tokens, all_keys) * row
    out = tokens * a["n_heads"] * (a["value_dim"] + (2 if splits > 1 else 0)) * splits * FLOAT
    q = tokens * a["n_heads"] * a["key_dim"] * FLOAT
    blocks = groups_y / a["n_kv_heads"]
    tables = tokens * 4 * FLOAT + _pages(d)
    ahead = bool(_core.decode_loads_ahead(chunks, element))
    return dispatch_work(
        d,
        ops=ops,
        ahead=ahead,
        # The row's entry in the table and its first page are loaded before its keys. Where the next keys are
        # loaded before the current ones are multiplied, the loads of two steps are in flight together.
        trips=(ceil(steps / 2) if ahead else steps) + 4,
        # After the last read of earlier keys all the weights went through the caches, and replaced the keys.
        dram=all_keys * row - own,
        cached=own + q + out + tables,
        fetched=kv * tokens * blocks + q * splits + out + tables,
        core=kv * tokens * blocks + q * splits * simdgroups + out,
        threadgroup_bytes=8 * heads * (size + 2) * FLOAT,
    )


def rope_attention_decode(d: Dispatch) -> Work:
    """Return the work of attention_decode and of the preceding rotation, which has a separate barrier."""
    a = d.args
    attention = attention_decode(d)
    simdgroups = d.threads // SIMD
    blocks = d.grid[1] / a["n_kv_heads"]
    heads = ceil(a["n_heads"] / a["n_kv_heads"] / blocks) + 2  # queries, and the token's own key and value
    kv = a["n_kv_heads"] * (a["key_dim"] + a["value_dim"])
    own = kv * (FLOAT - _cache_bytes(d.kernel))  # read from q, k and v, where attention reads the cache
    table = a["rope_dim"] * FLOAT
    tokens = d.grid[2]
    return replace(
        attention,
        ops=attention.ops + _rotation(a) * ceil(heads / simdgroups) + Ops(memory=heads),
        trips=attention.trips + 1,  # the queries are loaded once, then the keys
        local_trips=attention.local_trips + 2,
        cached_bytes=attention.cached_bytes + tokens * (own + kv * _cache_bytes(d.kernel) + table),
        fetched_bytes=attention.fetched_bytes + d.groups * (kv * FLOAT / a["n_kv_heads"] + table),
        core_bytes=attention.core_bytes + d.groups * (kv * FLOAT / a["n_kv_heads"] + table * heads),
    )


def attention_combine(d: Dispatch) -> Work:
    a = d.args
    partial = a["splits"] * (a["value_dim"] + 2) * FLOAT
    out = a["value_dim"] * FLOAT
    return dispatch_work(
        d,
        ops=(Ops(alu=8, exp=2, memory=4) + LOOP * 3) * a["splits"] + Ops(rcp=1),
        trips=3 * a["splits"] / 4 + 1,
        cached=d.groups * (partial + out) + d.grid[1] * FLOAT,
        core=d.groups * (3 * partial + out),
    )


@dataclass(frozen=True)
class _Tile:
    """The keys of a tile: from the first step to the end, and those that all of its rows see."""

    start: int
    end: int
    seen_by_all: tuple[int, int]

    @property
    def steps(self) -> float:
        return (self.end - self.start) / PREFILL_KEYS

    @property
    def masked_steps(self) -> int:
        """Steps with a key that some row does not see."""
        first, end = self.seen_by_all
        starts = range(self.start, self.end, PREFILL_KEYS)
        return sum(key < first or key + PREFILL_KEYS > end for key in starts)


def _tiles(d: Dispatch, rows: int) -> list[_Tile]:
    """Return the tiles of so many stacked rows."""
    shared, tiles = d.args["n_heads"] // d.args["n_kv_heads"], []
    for position, n in d.runs:
        for stacked in range(0, shared * n, rows):
            first = position + stacked // shared
            last = position + min(stacked + rows - 1, shared * n - 1) // shared

            def end(row: int, position: int = position, n: int = n) -> int:
                return min(row + _keys_after(d, position + n), position + n - 1) + 1

            start = _first_key(d, first) // PREFILL_KEYS * PREFILL_KEYS
            tiles.append(_Tile(start, end(last), (_first_key(d, last), end(first))))
    return tiles


def _attention_bytes(d: Dispatch, steps: float, element: int) -> dict[str, float]:
    """Return the bytes of attention over many tokens; `steps` are those of all groups that load keys."""
    a = d.args
    tokens, keys = sum(n for _, n in d.runs), sum(position + n for position, n in d.runs)
    of_key = (a["key_dim"] + a["value_dim"]) * element
    kv = keys * a["n_kv_heads"] * of_key
    moved = tokens * a["n_heads"] * (a["key_dim"] * FLOAT + a["value_dim"] * HALF)  # queries and results
    before = kv * (keys - tokens) / keys
    return {
        "dram": before,
        "cached": kv - before + moved + a["tiles"] * 5 * FLOAT + _pages(d),
        "fetched": steps * PREFILL_KEYS * of_key + moved,
        "core": moved,
    }


def attention_prefill(d: Dispatch) -> Work:
    a = d.args
    size = int(d.kernel.rsplit("_", 1)[1])
    element = _cache_bytes(d.kernel)
    row_blocks, dim_blocks = _core.prefill_row_blocks(size, element), size // 8
    key_blocks, value_blocks = a["key_dim"] // 8, a["value_dim"] // 8
    whole = key_blocks == value_blocks == dim_blocks
    tiles = _tiles(d, 8 * row_blocks)
    count, simdgroups = a["tiles"], d.threads // SIMD
    key_steps = [tile.steps for tile in tiles]
    mean, longest = sum(key_steps) / count, max(key_steps)
    masked = mean if a["alibi_heads"] else sum(tile.masked_steps for tile in tiles) / count
    # Where all keys and values of a step are loaded together, they include those that no row sees.
    together = whole and _core.prefill_loads_ahead(size, element)
    loaded_steps = [ceil(steps) for steps in key_steps] if together else key_steps
    loaded = sum(loaded_steps) / count

    blocks = PREFILL_KEYS // 8
    scores = 2 * blocks  # of a lane, for each of its rows
    step = Ops(mma=blocks * row_blocks * (key_blocks + value_blocks)) + LOOP * 2
    loads = Ops(memory=blocks * (key_blocks + value_blocks))
    step += Ops(alu=4, exp=1) * (scores * row_blocks)
    mask = Ops(alu=6, slow=1) * (scores * row_blocks)
    # Of a row: its maximum, the factor, and the output multiplied by it.
    step += (Ops(alu=8 + 2 * value_blocks, shuffle=2, exp=1)) * row_blocks
    # Which elements a lane has; queries and results, a pair of each block.
    around = Ops(alu=30, slow=4, shuffle=15, memory=4) + Ops(alu=40, shuffle=2, rcp=1) * row_blocks
    around += Ops(alu=10, memory=2) * (row_blocks * dim_blocks)
    # Queries in threadgroup memory are loaded for each product, those in registers never.
    queries = blocks * row_blocks * key_blocks if _core.prefill_stages_query(size, element) else 0
    step += Ops(memory=queries)
    kv_step = PREFILL_KEYS * (a["key_dim"] + a["value_dim"]) * element
    all_loaded = sum(loaded_steps) * a["n_kv_heads"]
    moved = _attention_bytes(d, all_loaded / simdgroups, element)
    moved["core"] += all_loaded * kv_step
    moved["core"] += sum(key_steps) * a["n_kv_heads"] * queries * BLOCK * element
    return dispatch_work(
        d,
        # A group has `simdgroups` tiles; tiles beyond the rows end immediately.
        ops=(step * mean + mask * masked + loads * loaded + around) * (count / (simdgroups * d.grid[0])),
        # A step waits for its keys, then for its values. Otherwise blocks of eight keys are loaded one after
        # another, then as many blocks of values; if heads do not fill the variant, each block of dimensions
        # is loaded in a branch and waits for the previous one.
        trips=(2 if together else blocks * (2 if whole else key_blocks + value_blocks)) * loaded + 3,
        local_trips=2 + (blocks * mean if queries else 0),
        longest=longest / mean,
        threadgroup_bytes=d.threadgroup_bytes,
        **moved,
    )


def attention_tensor(d: Dispatch) -> Work:
    """Return the work of attention on matrix units: a group of four simdgroups takes a tile."""
    dims, rows = d.args["key_dim"], _core.shader_constants["ATTENTION_TENSOR_ROWS"]
    key_steps = [tile.steps for tile in _tiles(d, rows)]
    mean, longest = sum(key_steps) / d.args["tiles"], max(key_steps)
    scores, outputs = rows * PREFILL_KEYS // d.threads, rows * dims // d.threads  # of a thread
    blocks = rows * PREFILL_KEYS * dims // (8 * BLOCK) // (d.threads // SIMD)  # of a product and a simdgroup
    step = Ops(matrix_unit=2 * blocks) + Ops(alu=10, exp=1, memory=2) * scores + LOOP * 3
    step += Ops(alu=8, shuffle=1, exp=1, memory=8) + Ops(alu=3, memory=1) * outputs  # rescaled each time
    around = Ops(alu=6, rcp=1, memory=3) * outputs + Ops(alu=3, memory=1) * outputs
    # Operands by quarters of the tile: rows with keys, weights with values. Then scores and weights.
    operands = 4 * HALF * (
        (rows + PREFILL_KEYS) // 2 * dims + (rows + dims) // 2 * PREFILL_KEYS
    ) + rows * PREFILL_KEYS * (2 * FLOAT + HALF)
    all_steps = sum(key_steps) * d.args["n_kv_heads"]
    moved = _attention_bytes(d, all_steps, HALF)
    moved["core"] += all_steps * operands
    return dispatch_work(
        d,
        ops=step * mean + around,
        trips=2 * mean + 3,  # keys, then values
        local_trips=6 * mean,
        longest=longest / mean,
        threadgroup_bytes=rows * (dims * HALF + PREFILL_KEYS * FLOAT + FLOAT) + 16,
        **moved,
    )
