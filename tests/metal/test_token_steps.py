"""Kernels that process each token separately: embedding, norms, rope and SwiGLU."""

from itertools import product
from typing import Any

import numpy as np
import pytest
from support.extreme_floats import EXTREME, extreme_activations
from support.float64 import ACTIVATIONS, clamped_silu, layer_norm, rms
from support.head_cases import ROPE_CASES, HeadRows
from support.kernel_harness import (
    ACTIVATION_CODES,
    CONSTANTS,
    SILU,
    Array,
    Output,
    Run,
    Weights,
    ceil_div,
    check_both_types,
    close,
    columns,
    make_args,
    near,
)
from support.paged import Pages
from support.small_models import TYPES


def embed(run: Run, table: Weights, ids: Array, x: Output, **fields: Any) -> Array:
    """Look up rows of a table, whose ids may be members of longer rows."""
    tokens, dim = x.array.shape
    stride = ids.shape[1] if ids.ndim > 1 else 1
    given = {"vocab_size": table.rows[0], "id_stride": stride, "accumulate": 0, "scale": 1.0, **fields}
    args = make_args("EmbedArgs", dim=dim, row_bytes=table.row_bytes, tokens=tokens, **given)
    run(
        f"embed_{table.kind.lower()}",
        *(table.bytes[table.offsets[0] :], ids, x.buffer, args),
        groups=(ceil_div(dim // 8, 32), tokens),
        threads=(32, 1),
    )
    return x.check()


@pytest.mark.parametrize("kind", TYPES)
def test_embed(run: Run, kind: str) -> None:
    for scale, stride in [(1.0, 1), (24.0, 2)]:
        rng = np.random.default_rng(1)
        dim = columns(kind, 72)
        table = Weights(rng, kind, [19], dim)
        ids = rng.integers(0, 19, 9).astype(np.int32)
        ids[:2] = 0, 18
        between = np.full((9, stride), 1 << 30, np.int32)  # of which only the first column is read
        between[:, 0] = ids
        found = embed(run, table, between, Output([9, dim]), scale=scale)
        np.testing.assert_allclose(found, scale * table.values[ids], rtol=1e-6, atol=1e-6 * scale)


def test_embed_reads_the_row_of_any_id(run: Run) -> None:
    """Argmax of logits that are all NaN is not a token: results that depend on it are discarded."""
    table = Weights(np.random.default_rng(1), "F32", [19], 8)
    ids = np.array([CONSTANTS["ARGMAX_NONE"], 3], np.uint32)
    found = embed(run, table, ids, Output([2, 8]))
    np.testing.assert_array_equal(found[1], table.values[3].astype(np.float32))


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_embed_adds_rows_of_a_second_table(run: Run, kind: str) -> None:
    """Positions of rows are the ids of the position embedding."""
    rng = np.random.default_rng(2)
    table = Weights(rng, kind, [19], 64)
    rows = rng.integers(0, 19, (9, 4)).astype(np.uint32)  # PassRow, whose first member is the position
    before = rng.standard_normal((9, 64)).astype(np.float32)
    found = embed(run, table, rows, Output([9, 64], initial=before), accumulate=1)
    close(found, before.astype(np.float64) + table.values[rows[:, 0]])


@pytest.mark.parametrize(("dim", "threads"), [(64, 32), (576, 32), (576, 160), (2048, 512), (72, 1024)])
def test_rmsnorm(run: Run, dim: int, threads: int) -> None:
    for tokens, size in [(1, 10), (2, 3e-3), (33, 10)]:  # the mean of the second squares is near epsilon
        rng = np.random.default_rng(dim)
        x = (size * rng.standard_normal((tokens, dim))).astype(np.float32)
        weight = rng.uniform(-1.5, 1.5, dim).astype(np.float32)
        expected = rms(x.astype(np.float64), 1e-5) * weight
        args = make_args("RmsnormArgs", dim=dim, stride=dim, has_weight=1, eps=1e-5)
        grid: dict[str, Any] = {"groups": (tokens,), "threads": (threads,)}
        check_both_types(run, "rmsnorm", weight, x, args, expected=expected, **grid)
        before = rng.standard_normal((tokens, dim)).astype(np.float32)
        y = Output([tokens, dim], initial=before)
        run("rmsnorm_add", weight, weight, x, y.buffer, add_args(dim), **grid)
        close(y.check(), before + expected)
        y = Output([tokens, dim], initial=before)
        scale, args = np.array([0.375], np.float32), add_args(dim, has_scale=1)
        run("rmsnorm_add", weight, scale, x, y.buffer, args, **grid)
        close(y.check(), (before + expected) * 0.375)


def add_args(dim: int, **fields: int) -> Array:
    chosen = {"has_scale": 0, "has_next": 0, **fields}
    return make_args("RmsnormAddArgs", dim=dim, eps=1e-5, next_eps=1e-3, **chosen)


@pytest.mark.parametrize(("dim", "threads"), [(576, 160), (72, 1024)])
def test_rmsnorm_add_norm(run: Run, dim: int, threads: int) -> None:
    """Without a second norm, the second step is a copy."""
    rng = np.random.default_rng(dim)
    x, before = (10 * rng.standard_normal((2, 5, dim))).astype(np.float32)
    weight, following = rng.uniform(-1.5, 1.5, (2, dim)).astype(np.float32)
    stream = before + rms(x.astype(np.float64), 1e-5) * weight
    for has_next, expected in ((1, rms(stream, 1e-3) * following), (0, stream)):
        for name, kind, check in (("f32", np.float32, close), ("f16", np.float16, near)):
            y, normed = Output([5, dim], initial=before), Output([5, dim], kind)
            buffers = (weight, following, x, y.buffer, normed.buffer, add_args(dim, has_next=has_next))
            run(f"rmsnorm_add_norm_{name}", *buffers, groups=(5,), threads=(threads,))
            close(y.check(), stream)
            check(normed.check(), expected)


@pytest.mark.parametrize(("dim", "used", "layers"), [(256, 256, 7), (16, 10, 3)])
def test_layer_inputs(run: Run, dim: int, used: int, layers: int) -> None:
    rng = np.random.default_rng(dim)
    x, added = rng.standard_normal((2, 5, layers, dim)).astype(np.float32)
    x[..., used:], added[..., used:] = 0, 0
    weight = rng.uniform(-1.5, 1.5, dim).astype(np.float32)
    out = Output([5, layers, dim], initial=x)
    args = make_args("LayerInputsArgs", dim=dim, layers=layers, filled=used / dim, eps=0.5)
    groups = (ceil_div(layers, 2), 5)
    run("layer_inputs", weight, added, out.buffer, args, groups=groups, threads=(64, 1))
    normed = rms(x[..., :used].astype(np.float64), 0.5) * weight[:used]
    close(out.check()[..., :used], (normed + added[..., :used]) / np.sqrt(2))
    assert (out.array[..., used:] == 0).all()


@pytest.mark.parametrize("act", ["silu", "gelu"])
def test_gate_input(run: Run, act: str) -> None:
    rng = np.random.default_rng(6)
    gate, inputs = rng.standard_normal((5, 72)).astype(np.float32), rng.standard_normal((5, 200))
    inputs = inputs.astype(np.float32)
    expected = ACTIVATIONS[act](gate.astype(np.float64)) * inputs[:, 100:172]
    args = make_args("GateInputArgs", dim=72, input_stride=200, tokens=5, activation=ACTIVATION_CODES[act])
    buffers = (gate, inputs.ravel()[100:], args)
    check_both_types(run, "gate_input", *buffers, expected=expected, groups=(2, 5), threads=(64, 1))


@pytest.mark.parametrize("threads", [32, 64])
def test_rmsnorm_of_some_columns_in_place(run: Run, threads: int) -> None:
    """Heads of a row that are normalized together, followed by other columns."""
    rng = np.random.default_rng(4)
    rows = rng.standard_normal((3, 200)).astype(np.float32)
    weight = rng.uniform(-1.5, 1.5, 136).astype(np.float32)
    args = make_args("RmsnormArgs", dim=136, stride=200, has_weight=1, eps=1e-5)
    y = Output([3, 200], initial=rows)
    run("rmsnorm_in_place", weight, y.buffer, args, groups=(3,), threads=(threads,))
    normed = rms(rows[:, :136].astype(np.float64), 1e-5) * weight
    close(y.check(), np.hstack([normed, rows[:, 136:]]))


@pytest.mark.parametrize("threads", [32, 64])
def test_rmsnorm_without_a_weight_copies(run: Run, threads: int) -> None:
    x = np.random.default_rng(5).standard_normal((3, 136)).astype(np.float32)
    args = make_args("RmsnormArgs", dim=136, stride=136, has_weight=0, eps=1e-5)
    for kernel, kind in (("rmsnorm_f32", np.float32), ("rmsnorm_f16", np.float16)):
        y = Output([3, 136], kind)
        run(kernel, x, x, y.buffer, args, groups=(3,), threads=(threads,))
        np.testing.assert_array_equal(y.check(), x.astype(kind))


@pytest.mark.parametrize("case", ROPE_CASES)
@pytest.mark.parametrize("cache", [np.float16, np.float32], ids=["f16", "f32"])
def test_rope_append(run: Run, case: str, cache: type) -> None:
    """Tokens of sequences, (tokens, position) each, that are stored in separate pages."""
    sequences = [(3, 62), (1, 64), (2, 7), (1, 0)]
    rows = [(i, p + t) for i, (n, p) in enumerate(sequences) for t in range(n)]
    given = HeadRows([position for _, position in rows], range(len(rows)), **ROPE_CASES[case])
    q_dim = given.n_heads * given.key_dim
    rng = np.random.default_rng(3)

    # The projections of a state may follow q, k and v.
    projected = np.hstack([given.qkv, rng.standard_normal((len(rows), 12)).astype(np.float32)])

    def pages() -> Pages:
        dims = (given.key_dim, given.value_dim)
        return Pages([n + p for n, p in sequences], given.n_kv, dims, cache)

    def append(into: Pages, qkv_buffer: Array, skip_queries: int, skip_keys: int = 0) -> None:
        args = make_args(
            "RopeArgs",
            **given.args | {"skip_keys": skip_keys},
            page_stride=into.stride,
            skip_queries=skip_queries,
            row_stride=projected.shape[1],
        )
        tables = (into.row_table(rows).view(np.uint8), into.pages)
        heads = (0 if skip_keys else 2 * given.n_kv) + (0 if skip_queries else given.n_heads)
        buffers = (given.bias, *given.norms, given.table, qkv_buffer, *tables, into.k.buffer, into.v.buffer)
        name = "rope_append_" + ("f16" if cache is np.float16 else "f32")
        run(name, *buffers, args, groups=(heads, len(rows)), threads=(32,))

    out, written = Output(projected.shape, initial=projected), pages()
    append(written, out.buffer, 0)
    close(out.check()[:, :q_dim], given.q.reshape(-1, q_dim), 1e-5)
    np.testing.assert_array_equal(out.array[:, q_dim:], projected[:, q_dim:])
    bound = 1e-3 if cache is np.float16 else 1e-5
    k_pool, v_pool = written.copies()
    for values, expected in ((False, given.k), (True, given.v)):
        own = [written.rows(sequence, values)[position] for sequence, position in rows]
        close(np.array(own), expected, bound)
        for place in own:
            place[...] = np.nan
    assert np.isnan(written.k.array).all(), "keys were written to another place"
    assert np.isnan(written.v.array).all(), "values were written to another place"

    keys_alone = pages()
    out.array[...] = projected
    append(keys_alone, out.buffer, 1)
    np.testing.assert_array_equal(keys_alone.k.check(), k_pool)
    np.testing.assert_array_equal(keys_alone.v.check(), v_pool)
    np.testing.assert_array_equal(out.check(), projected)

    queries_alone = pages()
    append(queries_alone, out.buffer, 0, skip_keys=1)
    close(out.check()[:, :q_dim], given.q.reshape(-1, q_dim), 1e-5)
    np.testing.assert_array_equal(queries_alone.k.check(), pages().k.array)
    np.testing.assert_array_equal(queries_alone.v.check(), pages().v.array)


def layernorm_args(dim: int, **fields: int) -> Array:
    chosen = {"width": dim, "stride": dim, "has_bias": 0, "has_addend": 0, "has_second_bias": 0, **fields}
    return make_args("LayernormArgs", dim=dim, eps=1e-5, **chosen)


@pytest.mark.parametrize(("dim", "threads"), [(64, 32), (384, 96), (768, 192), (1024, 64), (72, 1024)])
def test_layernorm(run: Run, dim: int, threads: int) -> None:
    for offset, size in [(0, 10), (1000, 10), (0, 3e-3)]:  # the last variance is near epsilon
        for has_bias in [0, 1]:
            rng = np.random.default_rng(dim)
            x = (offset + size * rng.standard_normal((9, dim))).astype(np.float32)
            weight, bias, addend = (rng.uniform(-1.5, 1.5, dim).astype(np.float32) for _ in range(3))
            args = layernorm_args(dim, has_bias=has_bias)
            expected = layer_norm(x, 1e-5) * weight + bias * has_bias
            # With a mean of 1000, values of 10 keep 13 bits.
            check = close if offset == 0 else near
            grid: dict[str, Any] = {"groups": (9,), "threads": (threads,)}
            y = Output([9, dim])
            run("layernorm_f32", weight, bias, x, y.buffer, args, **grid)
            check(y.check(), expected)
            y = Output([9, dim], np.float16)
            run("layernorm_f16", weight, bias, x, y.buffer, args, **grid)
            near(y.check(), expected)
            for has_addend in (0, 1):
                args = layernorm_args(dim, has_bias=has_bias, has_addend=has_addend)
                expected = layer_norm(x + has_addend * addend, 1e-5) * weight + bias * has_bias
                stream, copy = Output([9, dim], initial=x), Output([9, dim], np.float16)
                run("layernorm_stream", weight, bias, addend, stream.buffer, copy.buffer, args, **grid)
                check(stream.check(), expected)
                near(copy.check(), expected)


@pytest.mark.parametrize(("dim", "stride", "threads"), [(64, 208, 32), (768, 2304, 192), (72, 72, 1024)])
def test_layernorm_in_place(run: Run, dim: int, stride: int, threads: int) -> None:
    """Rows are the first columns of wider ones, as q and k are of the products of a token."""
    for present in [0, 1]:
        rng = np.random.default_rng(dim)
        x = (3 + 10 * rng.standard_normal((5, stride))).astype(np.float32)
        weight, bias, addend = (rng.uniform(-1.5, 1.5, dim).astype(np.float32) for _ in range(3))
        args = layernorm_args(dim, stride=stride, has_bias=present, has_addend=present)
        y = Output([5, stride], initial=x)
        run("layernorm_in_place", weight, bias, addend, y.buffer, args, groups=(5,), threads=(threads,))
        expected = x.astype(np.float64)
        expected[:, :dim] = layer_norm(x[:, :dim] + addend * present, 1e-5) * weight + bias * present
        close(y.check(), expected)


@pytest.mark.parametrize(("dim", "threads"), [(64, 32), (768, 192), (72, 1024)])
def test_layernorm_twice(run: Run, dim: int, threads: int) -> None:
    for present in [0, 1]:
        rng = np.random.default_rng(dim)
        x, attended = (10 * rng.standard_normal((2, 9, dim)) + 1).astype(np.float32)
        weight, bias, addend, second, second_bias = rng.uniform(-1.5, 1.5, (5, dim)).astype(np.float32)
        args = layernorm_args(dim, has_bias=present, has_addend=present, has_second_bias=present)
        stream, copy = Output([9, dim], initial=x), Output([9, dim], np.float16)
        block = Output([9, dim], initial=attended)
        run(
            *("layernorm_twice", weight, bias, addend, second, second_bias),
            *(block.buffer, stream.buffer, copy.buffer, args),
            groups=(9,),
            threads=(threads,),
        )
        first = layer_norm(x.astype(np.float64) + attended + addend * present, 1e-5) * weight + bias * present
        expected = layer_norm(x + first, 1e-5) * second + second_bias * present
        close(stream.check(), expected)
        near(copy.check(), expected)


def padded(rows: Array, width: int, dim: int) -> Array:
    """Return rows of which the columns from `width` on are zeros."""
    wide = np.zeros((*rows.shape[:-1], dim), np.float32)
    wide[..., :width] = rows[..., :width]
    return wide


@pytest.mark.parametrize(("dim", "width"), [(8, 1), (80, 74), (104, 101), (64, 60)])
def test_padding_is_no_part_of_means_and_variances(run: Run, dim: int, width: int) -> None:
    rng = np.random.default_rng(dim)
    x, attended = padded(5 + rng.standard_normal((2, 9, dim)), width, dim)
    weight, bias, addend, second, second_bias = padded(rng.uniform(-1.5, 1.5, (5, dim)), width, dim)
    threads: dict[str, Any] = {"groups": (9,), "threads": (32,)}
    args = layernorm_args(dim, width=width, has_bias=1, has_addend=1, has_second_bias=1)

    def normed(rows: Array, by: Array, plus: Array) -> Array:
        return padded(layer_norm(rows[:, :width], 1e-5) * by[:width] + plus[:width], width, dim)

    y = Output([9, dim])
    run("layernorm_f32", weight, bias, x, y.buffer, args, **threads)
    close(y.check(), normed(x, weight, bias))
    stream, copy = Output([9, dim], initial=x), Output([9, dim], np.float16)
    run("layernorm_stream", weight, bias, addend, stream.buffer, copy.buffer, args, **threads)
    close(stream.check(), normed(x + addend, weight, bias))
    stream, copy, block = (
        Output([9, dim], initial=x),
        Output([9, dim], np.float16),
        Output([9, dim], initial=attended),
    )
    run(
        *("layernorm_twice", weight, bias, addend, second, second_bias),
        *(block.buffer, stream.buffer, copy.buffer, args),
        **threads,
    )
    close(stream.check(), normed(x + normed(x + attended + addend, weight, bias), second, second_bias))


def test_add_bias(run: Run) -> None:
    rng = np.random.default_rng(3)
    before, bias = rng.standard_normal((5, 71)).astype(np.float32), rng.standard_normal(71).astype(np.float32)
    x = Output([5, 71], initial=before)
    run("add_bias", bias, x.buffer, make_args("AddBiasArgs", dim=71), groups=(3, 5), threads=(32, 1))
    close(x.check(), before.astype(np.float64) + bias)


def test_soft_cap(run: Run) -> None:
    before = np.random.default_rng(3).standard_normal((1, 300)).astype(np.float32) * 40
    before[0, : len(EXTREME)] = EXTREME
    before[0, -1] = np.nan
    x = Output([1, 300], initial=before)
    run("soft_cap_in_place", x.buffer, make_args("SoftCapArgs", n=300, cap=30.0), groups=(2,), threads=(256,))
    expected = 30 * np.tanh(before.astype(np.float64) / 30)
    np.testing.assert_allclose(x.check(), expected, rtol=0, atol=30 * 1e-6)


def swiglu_args(ffn_dim: int, tokens: int, kind: int, gated: int = 1, has_bias: int = 0) -> Array:
    return make_args(
        "SwigluArgs", ffn_dim=ffn_dim, tokens=tokens, activation=kind, gated=gated, has_bias=has_bias
    )


def test_swiglu_with_limits(run: Run) -> None:
    """A NaN stays, whichever of the two it is."""
    tokens, ffn_dim = 33, 72
    gate_up = (6 * np.random.default_rng(4).standard_normal((tokens, 2 * ffn_dim))).astype(np.float32)
    args = swiglu_args(ffn_dim, tokens, CONSTANTS["ACTIVATION_CLAMPED"])
    x = gate_up.astype(np.float64)
    expected = clamped_silu(x[:, :ffn_dim], x[:, ffn_dim:])
    for _ in range(2):
        out = Output([tokens, ffn_dim])
        run("swiglu_f32", gate_up, gate_up, out.buffer, args, groups=(2, tokens), threads=(64, 1))
        missing = np.isnan(expected)
        np.testing.assert_array_equal(np.isnan(out.check()), missing)
        close(np.where(missing, 0, out.array), np.where(missing, 0, expected))
        gate_up[3, 5] = gate_up[4, ffn_dim + 7] = np.nan
        expected[3, 5] = expected[4, 7] = np.nan


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize(("tokens", "ffn_dim"), [(1, 1536), (33, 72)])
def test_swiglu(run: Run, act: str, tokens: int, ffn_dim: int) -> None:
    for has_bias, gated in product([0, 1], [0, 1]):
        rng = np.random.default_rng(4)
        gate_up = (4 * rng.standard_normal((tokens, (1 + gated) * ffn_dim))).astype(np.float32)
        gate_up[0, :2] = 200, -200
        bias = rng.standard_normal((1 + gated) * ffn_dim).astype(np.float32)
        biased = gate_up.astype(np.float64) + has_bias * bias
        expected = ACTIVATIONS[act](biased[:, :ffn_dim]) * (biased[:, ffn_dim:] if gated else 1)
        args = swiglu_args(ffn_dim, tokens, ACTIVATION_CODES[act], gated=gated, has_bias=has_bias)
        grid: dict[str, Any] = {"groups": (ceil_div(ffn_dim, 64), tokens), "threads": (64, 1)}
        check_both_types(run, "swiglu", bias, gate_up, args, expected=expected, **grid)


def test_swiglu_at_the_ends_of_the_range_of_floats(run: Run) -> None:
    """NaN stays."""
    gate = np.append(EXTREME, np.float32(np.nan))
    gate_up = np.concatenate([gate, np.ones_like(gate)])
    for kind, (name, expected) in enumerate(extreme_activations().items()):
        args = swiglu_args(len(gate), 1, kind)
        out = Output([len(gate)])
        run("swiglu_f32", gate_up, gate_up, out.buffer, args, groups=(1, 1), threads=(64, 1))
        found = out.check()
        np.testing.assert_allclose(found[:-1], expected, rtol=4e-7, atol=4e-7, err_msg=name)
        assert np.isnan(found[-1]), name


def test_swiglu_is_as_accurate_as_the_fast_exponential(run: Run) -> None:
    """1 / (1 + e) has e / (1 + e)^2 times the relative error of e, which is that of `fast::exp`.

    The sum, the quotient and the product are rounded once each.
    """
    gate = np.linspace(-40, 40, 6400).astype(np.float32)
    x = gate.astype(np.float64)
    out = Output([1, len(gate)])
    args = swiglu_args(len(gate), 1, SILU)
    gate_up = np.stack([gate, np.ones_like(gate)])
    run("swiglu_f32", gate_up, gate_up, out.buffer, args, groups=(len(gate) // 64, 1), threads=(64, 1))
    power = np.exp(-x)
    allowed = (3 + 2 * np.abs(x)) * 2.0**-23 * np.abs(x) * power / (1 + power) ** 2
    allowed += 3 * 2.0**-24 * np.abs(x / (1 + power))
    assert (np.abs(out.check()[0] - x / (1 + power)) <= allowed).all()
