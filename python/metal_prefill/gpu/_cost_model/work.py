"""The work of a dispatch: bytes, operations and dependent steps, from its kernel, arguments and geometry.

Instructions are counted from the source of the shaders, by kind: those of the inner loops, with a fixed
allowance for the loop itself. The code that Apple's compiler generates for them has not been seen. Bytes,
each counted once, agree with the emulator's counts (`tests/metal_engine/test_trace.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil, log2
from typing import Any

from metal_prefill import _core
from metal_prefill._support.dispatches import Dispatch

SIMD = 32
PREFILL_KEYS = _core.shader_constants["PREFILL_KEYS"]
MULTI_TOKEN_TILE = _core.shader_constants["MULTI_TOKEN_TILE"]
FEW_TOKEN_ROWS = _core.shader_constants["FEW_TOKEN_ROWS"]
MANY_TOKEN_ROWS = _core.shader_constants["MANY_TOKEN_ROWS"]
MANY_TOKEN_TILE = _core.shader_constants["MANY_TOKEN_TILE"]
NORMED_MATVEC_ROWS = _core.shader_constants["NORMED_MATVEC_ROWS"]
PAGE_POSITIONS = _core.shader_constants["PAGE_POSITIONS"]
# Cycles that scores and weights of attention_prefill take of the banks of threadgroup memory, over the fewest
# possible: at most, as the emulator counts them (`tests/metal_engine/test_attention.py`).
SCORE_BANK_CYCLES = 1.17


@dataclass(frozen=True)
class Ops:
    """Instructions of one simdgroup, by kind; see :class:`metal_prefill.gpu._cost_model.chips.Cycles`."""

    alu: float = 0
    slow: float = 0
    exp: float = 0
    rcp: float = 0
    rsqrt: float = 0
    shuffle: float = 0
    mma: float = 0
    memory: float = 0
    matrix_unit: float = 0

    def __add__(self, other: Ops) -> Ops:
        return Ops(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))

    def __mul__(self, factor: float) -> Ops:
        return Ops(*(a * factor for a in vars(self).values()))


@dataclass(frozen=True)
class Work:
    """The work of a dispatch.

    Attributes
    ----------
    groups, simdgroups
        Threadgroups, and simdgroups of each.
    ops
        Of one simdgroup.
    longest
        Work of the simdgroup that has most, in multiples of the average.
    trips
        Times that a simdgroup waits for memory, one after another.
    local_trips
        The same for threadgroup memory.
    covered
        Whether its products run while it waits.
    ahead
        Whether all of its instructions do.
    dram_bytes
        Bytes read from or written to memory, each counted once: weights, and data that is not in the last
        cache.
    cached_bytes
        Other bytes, each counted once: activations.
    fetched_bytes
        Bytes that the threadgroups read and write, counted for each threadgroup.
    core_bytes
        Bytes that the simdgroups move to and from the first-level cache and threadgroup memory.
    threadgroup_bytes
        Threadgroup memory of a group.
    """

    groups: int
    simdgroups: int
    ops: Ops
    trips: float
    dram_bytes: float
    cached_bytes: float
    fetched_bytes: float
    core_bytes: float
    threadgroup_bytes: int = 0
    local_trips: float = 0
    covered: bool = False
    ahead: bool = False
    longest: float = 1.0


# By tensor type, for an item of 8 values: bytes that a thread loads, and instructions to dequantize it.
_ITEMS: dict[str, tuple[float, Ops]] = {
    "q4_0": (6, Ops(alu=25, slow=2, memory=3)),  # nibbles become halves without conversions
    "q4_1": (8, Ops(alu=25, slow=2, memory=4)),
    "q5_0": (10, Ops(alu=36, slow=25, memory=5)),
    "q5_1": (12, Ops(alu=29, slow=25, memory=6)),
    "q8_0": (10, Ops(alu=9, slow=12, memory=5)),  # pairs of bytes: blocks begin at even addresses
    "q4_k": (14.5, Ops(alu=40, slow=12, memory=8)),
    "q5_k": (22.5, Ops(alu=50, slow=42, memory=12)),
    "q6_k": (19, Ops(alu=50, slow=38, memory=10)),
    "f32": (32, Ops(memory=2)),
    "f16": (16, Ops(memory=2)),
    "bf16": (16, Ops(slow=8, memory=2)),
}
_LOOP = Ops(alu=8, slow=2)  # addresses, the comparison and the branch of a loop
_HALF, _FLOAT = 2, 4
_BLOCK = 64  # values of an 8x8 block


def _work(
    d: Dispatch,
    ops: Ops,
    trips: float,
    *,
    dram: float = 0,
    cached: float,
    fetched: float | None = None,
    core: float | None = None,
    **others: Any,
) -> Work:
    """Return the work of a dispatch; unless given, bytes are fetched once, and moved as often as fetched."""
    once = dram + cached if fetched is None else fetched
    return Work(
        groups=d.groups,
        simdgroups=d.threads // SIMD,
        ops=ops,
        trips=trips,
        dram_bytes=dram,
        cached_bytes=cached,
        fetched_bytes=once,
        core_bytes=once if core is None else core,
        **others,
    )


def _item(kernel: str) -> tuple[float, Ops]:
    kinds = [kind for kind in _ITEMS if f"_{kind}" in kernel]
    return _ITEMS[max(kinds, key=len)]


def _cache_bytes(kernel: str) -> int:
    return _HALF if "_f16" in kernel else _FLOAT


def _matvec(d: Dispatch) -> Work:
    """Return the work of products in float32: of one token, or of tiles of tokens that share the weights.

    Kernels that norm the token process one token; that of SwiGLU processes each token separately.
    """
    a = d.args
    item_bytes, dequantize = _item(d.kernel)
    lanes, items, tokens = a["lanes_per_row"], a["in_dim"] // 8, a["tokens"]
    silu, norm = d.kernel.startswith("silu"), d.kernel.startswith("rmsnorm")
    matrices = 2 if "swiglu" in d.kernel else 1
    # Outputs of a group of lanes, for each token of a tile.
    together, tile, tiles = int(d.kernel[-1]) if "_rows" in d.kernel else 1, 1, 1
    if norm:
        together = NORMED_MATVEC_ROWS
    if d.kernel.startswith("multi_token"):
        tiles = d.grid[0]
        if tokens > MULTI_TOKEN_TILE:
            together, tile = MANY_TOKEN_ROWS // matrices, MANY_TOKEN_TILE
        else:
            together, tile = FEW_TOKEN_ROWS // matrices, next(n for n in (2, 4, 8) if n >= tokens)
    rows = together * matrices  # of weights that a lane has
    # Rounds that are loaded at once, including those beyond the end.
    ahead = 1 if silu or rows == 4 else {1: 3, 2: 3, 4: 2, 8: 1}[tile]
    rounds = ceil(ceil(items / lanes) / ahead) * ahead
    round_ops = (dequantize + Ops(alu=8) * tile) * rows + Ops(memory=2) * tile + _LOOP
    x_row, shared = a["in_dim"] * _FLOAT, 0
    if silu:
        round_ops += Ops(alu=24, exp=8, rcp=8, memory=6)
        x_row *= 2
    ops, loads = Ops(), 0
    if norm:  # its factor first
        round_ops += Ops(alu=16, memory=2)
        shared = x_row  # the norm's weights
        loads = ceil(a["in_dim"] / 4 / SIMD / 8)  # eight values of a lane at a time
        ops = (Ops(alu=56, memory=8) + _LOOP) * loads + Ops(alu=7, shuffle=5, rsqrt=1)
    # Sums of each token, then of half as many tokens from one step to the next.
    steps = rows * (tile * log2(lanes / tile) + tile - 1)
    ops += round_ops * rounds + Ops(alu=6) * (rows * tile) + Ops(alu=1 if tile == 1 else 3, shuffle=1) * steps
    if "swiglu" in d.kernel:
        ops += Ops(alu=6, exp=1, rcp=1) * together
    simdgroups = d.threads // SIMD
    group_rows = d.threads // lanes * together
    weights = matrices * a["out_dim"] * a["row_bytes"]
    x, tile_x = tokens * x_row + shared, tile * x_row + shared
    out = tokens * a["out_dim"] * _FLOAT * (2 if a["accumulate"] or silu else 1)
    return _work(
        d,
        ops=ops,
        trips=ceil(rounds / ahead) + 1 + loads,
        dram=weights,
        cached=x + out,
        fetched=weights * tiles + d.groups * tile_x + out,
        # Rows of a simdgroup share the values that it reads of x; for the norm it reads them once more.
        core=group_rows * d.groups * items * item_bytes * matrices
        + d.groups * simdgroups * (tile_x + norm * x_row)
        + out,
    )


def _matmul(d: Dispatch) -> Work:
    a = d.args
    item_bytes, dequantize = _item(d.kernel)
    swiglu = "swiglu" in d.kernel
    tall, split, tensors = (
        d.kernel.endswith("tall"),
        d.kernel.endswith("split"),
        d.kernel.startswith("matmul_tensor"),
    )
    tile = "WIDE" if tall or d.kernel.endswith("wide") else "NARROW"
    rows = _core.shader_constants[f"MATMUL_{tile}_TILE"]
    tokens = _core.shader_constants["MATMUL_TALL_TOKENS"] if tall else rows
    parts = _core.shader_constants["MATMUL_PARTS"] if split else 1  # of the columns, in one threadgroup
    steps = ceil(a["in_dim"] / _core.shader_constants["MATMUL_K"] / parts)  # of a part
    row_blocks, token_blocks = rows // 16, tokens // 16  # 8x8 blocks of a simdgroup
    weight_items = rows * 4 * parts // d.threads  # for each thread
    token_items = 0 if tall else tokens * 4 * parts // d.threads  # that are staged
    step = (dequantize + Ops(memory=2)) * weight_items + Ops(memory=4) * token_items + _LOOP
    sums = row_blocks * token_blocks
    if tensors:
        step += Ops(matrix_unit=4 * sums)
        ops = step * steps + (Ops(alu=6, memory=3) + _LOOP) * 2 * sums  # through threadgroup memory
    else:
        step += Ops(mma=4 * sums, memory=4 * (row_blocks + token_blocks))
        ops = step * steps + Ops(memory=2 * sums, alu=4 * sums)
    if split:  # the sums of the parts, through threadgroup memory
        outputs = rows * tokens // d.threads  # of a thread
        ops += (Ops(alu=parts + 6, memory=parts + 2) + _LOOP) * outputs
    if swiglu:
        ops += (Ops(alu=6, exp=1, rcp=1, memory=3) + _LOOP) * sums
    weights = a["out_dim"] * (2 if swiglu else 1) * a["row_bytes"]
    x = a["tokens"] * a["in_dim"] * _HALF
    out = a["tokens"] * a["out_dim"] * (_HALF if swiglu else _FLOAT) * (2 if a["accumulate"] else 1)
    staged = (rows + (0 if tall else tokens)) * 32 * _HALF  # bytes of a step, stored once by the group
    # Loaded by its four simdgroups, from threadgroup memory; activations of tall tiles from the first cache.
    loaded = 4 * 4 * (row_blocks + token_blocks) * _BLOCK * _HALF
    fetched = parts * steps * (rows * 4 * item_bytes + (0 if tall else tokens * 32 * _HALF))
    sums_moved = 2 * parts * rows * tokens * _FLOAT if split else 0
    buffers, staged_row = 1 if split else 2, 32 if tensors else 40  # halves, padded for simdgroup_matrix
    memory = parts * buffers * (rows + (0 if tall else tokens)) * staged_row * _HALF
    return _work(
        d,
        ops=ops,
        # The products of a tall tile wait for its activations, too.
        trips=(2 if tall else 1) * steps + 1,
        # A barrier, or two, and the operands: of 8 columns at a time. Then the sums of parts.
        local_trips=(2 if tensors else 6 if split else 5) * steps + (3 if split else 0),
        covered=True,
        dram=weights,
        cached=x + out,
        fetched=weights * d.grid[1] + x * d.grid[0] + out,
        core=d.groups * (parts * steps * (staged + loaded) + sums_moved + fetched) + out,
        threadgroup_bytes=tokens // 2 * rows * _FLOAT if tall and swiglu else memory,
    )


def _embed(d: Dispatch) -> Work:
    a = d.args
    _, dequantize = _item(d.kernel)
    table, out = a["tokens"] * a["row_bytes"], a["tokens"] * a["dim"] * _FLOAT
    return _work(
        d,
        ops=dequantize + Ops(alu=8, memory=3) + _LOOP,
        trips=2,
        dram=table,
        cached=out * (2 if a["accumulate"] else 1),
    )


def _layernorm(d: Dispatch) -> Work:
    rounds = ceil(d.args["dim"] / 4 / d.threads)
    row, stream = d.args["dim"] * _FLOAT, d.kernel.endswith("stream")
    moved = d.groups * row * (5 / 2 if stream else 3 / 2 if d.kernel.endswith("f16") else 2)
    shared = row * (1 + d.args["has_bias"] + d.args["has_addend"])
    simdgroups = d.threads // SIMD
    reduce = Ops(alu=5, shuffle=5) * (1 if simdgroups == 1 else 2)
    ops = (Ops(alu=20, memory=6 if stream else 4) + _LOOP * 3) * rounds + reduce * 2
    return _work(
        d,
        ops=ops + Ops(alu=4, rcp=2, rsqrt=1),
        trips=3 * rounds,
        dram=shared,
        cached=moved,
        core=moved + 2 * d.groups * row + d.groups * shared,
    )


def _layernorm_twice(d: Dispatch) -> Work:
    rounds = ceil(d.args["dim"] / 4 / d.threads)
    row = d.args["dim"] * _FLOAT
    moved = d.groups * row * 9 / 2
    shared = row * (2 + d.args["has_bias"] + d.args["has_addend"] + d.args["has_second_bias"])
    simdgroups = d.threads // SIMD
    reduce = Ops(alu=5, shuffle=5) * (1 if simdgroups == 1 else 2)
    ops = (Ops(alu=46, memory=17) + _LOOP * 6) * rounds + reduce * 4
    return _work(
        d,
        ops=ops + Ops(alu=8, rcp=4, rsqrt=2),
        trips=6 * rounds,
        dram=shared,
        cached=moved,
        core=moved + 7 * d.groups * row + d.groups * shared,
    )


def _add_bias(d: Dispatch) -> Work:
    row = d.args["dim"] * _FLOAT
    return _work(d, ops=Ops(alu=4, memory=3) + _LOOP, trips=1, dram=row, cached=2 * d.grid[1] * row)


def _rmsnorm(d: Dispatch) -> Work:
    rounds = ceil(d.args["dim"] / 4 / d.threads)
    tokens = d.groups
    row = d.args["dim"] * _FLOAT
    if not d.args["has_weight"]:  # each row is copied, to a matmul in another type
        moved = tokens * row * (3 / 2 if d.kernel.endswith("f16") else 2)
        return _work(d, ops=(Ops(alu=2, memory=2) + _LOOP) * rounds, trips=rounds, cached=moved)
    out = row // 2 if d.kernel.endswith("f16") else row * (2 if d.kernel.endswith("add") else 1)
    simdgroups = d.threads // SIMD
    reduce = Ops(alu=5, shuffle=5) * (1 if simdgroups == 1 else 2)
    ops = (Ops(alu=4, memory=1) + Ops(alu=8, memory=3) + _LOOP * 2) * rounds + reduce
    return _work(
        d,
        ops=ops + Ops(alu=2, rcp=1, rsqrt=1),
        # The first round with its weights; then two rounds at a time, once to sum and once to multiply.
        trips=1 + 2 * ceil((rounds - 1) / 2),
        dram=row,
        cached=tokens * (row + out),
        fetched=tokens * (2 * row + out),
        core=tokens * (3 * row + out),
    )


def _rotation(a: dict[str, Any]) -> Ops:
    """Return the instructions of a head's simdgroup."""
    rounds = ceil(a["key_dim"] / 2 / SIMD)
    ops: Ops = Ops(alu=24, slow=10) + (Ops(alu=14, slow=4, memory=5) + _LOOP) * rounds
    if a["has_q_norm"] or a["has_k_norm"]:
        ops += Ops(alu=8, shuffle=5, rsqrt=1, memory=4) + _LOOP * 2
    return ops


def _rope(d: Dispatch) -> Work:
    a = d.args
    simdgroups = d.threads // SIMD
    heads, tokens = d.grid[0] * simdgroups, d.grid[1]
    ops = _rotation(a)
    kv = a["n_kv_heads"] * (a["key_dim"] + a["value_dim"])
    queries = 0 if a["skip_queries"] else a["n_heads"] * a["key_dim"]
    row = (2 * queries + kv) * _FLOAT + kv * _cache_bytes(d.kernel)
    table = tokens * a["rope_dim"] * _FLOAT
    return _work(
        d,
        ops=ops,
        trips=3,  # the row's entry in the table first
        cached=tokens * row + table + _pages(d) + tokens * 2 * _FLOAT,
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
        (b // PAGE_POSITIONS - a // PAGE_POSITIONS + 1) * _FLOAT for a, b in zip(first, last, strict=True)
    )


def _attention_decode(d: Dispatch) -> Work:
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
    ops = (Ops(memory=2 * chunks) + of_head * heads + _LOOP) * steps
    join = Ops(alu=12 + 8 * chunks, shuffle=6 + 8 * chunks, exp=2, memory=5 * chunks)
    ops += (Ops(memory=chunks, alu=4 * chunks) + join) * heads
    outputs = ceil(heads * a["value_dim"] / d.threads)
    ops += Ops(alu=4, exp=1, memory=4) * (simdgroups * outputs) + Ops(rcp=1) + _LOOP * 2
    element = _cache_bytes(d.kernel)
    row = a["n_kv_heads"] * (a["key_dim"] + a["value_dim"]) * element
    all_keys = _keys(d)
    kv, own = keys * row, min(tokens, all_keys) * row
    out = tokens * a["n_heads"] * (a["value_dim"] + (2 if splits > 1 else 0)) * splits * _FLOAT
    q = tokens * a["n_heads"] * a["key_dim"] * _FLOAT
    blocks = groups_y / a["n_kv_heads"]
    tables = tokens * 4 * _FLOAT + _pages(d)
    return _work(
        d,
        ops=ops,
        ahead=bool(_core.decode_loads_ahead(chunks, element)),
        trips=steps + 4,  # the row's entry in the table and its first page are loaded before its keys
        # After the last read of earlier keys all the weights went through the caches, and replaced the keys.
        dram=all_keys * row - own,
        cached=own + q + out + tables,
        fetched=kv * tokens * blocks + q * splits + out + tables,
        core=kv * tokens * blocks + q * splits * simdgroups + out,
        threadgroup_bytes=8 * heads * (size + 2) * _FLOAT,
    )


def _rope_attention_decode(d: Dispatch) -> Work:
    """Return the work of attention_decode and of the preceding rotation, which has a separate barrier."""
    a = d.args
    attention = _attention_decode(d)
    simdgroups = d.threads // SIMD
    blocks = d.grid[1] / a["n_kv_heads"]
    heads = ceil(a["n_heads"] / a["n_kv_heads"] / blocks) + 2  # queries, and the token's own key and value
    kv = a["n_kv_heads"] * (a["key_dim"] + a["value_dim"])
    own = kv * (_FLOAT - _cache_bytes(d.kernel))  # read from q, k and v, where attention reads the cache
    table = a["rope_dim"] * _FLOAT
    tokens = d.grid[2]
    return replace(
        attention,
        ops=attention.ops + _rotation(a) * ceil(heads / simdgroups) + Ops(memory=heads),
        trips=attention.trips + 1,  # the queries are loaded once, then the keys
        local_trips=attention.local_trips + 2,
        cached_bytes=attention.cached_bytes + tokens * (own + kv * _cache_bytes(d.kernel) + table),
        fetched_bytes=attention.fetched_bytes + d.groups * (kv * _FLOAT / a["n_kv_heads"] + table),
        core_bytes=attention.core_bytes + d.groups * (kv * _FLOAT / a["n_kv_heads"] + table * heads),
    )


def _attention_combine(d: Dispatch) -> Work:
    a = d.args
    partial = a["splits"] * (a["value_dim"] + 2) * _FLOAT
    out = a["value_dim"] * _FLOAT
    return _work(
        d,
        ops=(Ops(alu=8, exp=2, memory=4) + _LOOP * 3) * a["splits"] + Ops(rcp=1),
        trips=3 * a["splits"] / 4 + 1,
        cached=d.groups * (partial + out) + d.grid[1] * _FLOAT,
        core=d.groups * (3 * partial + out),
    )


def _key_steps(d: Dispatch, rows: int) -> list[float]:
    """Return the steps of keys of each tile of so many stacked rows."""
    shared, steps = d.args["n_heads"] // d.args["n_kv_heads"], []
    for position, n in d.runs:
        for stacked in range(0, shared * n, rows):
            last = position + min(stacked + rows - 1, shared * n - 1) // shared
            end = min(last + _keys_after(d, position + n), position + n - 1) + 1
            start = _first_key(d, position + stacked // shared) // PREFILL_KEYS * PREFILL_KEYS
            steps.append((end - start) / PREFILL_KEYS)
    return steps


def _attention_bytes(d: Dispatch, steps: float, element: int) -> dict[str, float]:
    """Return the bytes of attention over many tokens; `steps` are those of all groups that load keys."""
    a = d.args
    tokens, keys = sum(n for _, n in d.runs), sum(position + n for position, n in d.runs)
    of_key = (a["key_dim"] + a["value_dim"]) * element
    kv = keys * a["n_kv_heads"] * of_key
    moved = tokens * a["n_heads"] * (a["key_dim"] * _FLOAT + a["value_dim"] * _HALF)  # queries and results
    before = kv * (keys - tokens) / keys
    return {
        "dram": before,
        "cached": kv - before + moved + a["tiles"] * 5 * _FLOAT + _pages(d),
        "fetched": steps * PREFILL_KEYS * of_key + moved,
        "core": moved,
    }


def _attention_prefill(d: Dispatch) -> Work:
    a = d.args
    size = int(d.kernel.rsplit("_", 1)[1])
    element = _cache_bytes(d.kernel)
    row_blocks, dim_blocks = _core.prefill_row_blocks(size, element), size // 8
    key_blocks, value_blocks = a["key_dim"] // 8, a["value_dim"] // 8
    whole = key_blocks == value_blocks == dim_blocks
    rows, tiles = 8 * row_blocks, a["tiles"]
    simdgroups = d.threads // SIMD
    lane_keys = PREFILL_KEYS // (SIMD // rows)
    key_steps = _key_steps(d, rows)
    mean, longest = sum(key_steps) / tiles, max(key_steps)

    blocks = PREFILL_KEYS // 8
    products = blocks * row_blocks * (key_blocks + value_blocks) + row_blocks * value_blocks
    step = Ops(mma=products, memory=blocks * (key_blocks + value_blocks + 2 * row_blocks) + row_blocks)
    step += (Ops(alu=8, exp=1, memory=2)) * lane_keys + Ops(alu=4, shuffle=1, exp=1) + _LOOP * 2
    around = (Ops(alu=8, rcp=1, memory=5) * (lane_keys * dim_blocks / 4)) + Ops(
        memory=dim_blocks * row_blocks
    )
    # Queries in threadgroup memory are loaded for each product, those in registers never.
    queries = blocks * row_blocks * key_blocks if _core.prefill_stages_query(size, element) else 0
    step += Ops(memory=queries)
    kv_step = PREFILL_KEYS * (a["key_dim"] + a["value_dim"]) * element
    scores = rows * PREFILL_KEYS * (3 * _FLOAT + 2 * element) * SCORE_BANK_CYCLES
    scores += queries * _BLOCK * element
    all_steps = sum(key_steps) * a["n_kv_heads"]
    moved = _attention_bytes(d, all_steps / simdgroups, element)
    moved["core"] += all_steps * (kv_step + scores)
    return _work(
        d,
        # A group has `simdgroups` tiles; tiles beyond the rows end immediately.
        ops=(step * mean + around) * (tiles / (simdgroups * d.grid[0])),
        # Blocks of eight keys are loaded one after another, then as many blocks of values; if heads do not
        # fill the variant, each block of dimensions is loaded in a branch and waits for the previous one.
        trips=blocks * (2 if whole else key_blocks + value_blocks) * mean + 3,
        local_trips=(blocks + 3) * mean,
        longest=longest / mean,
        threadgroup_bytes=d.threadgroup_bytes,
        **moved,
    )


def _attention_tensor(d: Dispatch) -> Work:
    """Return the work of attention on matrix units: a group of four simdgroups takes a tile."""
    dims, rows = d.args["key_dim"], _core.shader_constants["ATTENTION_TENSOR_ROWS"]
    key_steps = _key_steps(d, rows)
    mean, longest = sum(key_steps) / d.args["tiles"], max(key_steps)
    scores, outputs = rows * PREFILL_KEYS // d.threads, rows * dims // d.threads  # of a thread
    blocks = rows * PREFILL_KEYS * dims // (8 * _BLOCK) // (d.threads // SIMD)  # of a product and a simdgroup
    step = Ops(matrix_unit=2 * blocks) + Ops(alu=10, exp=1, memory=2) * scores + _LOOP * 3
    step += Ops(alu=8, shuffle=1, exp=1, memory=8) + Ops(alu=3, memory=1) * outputs  # rescaled each time
    around = Ops(alu=6, rcp=1, memory=3) * outputs + Ops(alu=3, memory=1) * outputs
    # Operands by quarters of the tile: rows with keys, weights with values. Then scores and weights.
    operands = 4 * _HALF * (
        (rows + PREFILL_KEYS) // 2 * dims + (rows + dims) // 2 * PREFILL_KEYS
    ) + rows * PREFILL_KEYS * (2 * _FLOAT + _HALF)
    all_steps = sum(key_steps) * d.args["n_kv_heads"]
    moved = _attention_bytes(d, all_steps, _HALF)
    moved["core"] += all_steps * operands
    return _work(
        d,
        ops=step * mean + around,
        trips=2 * mean + 3,  # keys, then values
        local_trips=6 * mean,
        longest=longest / mean,
        threadgroup_bytes=rows * (dims * _HALF + PREFILL_KEYS * _FLOAT + _FLOAT) + 16,
        **moved,
    )


def _swiglu(d: Dispatch) -> Work:
    values, inputs = d.args["ffn_dim"] * d.args["tokens"], 2 if d.args["gated"] else 1
    moved = values * (inputs * _FLOAT + (_HALF if d.kernel.endswith("f16") else _FLOAT))
    biases = d.args["ffn_dim"] * inputs * _FLOAT if d.args["has_bias"] else 0
    return _work(
        d,
        ops=Ops(alu=6, exp=1, rcp=1, memory=3) + _LOOP,
        trips=1,
        dram=biases,
        cached=moved,
    )


def _causal_conv(d: Dispatch) -> Work:
    a = d.args
    channels, taps, tokens = a["channels"], a["taps"], a["tokens"]
    wanted = tokens - a["first_out"]
    inputs = min(tokens, wanted + (taps - 1) * max(1, len(d.runs)))  # rows whose inputs are read
    factors = 2 if a["gated"] else 1  # of an input
    biases = channels * _FLOAT if a["has_bias"] else 0
    states = sum((position > 0) + 1 for position, _ in d.runs)  # read before a run, and written after it
    out = _HALF if d.kernel.endswith("f16") else _FLOAT
    row = Ops(alu=6, memory=2) + _LOOP
    return _work(
        d,
        ops=row * taps + Ops(alu=12, memory=8) + (Ops(memory=1) + row) * (taps - 1) * (len(d.runs) / tokens),
        trips=2 + taps,
        dram=channels * taps * _FLOAT + biases,
        cached=(factors * inputs + a["gated"] * wanted) * channels * _FLOAT
        + wanted * channels * out
        + states * (taps - 1) * channels * _FLOAT
        + wanted * 20
        + (tokens - wanted) * 4,  # of a row without a result, the slot for its state
        fetched=tokens * channels * (taps * _FLOAT + (factors * taps + 1) * _FLOAT + out),
    )


def _scan(d: Dispatch) -> Work:
    a = d.args
    heads, dim, rows, tokens = a["heads"], a["dim"], a["rows"], a["tokens"]
    groups, wanted, held = heads // a["heads_per_group"], tokens - a["first_out"], ceil(rows / 8)
    each = tokens / d.grid[1]  # of a sequence
    states = sum((position > 0) + 1 for position, _ in d.runs)  # read before a run, and written after it
    per_token = (Ops(alu=8, memory=2) + _LOOP) * held + Ops(alu=30, exp=3, shuffle=6, memory=8) + _LOOP
    shared = tokens * 2 * groups * rows * _FLOAT  # b and c
    moved = (tokens + wanted) * heads * dim * _FLOAT + states * heads * rows * dim * _FLOAT
    steps = tokens * heads * _FLOAT
    return _work(
        d,
        ops=per_token * each + (Ops(memory=4) + _LOOP) * held,
        trips=2 + each,
        dram=3 * heads * _FLOAT,
        cached=moved + shared + steps + tokens * 4 + d.grid[1] * 20,
        # Each simdgroup reads b, c and steps.
        fetched=moved + d.groups * (d.threads // SIMD) * each * (2 * rows + 1) * _FLOAT,
    )


def _scan_norm(d: Dispatch) -> Work:
    a = d.args
    inner, tokens = a["inner"], d.grid[0]
    rounds, passes = ceil(inner / a["groups"] / d.threads), 2 if a["has_weight"] else 1
    out = _HALF if d.kernel.endswith("f16") else _FLOAT
    row = Ops(alu=8, exp=1, rcp=1, memory=3) + _LOOP
    weight = inner * _FLOAT if a["has_weight"] else 0
    moved = tokens * inner * (2 * _FLOAT + out)
    return _work(
        d,
        ops=row * (rounds * passes) + Ops(alu=20, shuffle=10, rsqrt=1, memory=2) * (passes - 1),
        trips=rounds * passes,
        dram=weight,
        cached=moved,
        fetched=moved + (passes - 1) * tokens * inner * 2 * _FLOAT + tokens * weight,
    )


def _gated_delta(d: Dispatch) -> Work:
    a = d.args
    tokens, chunks = sum(n for _, n in d.runs), d.grid[2]
    rows, columns = ceil(a["key_dim"] / SIMD), 4  # of a matrix, that a lane has
    matrices = a["heads"] * a["key_dim"] * a["value_dim"] * _FLOAT
    read = sum(position > 0 for position, _ in d.runs)
    token = (
        Ops(alu=4 * rows * columns + 12 * columns, shuffle=5 * 2 * columns, memory=columns)  # the matrix
        + Ops(alu=6 * rows + 24, shuffle=10, memory=2 * rows + 6, exp=3, rsqrt=3, rcp=1)  # q, k and rates
        + _LOOP * (2 + columns)
    )
    row = (2 * a["groups"] * a["key_dim"] + 2 * a["heads"] * a["value_dim"] + 2 * a["heads"]) * _FLOAT
    return _work(
        d,
        ops=token * (tokens / chunks) + Ops(alu=24, memory=2 * rows * columns) + _LOOP * 2 * rows,
        trips=2 + tokens / chunks,
        dram=(read + chunks) * matrices,
        cached=tokens * row,
        fetched=tokens * row * ceil(a["value_dim"] / columns),
    )


def _gated_norm(d: Dispatch) -> Work:
    heads, dim, tokens = d.args["heads"], d.args["dim"], d.grid[1]
    rounds = ceil(dim / SIMD)
    out = _HALF if d.kernel.endswith("f16") else _FLOAT
    return _work(
        d,
        ops=(Ops(alu=9, exp=1, rcp=1, memory=5) + _LOOP * 2) * rounds + Ops(alu=12, shuffle=5, rsqrt=1),
        trips=2,
        cached=tokens * heads * dim * (2 * _FLOAT + out) + dim * _FLOAT,
        fetched=tokens * heads * dim * (4 * _FLOAT + out),
    )


def _gate_heads(d: Dispatch) -> Work:
    values = d.args["n_heads"] * d.args["value_dim"] * d.args["tokens"]
    size = _HALF if d.kernel.endswith("f16") else _FLOAT
    return _work(
        d,
        ops=Ops(alu=10, exp=1, rcp=1, memory=3) + _LOOP,
        trips=1,
        cached=values * (_FLOAT + 2 * size),
    )


def _argmax(d: Dispatch) -> Work:
    first = "stage1" in d.kernel
    rounds = ceil(d.args["n"] / ((d.grid[0] if first else 1) * d.threads))
    rows = d.grid[1] if first else d.grid[0]
    moved = rows * d.args["n"] * (_FLOAT if first else 8) + d.groups * 8
    return _work(
        d,
        ops=(Ops(alu=8, memory=1) + _LOOP) * rounds + Ops(alu=24, shuffle=20, memory=3),
        trips=rounds,
        cached=moved,
    )


def _log_prob(d: Dispatch) -> Work:
    rounds = ceil(d.args["vocab_size"] / d.threads)
    row = d.args["vocab_size"] * _FLOAT
    return _work(
        d,
        ops=(Ops(alu=3, exp=1, memory=2) + _LOOP * 2) * rounds + Ops(alu=20, shuffle=20),
        trips=2 * rounds,
        cached=d.groups * row,
        fetched=2 * d.groups * row,
    )


# By the prefix of a kernel's name.
_WORK: dict[str, Callable[[Dispatch], Work]] = {
    "embed": _embed,
    "matvec": _matvec,
    "rmsnorm_matvec": _matvec,
    "silu_matvec": _matvec,
    "multi_token_matvec": _matvec,
    "matmul": _matmul,
    "rmsnorm": _rmsnorm,
    "layernorm": _layernorm,
    "layernorm_twice": _layernorm_twice,
    "add_bias": _add_bias,
    "rope_append": _rope,
    "rope_attention_decode": _rope_attention_decode,
    "attention_decode": _attention_decode,
    "attention_combine": _attention_combine,
    "attention_prefill": _attention_prefill,
    "attention_tensor": _attention_tensor,
    "swiglu": _swiglu,
    "causal_conv": _causal_conv,
    "scan": _scan,
    "scan_norm": _scan_norm,
    "gated_delta": _gated_delta,
    "gated_norm": _gated_norm,
    "gate_heads": _gate_heads,
    "argmax": _argmax,
    "log_prob": _log_prob,
}


def find_work(dispatch: Dispatch) -> Work | None:
    """Return the work of a dispatch, or None if its kernel is not known."""
    known = [stem for stem in _WORK if dispatch.kernel.startswith(stem)]
    return _WORK[max(known, key=len)](dispatch) if known else None


def work_of(dispatch: Dispatch) -> Work:
    """Return the work of a dispatch.

    Raises
    ------
    ValueError
        If its kernel is not known.
    """
    work = find_work(dispatch)
    if work is None:
        raise ValueError(f"unknown kernel {dispatch.kernel!r}; known are {', '.join(_WORK)}")
    return work
