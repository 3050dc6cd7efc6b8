"""Work of the products with weights."""

from __future__ import annotations

from math import ceil, log2

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
    item_of,
)
from metal_prefill.gpu._dispatches import Dispatch

MULTI_TOKEN_TILE = _core.shader_constants["MULTI_TOKEN_TILE"]
FEW_TOKEN_ROWS = _core.shader_constants["FEW_TOKEN_ROWS"]
MANY_TOKEN_ROWS = _core.shader_constants["MANY_TOKEN_ROWS"]
MANY_TOKEN_TILE = _core.shader_constants["MANY_TOKEN_TILE"]
NORMED_MATVEC_ROWS = _core.shader_constants["NORMED_MATVEC_ROWS"]


def matvec(d: Dispatch) -> Work:
    """Return the work of products in float32: of one token, or of tiles of tokens that share the weights.

    Kernels that norm the token process one token.
    """
    a = d.args
    item_bytes, dequantize = item_of(d.kernel)
    lanes, items, tokens = a["lanes_per_row"], a["in_dim"] // 8, a["tokens"]
    norm = d.kernel.startswith("rmsnorm")
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
    ahead = 1 if rows == 4 else {1: 3, 2: 3, 4: 2, 8: 1}[tile]
    rounds = ceil(ceil(items / lanes) / ahead) * ahead
    round_ops = (dequantize + Ops(alu=8) * tile) * rows + Ops(memory=2) * tile + LOOP
    x_row, shared = a["in_dim"] * FLOAT, 0
    ops, loads = Ops(), 0
    if norm:  # its factor first
        round_ops += Ops(alu=16, memory=2)
        shared = x_row  # the norm's weights
        loads = ceil(a["in_dim"] / 4 / SIMD / 8)  # eight values of a lane at a time
        ops = (Ops(alu=56, memory=8) + LOOP) * loads + Ops(alu=7, shuffle=5, rsqrt=1)
    # Sums of each token, then of half as many tokens from one step to the next.
    steps = rows * (tile * log2(lanes / tile) + tile - 1)
    ops += round_ops * rounds + Ops(alu=6) * (rows * tile) + Ops(alu=1 if tile == 1 else 3, shuffle=1) * steps
    if "swiglu" in d.kernel:
        ops += Ops(alu=6, exp=1, rcp=1) * together
    simdgroups = d.threads // SIMD
    group_rows = d.threads // lanes * together
    weights = matrices * a["out_dim"] * a["row_bytes"]
    x, tile_x = tokens * x_row + shared, tile * x_row + shared
    out = tokens * a["out_dim"] * FLOAT * (2 if a["accumulate"] else 1)
    return dispatch_work(
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


def matmul(d: Dispatch) -> Work:
    a = d.args
    item_bytes, dequantize = item_of(d.kernel)
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
    step = (dequantize + Ops(memory=2)) * weight_items + Ops(memory=4) * token_items + LOOP
    sums = row_blocks * token_blocks
    if tensors:
        step += Ops(matrix_unit=4 * sums)
        ops = step * steps + (Ops(alu=6, memory=3) + LOOP) * 2 * sums  # through threadgroup memory
    else:
        step += Ops(mma=4 * sums, memory=4 * (row_blocks + token_blocks))
        ops = step * steps + Ops(memory=2 * sums, alu=4 * sums)
    if split:  # the sums of the parts, through threadgroup memory
        outputs = rows * tokens // d.threads  # of a thread
        ops += (Ops(alu=parts + 6, memory=parts + 2) + LOOP) * outputs
    if swiglu:
        ops += (Ops(alu=6, exp=1, rcp=1, memory=3) + LOOP) * sums
    weights = a["out_dim"] * (2 if swiglu else 1) * a["row_bytes"]
    x = a["tokens"] * a["in_dim"] * HALF
    out = a["tokens"] * a["out_dim"] * (HALF if swiglu else FLOAT) * (2 if a["accumulate"] else 1)
    staged = (rows + (0 if tall else tokens)) * 32 * HALF  # bytes of a step, stored once by the group
    # Loaded by its four simdgroups, from threadgroup memory; activations of tall tiles from the first cache.
    loaded = 4 * 4 * (row_blocks + token_blocks) * BLOCK * HALF
    fetched = parts * steps * (rows * 4 * item_bytes + (0 if tall else tokens * 32 * HALF))
    sums_moved = 2 * parts * rows * tokens * FLOAT if split else 0
    buffers, staged_row = 1 if split else 2, 32 if tensors else 40  # halves, padded for simdgroup_matrix
    memory = parts * buffers * (rows + (0 if tall else tokens)) * staged_row * HALF
    return dispatch_work(
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
        threadgroup_bytes=tokens // 2 * rows * FLOAT if tall and swiglu else memory,
    )
