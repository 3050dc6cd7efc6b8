"""Metal Shading Language has the defined semantics on the emulator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from shader_library import KernelError, ShaderLibrary

pytestmark = pytest.mark.emulator
Array = np.ndarray[Any, Any]


@pytest.fixture(scope="module")
def language(load_shaders: Callable[[str], ShaderLibrary]) -> ShaderLibrary:
    return load_shaders("language")


@pytest.fixture(scope="module")
def operations(load_shaders: Callable[[str], ShaderLibrary]) -> ShaderLibrary:
    return load_shaders("operations")


def floats(n: int) -> Array:
    return np.full(n, np.nan, np.float32)


def test_vectors_and_swizzles(language: ShaderLibrary) -> None:
    out = floats(17)
    language.run("vector_values", (1,), (1,), [out])
    a, c, d = [0.5, 2, 0.5, 4], [1, 2, 7, 9], [4, 3, 9, 10]
    np.testing.assert_array_equal(out, [*a, *c, *d, 6, 32, 5, 1, 46.5])


def test_casts_convert_values(language: ShaderLibrary) -> None:
    out = np.zeros(35, np.int32)
    language.run("vector_conversions", (1,), (1,), [out])
    v = np.array([1.75, -2.75, 3.5, -4.5], np.float32)
    rows = out[:32].reshape(4, 8)
    whole = v.astype(np.int32)
    np.testing.assert_array_equal(rows[:, :4], np.repeat(whole[:, None], 4, axis=1))
    np.testing.assert_array_equal(rows[:, 4], -whole)
    np.testing.assert_array_equal(rows[:, 5], v.view(np.int32))
    np.testing.assert_array_equal(rows[:, 6], whole)
    np.testing.assert_array_equal(rows[:, 7], 2)
    # (1.5, 2.5) + 1; some below 0, all below 4, not all below 3; select by sign.
    np.testing.assert_array_equal(out[32:], [5 + 7, 1 + 2, 1212])


def test_packed_vectors_and_struct_layout(language: ShaderLibrary) -> None:
    dtype = np.dtype(
        {
            "names": ["a", "b", "c", "d", "e"],
            "formats": [("f4", 3), "f2", "u1", ("f2", 2), ("f4", 3)],
            "offsets": [0, 12, 14, 16, 32],
            "itemsize": 48,
        }
    )
    rng = np.random.default_rng(0)
    values = np.zeros(5, dtype)
    for name in ("a", "e"):
        values[name] = rng.integers(-8, 8, (5, 3))
    values["b"], values["c"], values["d"] = 2, rng.integers(0, 200, 5), rng.integers(-8, 8, (5, 2))
    out = np.full((5, 3), np.nan, np.float32)
    language.run("packed_vectors", (5,), (1,), [values, out])
    tail = np.concatenate([values["c"][:, None], values["d"]], axis=1)
    expected = values["a"] * 2 + tail.astype(np.float32) + values["e"]
    expected[:, 1] += values["a"][:, 1]
    np.testing.assert_array_equal(out, expected)


def test_half_and_bfloat_round_each_operation(language: ShaderLibrary) -> None:
    x = np.array([1 / 3, 1.0009765625, 2049, 65519, 65520, 1e-8, -0.1, 3.1415927, 257.5], np.float32)
    halves, bfloats, sums = np.zeros(9, np.float16), np.zeros(9, np.uint16), floats(18)
    language.run("rounding", (9,), (1,), [x, halves, bfloats, sums])
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16)
        product = expected * np.float16(0.1)
        np.testing.assert_array_equal(sums[::2], (product + expected).astype(np.float32))
    np.testing.assert_array_equal(halves, expected)
    bits = x.view(np.uint32)
    np.testing.assert_array_equal(bfloats, (bits + 0x7FFF + (bits >> 16 & 1)) >> 16)
    np.testing.assert_array_equal(sums[1::2], (bfloats.astype(np.uint32) << 16).view(np.float32) * 0.5)


def test_matrices_are_columns(language: ShaderLibrary) -> None:
    out = floats(9)
    language.run("matrices", (1,), (1,), [out])
    columns = np.array([[1, 2, 3], [4, 5, 6]], np.float32)
    v, w, p = columns.T @ [10, 1], columns.sum(axis=1), columns @ columns.T
    np.testing.assert_array_equal(out, [*v, *w, p[1, 0], p[1, 1], 5 + 10, 6])


def test_overloads_by_address_space(language: ShaderLibrary) -> None:
    out, counter = floats(8), np.array([5], np.int32)
    out[4] = 1
    language.run("spaces", (1,), (1,), [out, np.float32(4), counter])
    np.testing.assert_array_equal(out[:3], [2 + 30 + 400 + 5000, 6 + 11 + 21, 1.5])
    assert counter[0] == 6


def test_templates_instantiated_for_the_host(language: ShaderLibrary) -> None:
    x, out = np.arange(6, dtype=np.float32), floats(6)
    language.run("apply_twice", (6,), (1,), [x, out, np.uint32(5)])
    np.testing.assert_array_equal(out, [0, 2, 4, 6, 8, np.nan])
    halves = np.zeros(6, np.float16)
    language.run("apply_squared_half", (6,), (1,), [x.astype(np.float16), halves, np.uint32(6)])
    np.testing.assert_array_equal(halves, x**2 - 1)
    ints = np.zeros(6, np.int32)
    language.run("apply_squared_int", (6,), (1,), [x.astype(np.int32), ints, np.uint32(6)])
    np.testing.assert_array_equal(ints, x**2 + 4)


def test_function_constants(language: ShaderLibrary) -> None:
    out, bias = floats(4), np.arange(4, dtype=np.float32) * 100
    x = np.arange(4)
    language.run("specialized", (4,), (1,), [out, None, bias], constants={0: True, 3: 5})
    np.testing.assert_array_equal(out, x * 10 + 1 + bias)
    language.run("specialized", (4,), (1,), [out], constants={0: False, 3: -1, 9: 0.25})
    np.testing.assert_array_equal(out, x * -2 + 0.25)
    language.run("unspecialized", (1,), (1,), [out])
    assert out[0] == 42


def test_missing_function_constant_is_an_error(language: ShaderLibrary) -> None:
    with pytest.raises(
        KernelError, match=r"'specialized': function constant 'scale' \(index 3\) has no value"
    ):
        language.run("specialized", (4,), (1,), [floats(4)], constants={0: False})


def test_idioms_of_kernel_libraries(language: ShaderLibrary) -> None:
    out = np.zeros(8, np.float32)
    language.run("idioms", (1,), (1,), [out], constants={8: -7})
    # 1.005859375 is in the middle of two numbers that bfloat has.
    expected = [sum(range(10, 16)), 10, -4, np.nan, 47 + 700, 1.0078125 + 2, 42 - 4 + 0.5, 3 + 40 + 100]
    np.testing.assert_array_equal(out, expected)  # an initializer of threadgroup memory initializes nothing


def test_simdgroup_idioms_of_kernel_libraries(language: ShaderLibrary) -> None:
    m, most = np.random.default_rng(4).integers(-3, 4, (8, 8)).astype(np.float32), np.zeros(32, np.float32)
    x = np.stack([m, np.zeros_like(m)])
    language.run("idioms_of_simdgroups", (1,), (32,), [x, most])
    np.testing.assert_array_equal(x[1], m @ m @ m)
    np.testing.assert_array_equal(most, 31 - 2)


def test_template_arguments_are_deduced_from_parameters(language: ShaderLibrary) -> None:
    floats, ints = np.arange(6, dtype=np.float32), np.arange(6, dtype=np.int32)
    language.run("deduced_float_3", (2,), (1,), [floats, np.float32(0.5)])
    language.run("deduced_int_2", (3,), (1,), [ints, np.int32(4)])
    np.testing.assert_array_equal(floats, np.arange(6) * 0.5)
    np.testing.assert_array_equal(ints, np.arange(6) * 4)


def test_math_functions(language: ShaderLibrary) -> None:
    expected = [
        65504, 2.0**-23, -(2.0**31), 3 + 1, 8 + 31 + 3 + 1, 3 + 7 + 3, 0xBC, 0x50, 255 + 0,
        0.75 - 1 + 1 + 2, 0.5 + 1 + 10 + 9, np.e + 0 + 2 + 2, 0.25 + 30 + 0 + 100, 0.75 + 4 + 32, 15,
        2 + 3 + 4 + 5, 1 + 1024 + 8 + 3 + 3 + 2, 4 + 4 + 1 + 1,
    ]  # fmt: skip
    out = floats(len(expected))
    language.run("numbers", (1,), (1,), [out])
    np.testing.assert_allclose(out, np.array(expected, np.float32), rtol=1e-6)


SEEDS = pytest.mark.parametrize("seed", [0, 5])


@SEEDS
def test_simdgroup_reductions(operations: ShaderLibrary, seed: int) -> None:
    x = np.random.default_rng(1).integers(-50, 50, 32).astype(np.int32)
    out = np.full((17, 32), -999, np.int32)
    operations.run("simd_reductions", (1,), (32,), [x, out], seed=seed)
    twos = np.where(np.arange(32) % 8 == 0, 2, 1)
    ballot = np.uint32(sum(1 << i for i in range(32) if x[i] > 0)).view(np.int32)
    product = np.multiply.reduce((x & 3) | 1, dtype=np.int64).astype(np.int32)
    uniform = [x.sum(), product, x.max(), x.min(), np.bitwise_and.reduce(x), np.bitwise_or.reduce(x),
               np.bitwise_xor.reduce(x)]  # fmt: skip
    np.testing.assert_array_equal(out[:7], np.repeat(np.array(uniform)[:, None], 32, axis=1))
    np.testing.assert_array_equal(out[7], np.cumsum(x))
    np.testing.assert_array_equal(out[8], np.cumsum(x) - x)
    np.testing.assert_array_equal(out[9], np.cumprod(twos))
    np.testing.assert_array_equal(out[10], np.cumprod(twos) // twos)
    np.testing.assert_array_equal(out[11:14, 0], [1, 0, ballot])
    np.testing.assert_array_equal(out[14], np.arange(32) == 0)
    np.testing.assert_array_equal(out[15:, 0], [x.sum(), 32])


@SEEDS
def test_simdgroup_shuffles(operations: ShaderLibrary, seed: int) -> None:
    x = np.arange(32, dtype=np.int32) * 3 + 1
    out = np.full((13, 32), -999, np.int32)
    operations.run("simd_shuffles", (1,), (32,), [x, out], seed=seed)
    i = np.arange(32)
    fill = -1 - i
    expected = [
        x[(i * 7) % 32], np.full(32, x[13]), np.full(32, x[0]), x[i ^ 5],
        np.where(i < 3, x, x[(i - 3) % 32]), np.where(i + 4 > 31, x, x[(i + 4) % 32]),
        x[(i - 3) % 32], x[(i + 4) % 32],
        np.where(i < 3, fill[(i - 3) % 32], x[(i - 3) % 32]),
        np.where(i + 4 > 31, fill[(i + 4) % 32], x[(i + 4) % 32]),
        np.where(i % 8 < 2, fill[i // 8 * 8 + (i - 2) % 8], x[(i - 2) % 32]),
        np.where(i % 8 > 5, fill[i // 8 * 8 + (i + 2) % 8], x[(i + 2) % 32]),
        np.full(32, x[9]),
    ]  # fmt: skip
    np.testing.assert_array_equal(out, expected)


@SEEDS
def test_quad_operations(operations: ShaderLibrary, seed: int) -> None:
    x = np.random.default_rng(2).integers(-50, 50, 32).astype(np.int32)
    out = np.full((12, 32), -999, np.int32)
    operations.run("quad_operations", (1,), (32,), [x, out], seed=seed)
    q = x.reshape(8, 4)

    def spread(values: Array) -> Array:
        return np.repeat(values, 4)

    i = np.arange(32)
    either = (q > 0).any(1) + 2 * (q > 0).all(1)
    expected = [
        spread(q.sum(1)), spread(q.max(1)), spread(q.min(1)), spread(np.bitwise_xor.reduce(q, axis=1)),
        np.cumsum(q, axis=1).ravel(), (np.cumsum(q, axis=1) - q).ravel(), q[:, ::-1].ravel(), spread(q[:, 2]),
        x[i ^ 1], spread(either), i // 4 * 10 + i % 4, spread(np.where(np.arange(8) % 2, q.sum(1), 24)),
    ]  # fmt: skip
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("seed", [0, 5])
@pytest.mark.parametrize("workers", [1, 2])
def test_atomics(operations: ShaderLibrary, seed: int, workers: int) -> None:
    n = 640
    ints, uints = np.zeros(5, np.int32), np.zeros(6, np.uint32)
    uints[0] = 0xFFFFFFFF
    sums, old = np.zeros(1, np.float32), np.zeros(n, np.uint32)
    run = operations.run("atomics", (n // 64,), (64,), [ints, uints, sums, old], seed=seed, workers=workers)
    v = np.arange(n) - 100
    toggled = np.bitwise_xor.reduce(1 << (np.arange(n) % 31))
    np.testing.assert_array_equal(ints, [v.sum(), -v.sum(), v.max(), v.min(), n])
    np.testing.assert_array_equal(uints[[0, 1, 2, 4, 5]], [0, 0xFFFFFFFF, toggled, 2 * n, n])
    assert uints[3] < n
    assert sums[0] == n / 2
    np.testing.assert_array_equal(np.sort(old), np.arange(n))  # each thread saw another value
    assert run.threads == n


@pytest.mark.parametrize("dtype", ["float", "half"])
@SEEDS
def test_matrix_options(operations: ShaderLibrary, dtype: str, seed: int) -> None:
    rng = np.random.default_rng(3)
    a, b = (
        rng.integers(-4, 4, (8, 8)).astype({"float": np.float32, "half": np.float16}[dtype]) for _ in range(2)
    )
    out, copy = floats(384), np.zeros((8, 8), a.dtype)
    operations.run(f"matrix_options_{dtype}", (1,), (32,), [a, b, out, copy], seed=seed)
    x, y = a.astype(np.float64), b.astype(np.float64)
    p = x @ y
    blocks = out.reshape(6, 8, 8)
    np.testing.assert_array_equal(blocks[0], p)
    np.testing.assert_array_equal(blocks[1], x.T @ y)
    np.testing.assert_array_equal(blocks[2], p.T)
    np.testing.assert_array_equal(blocks[3], p + 3 * np.eye(8))
    extra = np.tile([100, 0], 32).reshape(8, 8)  # of each lane's two elements the first
    np.testing.assert_array_equal(blocks[4], 4 * p + extra)
    np.testing.assert_array_equal(blocks[5], 4 * p + extra)
    np.testing.assert_array_equal(copy, a)


def test_matrix_results_round_to_their_type(operations: ShaderLibrary) -> None:
    a = np.random.default_rng(4).standard_normal((8, 8)).astype(np.float16)
    out, wide = np.zeros((8, 8), np.float16), np.zeros((8, 8), np.float32)
    operations.run("matrix_rounding", (1,), (32,), [a, out, wide])
    product = a.astype(np.float64) @ a.astype(np.float64)
    rounded = np.zeros((8, 8), np.float16)
    for _ in range(40):
        rounded = (rounded.astype(np.float64) + product).astype(np.float16)
    np.testing.assert_allclose(wide, 40 * product, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(out, rounded, rtol=2e-3, atol=1e-2)
    assert np.abs(out.astype(np.float64) - 40 * product).max() > 1e-3


@pytest.mark.parametrize("n", [32, 20, 1])
@SEEDS
def test_returned_lanes_are_inactive(operations: ShaderLibrary, n: int, seed: int) -> None:
    x, out = np.arange(1, 33, dtype=np.int32), np.full((3, 32), -1, np.int32)
    operations.run("early_return", (1,), (32,), [x, out, np.uint32(n)], seed=seed)
    even = np.arange(0, n, 2)
    np.testing.assert_array_equal(out[0, :n], x[:n].sum())
    np.testing.assert_array_equal(out[1, even], np.cumsum(x[even]))
    np.testing.assert_array_equal(out[2, even], x[0])
    assert (out[0, n:] == -1).all()
    assert (out[1:, 1::2] == -1).all()
