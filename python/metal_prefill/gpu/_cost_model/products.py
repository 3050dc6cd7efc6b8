"""Work of the products with weights."""

from dataclasses import replace
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
from metal_prefill.gpu._trace import Dispatch

_CONSTANTS = _core.shader_constants


def _matrices(d: Dispatch) -> int:
    """Return the number of matrices of a product: two for SwiGLU, except of experts without gates."""
    return 2 if "swiglu" in d.kernel and d.args["rows"][1] > 0 else 1


def matvec(d: Dispatch) -> Work:
    """Return the work of products in float32: of one token, or of tiles of tokens that share the weights."""
    a = d.args
    _, dequantize = item_of(d.kernel)
    lanes, items, tokens = a["lanes_per_row"], a["in_dim"] // 8, a["tokens"]
    norm = d.kernel.startswith("rmsnorm")
    products = 2 if "swiglu" in d.kernel else 1  # without gates, both of the same rows
    # Outputs of a group of lanes, for each token of a tile.
    together, tile, tiles = int(d.kernel[-1]) if "_rows" in d.kernel else 1, 1, 1
    if norm:
        together = _CONSTANTS["NORMED_MATVEC_ROWS"]
    if d.kernel.startswith("multi_token"):
        many, tiles = tokens > _CONSTANTS["MULTI_TOKEN_TILE"], d.grid[0]
        together = _CONSTANTS["MANY_TOKEN_ROWS" if many else "FEW_TOKEN_ROWS"] // products
        tile = _CONSTANTS["MANY_TOKEN_TILE"] if many else next(n for n in (2, 4, 8) if n >= tokens)
    rows = together * products  # of weights that a lane has
    # Rounds that are loaded at once, including those beyond the end.
    ahead = 1 if rows == 4 else {1: 3, 2: 3, 4: 2, 8: 1}[tile]
    rounds = ceil(ceil(items / lanes) / ahead) * ahead
    round_ops = (dequantize + Ops(alu=8) * tile) * rows + Ops(memory=2) * tile + LOOP
    x_row, shared = a["in_dim"] * FLOAT, 0
    ops, loads = Ops(), 0
    if norm:  # its factor first, by eight values of a lane at a time
        round_ops += Ops(alu=16, memory=2)
        shared = x_row  # the norm's weights
        loads = ceil(a["in_dim"] / 4 / SIMD / 8)
        ops = (Ops(alu=56, memory=8) + LOOP) * loads + Ops(alu=7, slow=2, shuffle=5)
    # Sums of each token, then of half as many tokens from one step to the next.
    steps = rows * (tile * log2(lanes / tile) + tile - 1)
    ops += round_ops * rounds + Ops(alu=6) * (rows * tile) + Ops(alu=1 if tile == 1 else 3, shuffle=1) * steps
    if products == 2:
        ops += Ops(alu=6, slow=2.5) * together
    weights = _matrices(d) * a["out_dim"] * a["row_bytes"]
    tile_x = tile * x_row + shared
    out = tokens * a["out_dim"] * FLOAT * (2 if a["accumulate"] else 1)
    return dispatch_work(
        d,
        ops=ops,
        trips=ceil(rounds / ahead) + 1 + loads,
        dram=weights,
        cached=tokens * x_row + shared + out,
        fetched=weights * tiles + d.groups * tile_x + out,
    )


def experts(d: Dispatch) -> Work:
    """Return the work of products of routes: each with another expert, or in tiles that are all full."""
    a, routes = d.args, d.grid[1]
    in_tiles = d.kernel.startswith("matmul")
    args = {**a, "tokens": routes * _CONSTANTS["MATMUL_NARROW_TILE"] if in_tiles else 1, "accumulate": 0}
    grid = d.grid if in_tiles else (d.grid[0], 1, 1)
    work, times = (matmul, 1) if in_tiles else (matvec, routes)
    one = work(replace(d, grid=grid, args=args))
    biases = _matrices(d) * a["out_dim"] * FLOAT if a["has_bias"] else 0
    sums = _CONSTANTS["MATMUL_NARROW_TILE"] ** 2 // d.threads if in_tiles else _matrices(d)  # of a thread
    return replace(
        one,
        ops=one.ops + Ops(alu=1, memory=1) * sums if biases else one.ops,
        groups=d.groups,
        dram_bytes=min(routes, a["rows"][0] // a["out_dim"]) * (one.dram_bytes + biases),
        cached_bytes=times * one.cached_bytes,
        fetched_bytes=times * one.fetched_bytes + routes * biases,
        core_bytes=times * one.core_bytes,
    )


def matmul(d: Dispatch) -> Work:
    """Return the work of products of blocks, of half operands: see docs/kernels.md for the tiles."""
    a = d.args
    item_bytes, dequantize = item_of(d.kernel)
    swiglu, tensors = "swiglu" in d.kernel, d.kernel.startswith("matmul_tensor")
    tall, split = d.kernel.endswith("tall"), d.kernel.endswith("split")
    rows = _CONSTANTS["MATMUL_WIDE_TILE" if tall or d.kernel.endswith("wide") else "MATMUL_NARROW_TILE"]
    tokens = _CONSTANTS["MATMUL_TALL_TOKENS"] if tall else rows
    parts = _CONSTANTS["MATMUL_PARTS"] if split else 1  # of the columns, in one threadgroup
    steps = ceil(a["in_dim"] / _CONSTANTS["MATMUL_K"] / parts)  # of a part
    staged_tokens = 0 if tall else tokens
    sums = (rows // 16) * (tokens // 16)  # 8x8 blocks of a simdgroup
    operands = rows // 16 + tokens // 16
    weight_items, token_items = rows * 4 * parts // d.threads, staged_tokens * 4 * parts // d.threads
    step = (dequantize + Ops(memory=2)) * weight_items + Ops(memory=4) * token_items + LOOP
    if tensors:  # results through threadgroup memory
        ops = (step + Ops(matrix_unit=4 * sums)) * steps + (Ops(alu=6, memory=3) + LOOP) * 2 * sums
    else:
        ops = (step + Ops(mma=4 * sums, memory=4 * operands)) * steps + Ops(memory=2 * sums, alu=4 * sums)
    if split:  # the sums of the parts, through threadgroup memory
        ops += (Ops(alu=parts + 6, memory=parts + 2) + LOOP) * (rows * tokens // d.threads)
    matrices = _matrices(d)
    if swiglu:
        ops += (Ops(alu=6, slow=2.5, memory=3) + LOOP) * (2 * sums / matrices)
    weights = a["out_dim"] * matrices * a["row_bytes"]
    x = a["tokens"] * a["in_dim"] * HALF
    out = a["tokens"] * a["out_dim"] * (HALF if swiglu else FLOAT) * (2 if a["accumulate"] else 1)
    # Bytes of a step: stored once by the group, and loaded by its four simdgroups; of tall tiles, activations
    # come from the first cache.
    moved = (rows + staged_tokens) * 32 * HALF + 4 * 4 * operands * BLOCK * HALF
    loaded = rows * 4 * item_bytes + staged_tokens * 32 * HALF
    sums_moved = 2 * parts * rows * tokens * FLOAT if split else 0
    staged_row = 32 if tensors else 40  # halves, padded for simdgroup_matrix
    memory = parts * (1 if split else 2) * (rows + staged_tokens) * staged_row * HALF
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
        core=d.groups * (parts * steps * (moved + loaded) + sums_moved) + out,
        threadgroup_bytes=tokens // 2 * rows * FLOAT if tall and swiglu else memory,
    )
