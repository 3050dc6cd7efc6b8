"""Work of embeddings, norms, activations and outputs."""

from __future__ import annotations

from math import ceil

from metal_prefill.gpu._cost_model.operations import (
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


def embed(d: Dispatch) -> Work:
    a = d.args
    _, dequantize = item_of(d.kernel)
    table, out = a["tokens"] * a["row_bytes"], a["tokens"] * a["dim"] * FLOAT
    return dispatch_work(
        d,
        ops=dequantize + Ops(alu=8, memory=3) + LOOP,
        trips=2,
        dram=table,
        cached=out * (2 if a["accumulate"] else 1),
    )


def layernorm(d: Dispatch) -> Work:
    rounds = ceil(d.args["dim"] / 4 / d.threads)
    row, stream = d.args["dim"] * FLOAT, d.kernel.endswith("stream")
    moved = d.groups * row * (5 / 2 if stream else 3 / 2 if d.kernel.endswith("f16") else 2)
    shared = row * (1 + d.args["has_bias"] + d.args["has_addend"])
    simdgroups = d.threads // SIMD
    reduce = Ops(alu=5, shuffle=5) * (1 if simdgroups == 1 else 2)
    ops = (Ops(alu=20, memory=6 if stream else 4) + LOOP * 3) * rounds + reduce * 2
    return dispatch_work(
        d,
        ops=ops + Ops(alu=4, rcp=2, rsqrt=1),
        trips=3 * rounds,
        dram=shared,
        cached=moved,
        core=moved + 2 * d.groups * row + d.groups * shared,
    )


def layernorm_twice(d: Dispatch) -> Work:
    rounds = ceil(d.args["dim"] / 4 / d.threads)
    row = d.args["dim"] * FLOAT
    moved = d.groups * row * 9 / 2
    shared = row * (2 + d.args["has_bias"] + d.args["has_addend"] + d.args["has_second_bias"])
    simdgroups = d.threads // SIMD
    reduce = Ops(alu=5, shuffle=5) * (1 if simdgroups == 1 else 2)
    ops = (Ops(alu=46, memory=17) + LOOP * 6) * rounds + reduce * 4
    return dispatch_work(
        d,
        ops=ops + Ops(alu=8, rcp=4, rsqrt=2),
        trips=6 * rounds,
        dram=shared,
        cached=moved,
        core=moved + 7 * d.groups * row + d.groups * shared,
    )


def add_bias(d: Dispatch) -> Work:
    row = d.args["dim"] * FLOAT
    return dispatch_work(d, ops=Ops(alu=4, memory=3) + LOOP, trips=1, dram=row, cached=2 * d.grid[1] * row)


def rmsnorm(d: Dispatch) -> Work:
    rounds = ceil(d.args["dim"] / 4 / d.threads)
    tokens = d.groups
    row = d.args["dim"] * FLOAT
    if not d.args["has_weight"]:  # each row is copied, to a matmul in another type
        moved = tokens * row * (3 / 2 if d.kernel.endswith("f16") else 2)
        return dispatch_work(d, ops=(Ops(alu=2, memory=2) + LOOP) * rounds, trips=rounds, cached=moved)
    out = row // 2 if d.kernel.endswith("f16") else row * (2 if d.kernel.endswith("add") else 1)
    simdgroups = d.threads // SIMD
    reduce = Ops(alu=5, shuffle=5) * (1 if simdgroups == 1 else 2)
    ops = (Ops(alu=4, memory=1) + Ops(alu=8, memory=3) + LOOP * 2) * rounds + reduce
    return dispatch_work(
        d,
        ops=ops + Ops(alu=2, rcp=1, rsqrt=1),
        # The first round with its weights; then two rounds at a time, once to sum and once to multiply.
        trips=1 + 2 * ceil((rounds - 1) / 2),
        dram=row,
        cached=tokens * (row + out),
        fetched=tokens * (2 * row + out),
        core=tokens * (3 * row + out),
    )


def swiglu(d: Dispatch) -> Work:
    values, inputs = d.args["ffn_dim"] * d.args["tokens"], 2 if d.args["gated"] else 1
    moved = values * (inputs * FLOAT + (HALF if d.kernel.endswith("f16") else FLOAT))
    biases = d.args["ffn_dim"] * inputs * FLOAT if d.args["has_bias"] else 0
    return dispatch_work(
        d,
        ops=Ops(alu=6, exp=1, rcp=1, memory=3) + LOOP,
        trips=1,
        dram=biases,
        cached=moved,
    )


def gate_heads(d: Dispatch) -> Work:
    values = d.args["n_heads"] * d.args["value_dim"] * d.args["tokens"]
    size = HALF if d.kernel.endswith("f16") else FLOAT
    return dispatch_work(
        d,
        ops=Ops(alu=10, exp=1, rcp=1, memory=3) + LOOP,
        trips=1,
        cached=values * (FLOAT + 2 * size),
    )


def argmax(d: Dispatch) -> Work:
    first = "stage1" in d.kernel
    rounds = ceil(d.args["n"] / ((d.grid[0] if first else 1) * d.threads))
    rows = d.grid[1] if first else d.grid[0]
    moved = rows * d.args["n"] * (FLOAT if first else 8) + d.groups * 8
    return dispatch_work(
        d,
        ops=(Ops(alu=8, memory=1) + LOOP) * rounds + Ops(alu=24, shuffle=20, memory=3),
        trips=rounds,
        cached=moved,
    )


def log_prob(d: Dispatch) -> Work:
    rounds = ceil(d.args["vocab_size"] / d.threads)
    row = d.args["vocab_size"] * FLOAT
    return dispatch_work(
        d,
        ops=(Ops(alu=3, exp=1, memory=2) + LOOP * 2) * rounds + Ops(alu=20, shuffle=20),
        trips=2 * rounds,
        cached=d.groups * row,
        fetched=2 * d.groups * row,
    )
