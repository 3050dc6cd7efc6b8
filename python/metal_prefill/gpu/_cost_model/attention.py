"""Work of attention."""

from math import ceil
from typing import Any

from metal_prefill import _core
from metal_prefill.gpu._cost_model.operations import BLOCK, FLOAT, HALF, LOOP, SIMD, Ops, Work, dispatch_work
from metal_prefill.gpu._trace import Dispatch

PREFILL_KEYS = _core.shader_constants["PREFILL_KEYS"]


def _cache_bytes(kernel: str) -> int:
    return HALF if "_f16" in kernel else FLOAT


def _first_key(d: Dispatch, position: int) -> int:
    window: int = d.args["window"]
    before = window // 2 if d.args["both_ways"] else window - 1
    return max(position - before, 0) if window else 0


def attention_decode(d: Dispatch) -> Work:
    """Return the work of attention of single tokens, and of the preceding rotation if the kernel has it."""
    a = d.args
    rotates = d.kernel.startswith("rope")
    size, element = int(d.kernel.rsplit("_", 1)[1]), _cache_bytes(d.kernel)
    sizes = _core.attention_sizes(size, element)
    lanes, simdgroups = sizes["decode_lanes"], d.threads // SIMD
    chunks = size // (4 * lanes)
    splits, groups_y, tokens = d.grid
    blocks = groups_y / a["n_kv_heads"]
    heads = ceil(a["n_heads"] / a["n_kv_heads"] / blocks)
    seen = [p + 1 - _first_key(d, p) for position, n in d.runs for p in range(position, position + n)]
    steps = ceil(ceil(sum(seen) / len(seen) / splits) / (SIMD // lanes * simdgroups))
    ops = (Ops(memory=2 * chunks) + Ops(alu=8 * chunks + 8, slow=1, shuffle=3) * heads + LOOP) * steps
    ops += Ops(alu=12 + 12 * chunks, slow=2, shuffle=6 + 8 * chunks, memory=6 * chunks) * heads  # the join
    of_token = a["n_kv_heads"] * (a["key_dim"] + a["value_dim"])
    row = of_token * element
    keys = sum(position + n - _first_key(d, position) for position, n in d.runs)  # once for each sequence
    own = min(tokens, keys) * row
    out = tokens * a["n_heads"] * (a["value_dim"] + (2 if splits > 1 else 0)) * splits * FLOAT
    q = tokens * a["n_heads"] * a["key_dim"] * FLOAT
    rotated = 0
    if rotates:  # queries, and the token's own key and value, which are read from products
        shares = a["skip_keys"]  # the cache has the token's own key and value
        own_heads = ceil(a["n_heads"] / groups_y) + (0 if shares else 2)
        ops += (Ops(alu=40, slow=14, memory=9) + LOOP * 2) * ceil(own_heads / simdgroups)
        rotated = tokens * ((0 if shares else of_token) + a["rope_dim"]) * FLOAT
    ahead = bool(sizes["decode_loads_ahead"])
    return dispatch_work(
        d,
        ops=ops,
        ahead=ahead,
        # The row's entry in the table and its first page are loaded before its keys. If the next keys are
        # loaded before the current ones are multiplied, the loads of two steps are in flight together.
        trips=(ceil(steps / 2) if ahead else steps) + 4 + rotates,
        # After the last read of earlier keys all the weights went through the caches, and replaced the keys.
        dram=keys * row - own,
        cached=own + q + out + rotated,
        fetched=sum(seen) * row * blocks + q * splits + out,
    )


def _key_steps(d: Dispatch, rows: int) -> list[float]:
    """Return the number of steps over keys for each tile of `rows` stacked rows."""
    a = d.args
    shared, steps = a["n_heads"] // a["n_kv_heads"], []
    for position, n in d.runs:
        after = 0 if not a["both_ways"] else a["window"] // 2 or n  # keys that a row sees after its own
        for stacked in range(0, shared * n, rows):
            first = _first_key(d, position + stacked // shared) // PREFILL_KEYS * PREFILL_KEYS
            last = position + min(stacked + rows - 1, shared * n - 1) // shared
            steps.append((min(last + after, position + n - 1) + 1 - first) / PREFILL_KEYS)
    return steps


def _attention_work(d: Dispatch, steps: float, element: int, core: float, **others: Any) -> Work:
    """Return the work of attention over many tokens; `steps` counts all groups that load keys."""
    a = d.args
    tokens, keys = sum(n for _, n in d.runs), sum(position + n for position, n in d.runs)
    of_key = (a["key_dim"] + a["value_dim"]) * element
    kv = keys * a["n_kv_heads"] * of_key
    moved = tokens * a["n_heads"] * (a["key_dim"] * FLOAT + a["value_dim"] * HALF)  # queries and results
    before = kv * (keys - tokens) / keys
    return dispatch_work(
        d,
        dram=before,
        cached=kv - before + moved + a["tiles"] * 5 * FLOAT,
        fetched=steps * PREFILL_KEYS * of_key + moved,
        core=core + moved,
        **others,
    )


def attention_prefill(d: Dispatch) -> Work:
    a = d.args
    size, element = int(d.kernel.rsplit("_", 1)[1]), _cache_bytes(d.kernel)
    sizes = _core.attention_sizes(size, element)
    row_blocks, dim_blocks = sizes["prefill_row_blocks"], size // 8
    parts = sizes["prefill_value_parts"]
    key_blocks, value_blocks = a["key_dim"] // 8, a["value_dim"] // 8 // parts
    whole = key_blocks == value_blocks * parts == dim_blocks
    key_steps = _key_steps(d, 8 * row_blocks)
    count, simdgroups = a["tiles"], d.threads // SIMD
    mean = sum(key_steps) / count
    # If all keys and values of a step are loaded together, they include those that no row sees.
    together = whole and sizes["prefill_loads_ahead"]
    loaded = sum(ceil(steps) if together else steps for steps in key_steps) / count

    blocks = PREFILL_KEYS // 8
    scores = 2 * blocks * row_blocks  # of a lane
    # Queries in threadgroup memory are loaded for each product, those in registers never.
    queries = blocks * row_blocks * key_blocks if sizes["prefill_stages_query"] else 0
    step = Ops(mma=blocks * row_blocks * (key_blocks + value_blocks), memory=queries) + LOOP * 2
    # Weights; of a row, its maximum, the factor, and the output multiplied by it.
    step += Ops(alu=4, slow=1) * scores + Ops(alu=8 + 2 * value_blocks, slow=1, shuffle=2) * row_blocks
    loads = Ops(memory=blocks * (key_blocks + value_blocks))
    mask = Ops(alu=6, slow=1) * scores  # in the last steps of a tile, or in all
    # Which elements a lane has; queries and results, a pair of each block.
    around = Ops(alu=40 + 10 * dim_blocks, memory=2 * dim_blocks) * row_blocks
    ops = (
        around
        + Ops(alu=30, slow=4, shuffle=15)
        + step * mean
        + loads * loaded
        + mask * (mean if a["alibi_heads"] else min(mean, 1.5))
    )
    kv_step = PREFILL_KEYS * (a["key_dim"] + a["value_dim"] // parts) * element
    steps = count * a["n_kv_heads"] * parts
    return _attention_work(
        d,
        loaded * steps / simdgroups,
        element,
        core=steps * (loaded * kv_step + mean * queries * BLOCK * element),
        # A group has `simdgroups` tiles; tiles beyond the rows end immediately.
        ops=ops * (count / (simdgroups * d.grid[0])),
        # A step waits for its keys, then for its values. Otherwise blocks of eight keys are loaded one after
        # another, then as many blocks of values; if heads do not fill the variant, each block of dimensions
        # is loaded in a branch and waits for the previous one.
        trips=(2 if together else blocks * (2 if whole else key_blocks + value_blocks)) * loaded + 3,
        longest=max(key_steps) / mean,
        threadgroup_bytes=d.threadgroup_bytes,
    )


def attention_tensor(d: Dispatch) -> Work:
    """Return the work of attention on matrix units: a group of four simdgroups takes a tile."""
    dims, rows = d.args["key_dim"], _core.shader_constants["ATTENTION_TENSOR_ROWS"]
    key_steps = _key_steps(d, rows)
    mean = sum(key_steps) / d.args["tiles"]
    scores, outputs = rows * PREFILL_KEYS // d.threads, rows * dims // d.threads  # of a thread
    blocks = rows * PREFILL_KEYS * dims // (8 * BLOCK) // (d.threads // SIMD)  # of a product and a simdgroup
    step = Ops(matrix_unit=2 * blocks) + Ops(alu=10, slow=1, memory=2) * scores + LOOP * 3
    step += Ops(alu=8, slow=1, shuffle=1, memory=8) + Ops(alu=3, memory=1) * outputs  # rescaled each time
    # Operands by quarters of the tile: rows with keys, weights with values. Then scores and weights.
    operands = 4 * HALF * ((rows + PREFILL_KEYS) // 2 * dims + (rows + dims) // 2 * PREFILL_KEYS)
    operands += rows * PREFILL_KEYS * (2 * FLOAT + HALF)
    all_steps = sum(key_steps) * d.args["n_kv_heads"]
    return _attention_work(
        d,
        all_steps,
        HALF,
        core=all_steps * operands,
        ops=step * mean + Ops(alu=9, slow=1.5, memory=4) * outputs,
        trips=2 * mean + 3,  # keys, then values
        local_trips=6 * mean,
        longest=max(key_steps) / mean,
        threadgroup_bytes=rows * (dims * HALF + PREFILL_KEYS * FLOAT + FLOAT) + 16,
    )
