"""Work of the steps of recurrent layers."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from metal_prefill.gpu._cost_model.attention import rope
from metal_prefill.gpu._cost_model.operations import (
    FLOAT,
    HALF,
    LOOP,
    SIMD,
    Ops,
    Work,
    dispatch_work,
)
from metal_prefill.gpu._dispatches import Dispatch


def causal_conv(d: Dispatch) -> Work:
    a = d.args
    channels, taps, tokens = a["channels"], a["taps"], a["tokens"]
    wanted = tokens - a["first_out"]
    inputs = min(tokens, wanted + (taps - 1) * max(1, len(d.runs)))  # rows whose inputs are read
    factors = 2 if a["gated"] else 1  # of an input
    biases = channels * FLOAT if a["biased"] else 0
    states = sum((position > 0) + 1 for position, _ in d.runs)  # read before a run, and written after it
    out = HALF if d.kernel.endswith("f16") else FLOAT
    row = Ops(alu=6, memory=2) + LOOP
    return dispatch_work(
        d,
        ops=row * taps + Ops(alu=12, memory=8) + (Ops(memory=1) + row) * (taps - 1) * (len(d.runs) / tokens),
        trips=2 + taps,
        dram=channels * taps * FLOAT + biases,
        cached=(factors * inputs + a["gated"] * wanted) * channels * FLOAT
        + wanted * channels * out
        + states * (taps - 1) * channels * FLOAT
        + wanted * 20
        + (tokens - wanted) * 4,  # of a row without a result, the slot for its state
        fetched=tokens * channels * (taps * FLOAT + (factors * taps + 1) * FLOAT + out),
    )


def rope_append_conv(d: Dispatch) -> Work:
    """Return the work of rope_append and causal_conv, each of which has some of the threadgroups."""
    heads, (groups, tokens, _) = d.args["head_groups"], d.grid
    append = rope(replace(d, grid=(heads, tokens, 1)))
    conv = causal_conv(replace(d, kernel="causal_conv_f32", grid=(groups - heads, tokens, 1)))
    return dispatch_work(
        d,
        ops=append.ops * (heads / groups) + conv.ops * (1 - heads / groups),
        trips=max(append.trips, conv.trips),
        dram=append.dram_bytes + conv.dram_bytes,
        cached=append.cached_bytes + conv.cached_bytes,
        fetched=append.fetched_bytes + conv.fetched_bytes,
    )


def scan(d: Dispatch) -> Work:
    a = d.args
    heads, dim, rows, tokens = a["heads"], a["dim"], a["rows"], a["tokens"]
    groups, wanted, held = heads // a["heads_per_group"], tokens - a["first_out"], ceil(rows / 8)
    each = tokens / d.grid[1]  # of a sequence
    states = sum((position > 0) + 1 for position, _ in d.runs)  # read before a run, and written after it
    per_token = (Ops(alu=8, memory=2) + LOOP) * held + Ops(alu=30, exp=3, shuffle=6, memory=8) + LOOP
    shared = tokens * 2 * groups * rows * FLOAT  # b and c
    out = HALF if d.kernel.startswith("scan_f16") else FLOAT
    result = heads * dim * (out + (FLOAT if a["gated"] else 0))  # and the gate that it is multiplied by
    moved = tokens * heads * dim * FLOAT + wanted * result + states * heads * rows * dim * FLOAT
    steps = tokens * heads * FLOAT
    return dispatch_work(
        d,
        ops=per_token * each + (Ops(memory=4) + LOOP) * held,
        trips=2 + each,
        dram=3 * heads * FLOAT,
        cached=moved + shared + steps + tokens * 4 + d.grid[1] * 20,
        # Each simdgroup reads b, c and steps.
        fetched=moved + d.groups * (d.threads // SIMD) * each * (2 * rows + 1) * FLOAT,
    )


def scan_norm(d: Dispatch) -> Work:
    a = d.args
    inner, tokens = a["inner"], d.grid[0]
    rounds, passes = ceil(inner / a["groups"] / d.threads), 2
    out = HALF if d.kernel.endswith("f16") else FLOAT
    row = Ops(alu=8, exp=1, rcp=1, memory=3) + LOOP
    weight = inner * FLOAT
    moved = tokens * inner * (2 * FLOAT + out)
    return dispatch_work(
        d,
        ops=row * (rounds * passes) + Ops(alu=20, shuffle=10, rsqrt=1, memory=2) * (passes - 1),
        trips=rounds * passes,
        dram=weight,
        cached=moved,
        fetched=moved + (passes - 1) * tokens * inner * 2 * FLOAT + tokens * weight,
    )


def gated_delta(d: Dispatch) -> Work:
    a = d.args
    tokens, chunks = sum(n for _, n in d.runs), d.grid[2]
    rows, columns = ceil(a["key_dim"] / SIMD), 4  # of a matrix, that a lane has
    matrices = a["heads"] * a["key_dim"] * a["value_dim"] * FLOAT
    read = sum(position > 0 for position, _ in d.runs)
    token = (
        Ops(alu=4 * rows * columns + 12 * columns, shuffle=5 * 2 * columns, memory=columns)  # the matrix
        + Ops(alu=6 * rows + 24, shuffle=10, memory=2 * rows + 6, exp=3, rsqrt=3, rcp=1)  # q, k and rates
        + LOOP * (2 + columns)
    )
    row = (2 * a["groups"] * a["key_dim"] + 2 * a["heads"] * a["value_dim"] + 2 * a["heads"]) * FLOAT
    return dispatch_work(
        d,
        ops=token * (tokens / chunks) + Ops(alu=24, memory=2 * rows * columns) + LOOP * 2 * rows,
        trips=2 + tokens / chunks,
        dram=(read + chunks) * matrices,
        cached=tokens * row,
        fetched=tokens * row * ceil(a["value_dim"] / columns),
    )


def gated_norm(d: Dispatch) -> Work:
    heads, dim, tokens = d.args["heads"], d.args["dim"], d.grid[1]
    rounds = ceil(dim / SIMD)
    out = HALF if d.kernel.endswith("f16") else FLOAT
    return dispatch_work(
        d,
        ops=(Ops(alu=9, exp=1, rcp=1, memory=5) + LOOP * 2) * rounds + Ops(alu=12, shuffle=5, rsqrt=1),
        trips=2,
        cached=tokens * heads * dim * (2 * FLOAT + out) + dim * FLOAT,
        fetched=tokens * heads * dim * (4 * FLOAT + out),
    )
