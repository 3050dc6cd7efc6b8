"""Steps between the products of the CPU kernels: norms, rotation, recurrences, activations."""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.kernels.float64 import (
    ACTIVATIONS,
    EXTREME,
    clamped_silu,
    extreme_activations,
    gated_delta_step,
    layer_norm,
    rms,
    rotate,
    scan_step,
    sigmoid,
)
from support.kernels.kernel_cases import SENTINEL, Floats, cpu, each_set, guarded, inside, normal


def check_vector(
    call: Callable[[Floats], object],
    expected: npt.NDArray[np.float64],
    before: npt.ArrayLike = np.nan,
    **tolerance: Any,
) -> None:
    """Compare the vector that a call writes, or changes, and see that it writes nothing after it."""
    n = len(expected)
    out = np.full(n + 4, SENTINEL, np.float32)
    out[:n] = before
    call(out)
    np.testing.assert_allclose(out[:n], expected, **tolerance)
    assert np.all(out[n:] == SENTINEL)


@each_set
def test_rms_norm(isa: str) -> None:
    for n in (1, 5, 64, 80, 576):
        x, weight = normal(n), normal(n, seed=1)
        expected = rms(x.astype(np.float64), 1e-5) * weight
        call = partial(cpu.rms_norm, isa, x, weight, 1e-5)
        check_vector(call, expected, rtol=1e-5, atol=1e-6)


@each_set
def test_layer_norm(isa: str) -> None:
    """The mean is far from 0 or not, the variance near epsilon or not; columns end within a vector or not."""
    for n, (offset, size), has_bias in product(
        (1, 5, 64, 80, 577), ((0, 1), (1000, 1), (0, 3e-3)), (True, False)
    ):
        x = np.float32(offset) + np.float32(size) * normal(n)
        weight, bias = normal(n, seed=1), normal(n if has_bias else 0, seed=2)
        call = partial(cpu.layer_norm, isa, x, weight, bias, 1e-5)
        expected = layer_norm(x, 1e-5) * weight + (bias if has_bias else 0)
        # A mean of 1000 is rounded to 2^-14 of the deviation.
        check_vector(call, expected, rtol=1e-5, atol=1e-3 if offset else 1e-5)


@each_set
def test_scan(isa: str) -> None:
    """The state-space recurrence of a head, over tokens in calls of any length."""
    for dim, rows in [(1, 16), (10, 1), (16, 128), (64, 16), (100, 16)]:
        tokens = 70
        x, b, c = normal(tokens, dim), normal(tokens, rows, seed=1), normal(tokens, rows, seed=2)
        dt, before = 2 * normal(tokens, seed=3), normal(rows, dim, seed=4)
        dt[3], dt[5] = 30.0, -30.0  # softplus of a large and of a small number
        factors = np.array([-0.7, 0.3, 1.5], np.float32)
        (a, bias, skip), state = factors.astype(np.float64)[:, None], before.astype(np.float64)
        expected = np.empty((tokens, dim))
        of_head = [part[:, None].astype(np.float64) for part in (x, b, c)]
        for t in range(tokens):
            steps = {"step": dt[t] + bias, "a": a, "skip": skip}
            (state,), (expected[t],) = scan_step(state[None], *(part[t] for part in of_head), **steps)
        results = []
        for piece in (tokens, 1, 33):
            out = guarded(tokens, dim)
            held = np.concatenate([before, np.full((1, dim), SENTINEL, np.float32)])
            cpu.scan(isa, x, b, c, dt, factors, piece, held, out)
            results.append((inside(out, tokens, dim).tobytes(), held.tobytes()))
            scale = np.abs(expected).max()
            np.testing.assert_allclose(inside(out, tokens, dim), expected, atol=3e-6 * scale)
            np.testing.assert_allclose(held[:rows], state, atol=3e-6 * np.abs(state).max())
            assert np.all(held[rows:] == SENTINEL)
        assert results[1:] == results[:-1]


@each_set
def test_rope_turns_pairs_and_leaves_the_rest(isa: str) -> None:
    for neox in (False, True):
        head, angle = normal(80), np.linspace(0.0, 9.0, 32)
        cos_sin = np.concatenate([np.cos(angle), np.sin(angle)]).astype(np.float32)
        expected = rotate(head[None, None].astype(np.float64), np.exp(1j * angle)[None], neox)
        out = head.copy()
        cpu.rope(isa, out, cos_sin, neox)
        np.testing.assert_allclose(out, expected[0, 0], atol=1e-6)
        np.testing.assert_array_equal(out[64:], head[64:])


@each_set
def test_soft_cap(isa: str) -> None:
    for cap in (0.5, 30.0):
        for n in (3, 32, 100):
            x = np.full(n + 4, SENTINEL, np.float32)
            x[:n] = normal(n) * np.float32(cap)
            x[:3] = -1e30, np.nan, 1e30
            expected = cap * np.tanh(x[:n].astype(np.float64) / cap)
            cpu.soft_cap(isa, cap, x[:n])
            np.testing.assert_allclose(x[:n], expected, rtol=0, atol=cap * 2e-7)
            assert np.all(x[n:] == SENTINEL)


@each_set
def test_gate_of_a_head(isa: str) -> None:
    for n in (3, 32, 100):
        x, gate = normal(n), normal(n, seed=1) * np.float32(4)
        gate[:2] = -100.0, 100.0
        call = partial(cpu.apply_gate, isa, gate)
        check_vector(call, x * sigmoid(gate), before=x, rtol=1e-5, atol=1e-6)


@each_set
def test_gated_delta(isa: str) -> None:
    """Three tokens follow one another; columns of the padding stay zero."""
    for keys, columns in [(1, 32), (7, 5), (20, 1), (128, 32)]:
        state, out = np.zeros((keys, 32), np.float32), np.full(36, SENTINEL, np.float32)
        state[:, :columns] = normal(keys, columns)
        expected = state[:, :columns].astype(np.float64)
        for t, (decay, beta) in enumerate([(0.9, 0.7), (0.01, 1.0), (1.0, 0.0)]):
            q, k, v = normal(keys, seed=t), normal(keys, seed=t + 3), normal(columns, seed=t + 6)
            k /= np.float32(np.linalg.norm(k))
            cpu.gated_delta(isa, q, k, v, decay, beta, state, out)
            token = (np.array([part], np.float64) for part in (q, k, v, decay, beta))
            (expected,), (found,) = gated_delta_step(expected[None], *token)
            np.testing.assert_allclose(out[:columns], found, rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(state[:, :columns], expected, rtol=1e-5, atol=1e-5)
            assert np.all(state[:, columns:] == 0)
            assert np.all(out[columns:] == SENTINEL)


@each_set
def test_scores_of_relative_positions(isa: str) -> None:
    for n, dim in [(1, 3), (7, 16), (40, 100)]:
        q, k = normal(dim), normal(n, dim)
        keys, queries = normal(9, dim + 4, seed=1), normal(9, dim + 4, seed=2)
        rows = np.random.default_rng(3).integers(0, 9, n)
        call = partial(cpu.relative_scores, isa, q, k, keys, queries, rows[::-1].astype(np.float32), 0.5)
        q64, k64, keys64, queries64 = (x.astype(np.float64) for x in (q, k, keys, queries))
        expected = (keys64[rows, :dim] * q64 + k64 * queries64[rows, :dim]).sum(axis=1) / 2
        check_vector(call, expected, rtol=1e-5, atol=1e-5)


@each_set
def test_relu_keeps_nan(isa: str) -> None:
    x, out = normal(37), np.empty(37, np.float32)
    x[5] = np.nan
    cpu.gated(isa, x, np.ones_like(x), 3, out)
    np.testing.assert_array_equal(out, np.where(x < 0, 0, x))


@each_set
def test_the_clamped_activation_limits_gate_and_factor(isa: str) -> None:
    gate, up = np.float32(6) * normal(101), np.float32(6) * normal(101, seed=1)
    gate[:6], up[:6] = (-100, 100, 7, 7.5, 0, 1e30), (3, -100, 100, -7.5, 1e30, -1)
    expected = clamped_silu(gate.astype(np.float64), up.astype(np.float64))
    check_vector(partial(cpu.gated, isa, gate, up, 4), expected, rtol=2e-6, atol=3e-6)
    for bad in ((np.nan, 1.0), (1.0, np.nan)):
        result = np.zeros(1, np.float32)
        cpu.gated(isa, np.array(bad[:1], np.float32), np.array(bad[1:], np.float32), 4, result)
        assert np.isnan(result[0])


@each_set
def test_activations_are_exact_to_a_few_roundings_for_numbers_of_every_size(isa: str) -> None:
    sizes = np.concatenate([np.linspace(0, 30, 4001), np.geomspace(1e-9, 1e30, 400)])
    for (kind, name), n in product(enumerate(("silu", "gelu", "gelu_erf")), (3, 100, 2 * len(sizes))):
        x = np.concatenate([sizes, -sizes])[-n:].astype(np.float32)
        factors = np.resize(np.array([1, -1, 0.5], np.float32), n)
        # 7.1.26 of Abramowitz and Stegun, which most sets take for erf, is within 1.5e-7.
        expected = ACTIVATIONS[name](x.astype(np.float64)) * factors
        check_vector(partial(cpu.gated, isa, x, factors, kind), expected, rtol=4e-7, atol=4e-7)


@each_set
def test_activations_are_exact_at_the_ends_of_the_range_of_floats(isa: str) -> None:
    """NaN stays, and the numbers next to it do not change."""
    x = EXTREME
    for kind, (activation, expected) in enumerate(extreme_activations().items()):
        for first in (0, 5):  # NaN is in a whole vector, or in the last part of one
            out = np.empty(len(x) + first + 1, np.float32)
            given = np.concatenate([x, [np.nan], np.zeros(first)]).astype(np.float32)
            cpu.gated(isa, given, np.ones_like(given), kind, out)
            np.testing.assert_allclose(
                out[: len(x)], expected, rtol=4e-7, atol=4e-7, err_msg=f"{activation} of {x}"
            )
            assert np.isnan(out[len(x)]), activation


@each_set
def test_sum_exp(isa: str) -> None:
    x = normal(49_153) * np.float32(5)
    expected = np.exp(x.astype(np.float64) - float(x.max())).sum()
    assert cpu.sum_exp(isa, x, float(x.max())) == pytest.approx(expected, rel=1e-6)


@each_set
def test_16_bit_floats_are_converted_exactly(isa: str) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)[:-3]
    out = np.empty(len(bits), np.float32)
    cpu.half_to_float(isa, bits, False, out)
    np.testing.assert_array_equal(out, bits.view(np.float16).astype(np.float32))
    cpu.half_to_float(isa, bits, True, out)
    np.testing.assert_array_equal(out, (bits.astype(np.uint32) << 16).view(np.float32))
