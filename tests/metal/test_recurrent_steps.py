"""Kernels of layers with a recurrence: convolutions, state-space scans, delta rules, and gates of heads."""

import numpy as np
import pytest
from support.float64 import delta_step, rms, scan_step, sigmoid, silu
from support.kernel_harness import (
    CONSTANTS,
    STRUCTS,
    Array,
    Output,
    Run,
    ceil_div,
    check_both_types,
    close,
    make_args,
    near,
)

# A pass of three sequences.
NONE = CONSTANTS["STATE_NONE"]
LENGTHS, DIVIDED = (6, 1, 9), (2, 0, 8)  # tokens of each sequence; those that follow the other sequences
BEFORE, SLOTS = (3, NONE, NONE), 7  # slot of the state before each sequence; number of slots
TOKENS = sum(LENGTHS)
# Slots of the states after tokens: (sequence, token).
_AFTER = {(0, 1): 0, (0, 5): 5, (1, 0): 6, (2, 7): 2, (2, 8): 1}


def state_rows() -> tuple[Array, list[list[int]]]:
    """Return the table of the rows, and the rows of each sequence.

    The first row of each sequence is in the table once more, after all rows.
    """
    leading = [n - d for n, d in zip(LENGTHS, DIVIDED, strict=True)]
    first, rest = np.cumsum([0, *leading]), np.cumsum([sum(leading), *DIVIDED])
    table = np.zeros(TOKENS + len(LENGTHS), STRUCTS["StateRow"])
    rows = []
    for i, n in enumerate(LENGTHS):
        own = [*range(first[i], first[i] + leading[i]), *range(rest[i], rest[i] + DIVIDED[i])]
        for token, row in enumerate(own):
            after = _AFTER.get((i, token), NONE)
            table[row] = (token, first[i], leading[i], rest[i], BEFORE[i], after, n)
        table[TOKENS + i] = table[own[0]]
        rows.append(own)
    return table, rows


@pytest.mark.parametrize("kind", ["gated", "activated", "with a bias"])
@pytest.mark.parametrize("taps", [2, 3, 5])
@pytest.mark.parametrize("channels", [64, 200])
def test_causal_conv(run: Run, channels: int, taps: int, kind: str) -> None:
    """Three sequences, two of which are split: their last tokens follow those of the others."""
    rng = np.random.default_rng(taps)
    table, rows = state_rows()
    given = rng.standard_normal((TOKENS, 3, channels)).astype(np.float32)
    bias = rng.standard_normal(channels).astype(np.float32)
    wide = given.astype(np.float64)
    entering = wide[:, 0] * wide[:, 2] if kind == "gated" else wide[:, 0]
    filters = rng.standard_normal((channels, taps)).astype(np.float32)
    stride = (taps - 1) * channels + 16
    states = rng.standard_normal((SLOTS, stride)).astype(np.float32)
    expected, after = np.zeros((TOKENS, channels)), states.astype(np.float64)
    for i, own in enumerate(rows):
        inputs = np.zeros((taps - 1 + len(own), channels))
        if BEFORE[i] != NONE:
            inputs[: taps - 1] = states[BEFORE[i], : (taps - 1) * channels].reshape(taps - 1, channels)
        inputs[taps - 1 :] = entering[own]
        for token, row in enumerate(own):
            window = inputs[token : token + taps]
            sums = (window * filters.T).sum(axis=0)
            if kind == "gated":
                expected[row] = wide[row, 1] * sums
            else:
                expected[row] = silu(sums + (bias if kind == "with a bias" else 0))
            if table["after"][row] != NONE:
                after[table["after"][row], : (taps - 1) * channels] = window[1:].reshape(-1)
    for first_out in (0, 5):
        for name, dtype, check in (
            ("causal_conv_f32", np.float32, close),
            ("causal_conv_f16", np.float16, near),
        ):
            out = Output([TOKENS - first_out, channels], dtype)
            held = Output(states.shape, initial=states)
            args = make_args(
                "CausalConvArgs",
                channels=channels,
                taps=taps,
                in_stride=3 * channels,
                slot_stride=stride,
                tokens=TOKENS,
                first_out=first_out,
                gated=kind == "gated",
                biased=kind == "with a bias",
            )
            grid = (ceil_div(channels, 64), TOKENS)
            buffers = (filters, bias, given, table, held.buffer, out.buffer, args)
            run(name, *buffers, groups=grid, threads=(64, 1))
            check(out.check(), expected[first_out:])
            np.testing.assert_allclose(held.check(), after, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("heads", "groups", "keys", "width"),
    [(2, 1, 32, 32), (6, 2, 20, 36), (4, 2, 40, 33), (3, 3, 128, 128), (2, 2, 256, 8)],
)
def test_gated_delta(run: Run, heads: int, groups: int, keys: int, width: int) -> None:
    rng = np.random.default_rng(heads)
    tokens, size = TOKENS, heads * keys * width
    in_stride, stride = 2 * groups * keys + heads * width + 5, size + 16
    decay = -np.exp(rng.uniform(-4, 1, heads)).astype(np.float32)
    bias = rng.standard_normal(heads).astype(np.float32)
    given = rng.standard_normal((tokens, in_stride)).astype(np.float32)
    rates = (3 * rng.standard_normal((tokens, 2 * heads + 3))).astype(np.float32)
    rates[0, :2] = 90, -90
    states = rng.standard_normal((SLOTS, stride)).astype(np.float32)
    table, rows = state_rows()

    expected, after = np.empty((tokens, heads, width)), states.astype(np.float64)
    for i, own in enumerate(rows):
        state: Array = np.zeros((heads, keys, width))
        if BEFORE[i] != NONE:
            state = states[BEFORE[i], :size].reshape(state.shape).astype(np.float64)
        for row in own:
            wide = given[row].astype(np.float64)
            q, k, v = np.split(wide[: in_stride - 5], [groups * keys, 2 * groups * keys])
            q, k = (
                np.array([head / np.sqrt(head @ head + 1e-6) for head in part.reshape(groups, keys)])
                for part in (q, k)
            )
            # Head h has the key h % groups.
            q, k = (np.tile(part, (heads // groups, 1)) for part in (q / np.sqrt(keys), k))
            alpha, beta = rates[row, :heads].astype(np.float64) + bias, rates[row, heads : 2 * heads]
            factors = np.exp(decay * np.logaddexp(0, alpha)), sigmoid(beta)
            state, expected[row] = delta_step(state, q, k, v.reshape(heads, width), *factors)
            if table["after"][row] != NONE:
                after[table["after"][row], :size] = state.ravel()

    out, held = Output([tokens, heads, width]), Output(states.shape, initial=states)
    args = make_args(
        "GatedDeltaArgs",
        heads=heads,
        groups=groups,
        key_dim=keys,
        value_dim=width,
        in_stride=in_stride,
        rate_stride=rates.shape[1],
        slot_stride=stride,
        tokens=tokens,
    )
    buffers = (decay, bias, given, rates, table, held.buffer, out.buffer, args)
    run("gated_delta", *buffers, groups=(ceil_div(width, 16), heads, len(LENGTHS)), threads=(128,))
    close(out.check(), expected, 1e-5)
    close(held.check(), after, 1e-5)


@pytest.mark.parametrize(("heads", "dim"), [(2, 32), (3, 36), (5, 128)])
def test_gated_norm(run: Run, heads: int, dim: int) -> None:
    rng = np.random.default_rng(dim)
    tokens = 5
    x = rng.standard_normal((tokens, heads, dim)).astype(np.float32)
    x[0, 0] = 0
    gate = (4 * rng.standard_normal((tokens, heads * dim + 7))).astype(np.float32)
    weight = rng.uniform(0.5, 1.5, dim).astype(np.float32)
    wide, gates = x.astype(np.float64), gate[:, : heads * dim].astype(np.float64).reshape(x.shape)
    expected = rms(wide, 1e-5) * weight * silu(gates)
    args = make_args("GatedNormArgs", heads=heads, dim=dim, gate_stride=gate.shape[1], eps=1e-5)
    groups = (ceil_div(32 * heads, 64), tokens)
    buffers = (weight, x, gate, args)
    check_both_types(run, "gated_norm", *buffers, expected=expected, groups=groups, threads=(64, 1))


@pytest.mark.parametrize(("heads", "dim"), [(2, 32), (3, 24)])
def test_gate_heads(run: Run, heads: int, dim: int) -> None:
    rng = np.random.default_rng(dim)
    tokens = 5
    q = (4 * rng.standard_normal((tokens, 2 * heads * dim + 11))).astype(np.float32)
    q[0, dim : dim + 2] = 100, -100
    gates = q[:, : 2 * heads * dim].astype(np.float64).reshape(tokens, heads, 2, dim)[:, :, 1]
    args = make_args(
        *("GateHeadsArgs",),
        n_heads=heads,
        value_dim=dim,
        q_stride=q.shape[1],
        query_step=2 * dim,
        tokens=tokens,
    )
    for name, dtype, check in (("gate_heads_f32", np.float32, close), ("gate_heads_f16", np.float16, near)):
        before = rng.standard_normal((tokens, heads, dim)).astype(dtype)
        y = Output(before.shape, dtype, initial=before)
        groups = (ceil_div(heads * dim, 64), tokens)
        run(name, q, y.buffer, args, groups=groups, threads=(64, 1))
        check(y.check(), before.astype(np.float64) * sigmoid(gates))


@pytest.mark.parametrize("gated", [0, 1])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(
    ("heads", "groups", "dim", "rows"), [(4, 1, 64, 128), (6, 3, 12, 20), (2, 2, 33, 200)]
)
def test_scan(run: Run, heads: int, groups: int, dim: int, rows: int, half: bool, gated: int) -> None:
    """Three sequences, two of which are divided: their last tokens follow those of the others."""
    rng = np.random.default_rng(dim)
    inner, mixed = heads * dim, heads * dim + 2 * groups * rows
    row_stride, dt_column, stride = inner + heads + 9, inner + 7, heads * rows * dim + 16
    a, bias = -rng.uniform(0.5, 2.0, heads), rng.standard_normal(heads)
    skip = rng.standard_normal(heads)
    projected = rng.standard_normal((TOKENS, row_stride)).astype(np.float32)
    projected[2, dt_column], projected[4, dt_column] = 40.0, -9.0  # softplus of large and small numbers
    convolved = rng.standard_normal((TOKENS, mixed)).astype(np.float32)
    states = rng.standard_normal((SLOTS, stride)).astype(np.float32)
    table, rows_of = state_rows()
    expected, after = np.zeros((TOKENS, inner)), states.astype(np.float64)
    for i, own in enumerate(rows_of):
        state = np.zeros((heads, rows, dim))
        if BEFORE[i] != NONE:
            state = states[BEFORE[i], : heads * rows * dim].reshape(heads, rows, dim).astype(np.float64)
        for row in own:
            x, b, c = np.split(convolved[row].astype(np.float64), [inner, inner + groups * rows])
            b, c = (np.repeat(part.reshape(groups, rows), heads // groups, axis=0) for part in (b, c))
            x = x.reshape(heads, dim)
            steps = projected[row, dt_column : dt_column + heads] + bias
            state, y = scan_step(state, x, b, c, steps, a, skip)
            expected[row] = y.reshape(-1) * (silu(projected[row, :inner]) if gated else 1)
            if table["after"][row] != NONE:
                after[table["after"][row], : heads * rows * dim] = state.reshape(-1)
    vectors = [v.astype(np.float32) for v in (a, bias, skip)]
    for first_out in (0, 5):
        out = Output([TOKENS - first_out, inner], np.float16 if half else np.float32)
        held = Output(states.shape, initial=states)
        args = make_args(
            "ScanArgs",
            heads=heads,
            heads_per_group=heads // groups,
            dim=dim,
            rows=rows,
            row_stride=row_stride,
            dt_column=dt_column,
            slot_stride=stride,
            tokens=TOKENS,
            first_out=first_out,
            gated=gated,
        )
        items = heads * ceil_div(dim, CONSTANTS["SCAN_COLUMNS"])
        run(
            f"scan_{'f16' if half else 'f32'}_{128 if rows <= 128 else 256}",
            *vectors,
            projected,
            convolved,
            table,
            held.buffer,
            out.buffer,
            args,
            groups=(ceil_div(items, 4), len(LENGTHS)),
            threads=(128, 1),
        )
        if half:
            near(out.check(), expected[first_out:])
        else:
            close(out.check(), expected[first_out:], 1e-5)
        close(held.check(), after, 1e-5)


@pytest.mark.parametrize(("groups", "size"), [(1, 96), (3, 20), (2, 700)])
def test_scan_norm(run: Run, groups: int, size: int) -> None:
    rng = np.random.default_rng(size)
    inner, tokens, first_out, row_stride = groups * size, 5, 2, groups * size + 13
    gates = (3 * rng.standard_normal((tokens, row_stride))).astype(np.float32)
    y = rng.standard_normal((tokens - first_out, inner)).astype(np.float32)
    weight = rng.standard_normal(inner).astype(np.float32)
    gated = (y.astype(np.float64) * silu(gates[first_out:, :inner])).reshape(tokens - first_out, groups, size)
    expected = (rms(gated, 1e-3) * weight.reshape(groups, size)).reshape(tokens - first_out, inner)
    args = make_args(
        "ScanNormArgs", inner=inner, groups=groups, row_stride=row_stride, first_out=first_out, eps=1e-3
    )
    grid = (tokens - first_out, groups)
    buffers = (weight, gates, y, args)
    check_both_types(run, "scan_norm", *buffers, expected=expected, groups=grid, threads=(64, 1))
