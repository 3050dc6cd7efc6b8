"""Metal Shading Language has the defined semantics on the emulator."""

from typing import Any

import numpy as np
import pytest
from metal_kernels import KernelLibrary

pytestmark = pytest.mark.emulator
KERNEL_SOURCE = "language.metal"


@pytest.fixture(params=[0, 5], ids=["in order", "shuffled"])
def order(request: pytest.FixtureRequest, emulator: Any) -> None:
    emulator.set_options(emulator.Options(seed=request.param))


def floats(n: int) -> np.ndarray[Any, Any]:
    return np.full(n, np.nan, np.float32)


def test_vectors_and_swizzles(library: KernelLibrary) -> None:
    out = floats(15)
    library.dispatch("vector_values", [out], groups=1, threads=1)
    a, c, d = [0.5, 2, 0.5, 4], [1, 2, 7, 9], [4, 3, 9, 10]
    np.testing.assert_array_equal(out, [*a, *c, *d, 6, 32, 46.5])


def test_constructors_convert_values(library: KernelLibrary) -> None:
    out = np.zeros(21, np.int32)
    library.dispatch("vector_conversions", [out], groups=1, threads=1)
    v = np.array([1.75, -2.75, 3.5, -4.5], np.float32)
    rows = out[:20].reshape(4, 5)
    whole = v.astype(np.int32)
    np.testing.assert_array_equal(
        rows, np.stack([whole, whole, v.view(np.int32), whole, np.full(4, 2)], axis=1)
    )
    np.testing.assert_array_equal(out[20:], [5 + 7])  # (1.5, 2.5) + 1


def test_struct_layout(library: KernelLibrary) -> None:
    dtype = np.dtype(
        {
            "names": ["a", "b", "c", "d"],
            "formats": ["f2", "u1", ("f2", 2), ("f4", 3)],
            "offsets": [0, 2, 4, 16],
            "itemsize": 32,
        }
    )
    rng = np.random.default_rng(0)
    values = np.zeros(5, dtype)
    values["a"], values["b"], values["c"] = 2, rng.integers(0, 200, 5), rng.integers(-8, 8, (5, 2))
    values["d"] = rng.integers(-8, 8, (5, 3))
    out = np.full((5, 4), np.nan, np.float32)
    library.dispatch("structs", [values, out], groups=5, threads=1)
    front = np.concatenate([values["b"][:, None], values["c"]], axis=1).astype(np.float32)
    np.testing.assert_array_equal(out[:, :3], front * 2 + values["d"])


def test_half_rounds_each_operation(library: KernelLibrary) -> None:
    x = np.array([1 / 3, 1.0009765625, 2049, 65519, 65520, 1e-8, -0.1, 3.1415927, 257.5], np.float32)
    halves, sums = np.zeros(9, np.float16), floats(9)
    library.dispatch("rounding", [x, halves, sums], groups=9, threads=1)
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16)
        product = expected * np.float16(0.1)
        np.testing.assert_array_equal(sums, (product + expected).astype(np.float32))
    np.testing.assert_array_equal(halves, expected)


def test_templates_instantiated_for_the_host(library: KernelLibrary) -> None:
    x, out = np.arange(6, dtype=np.float32), floats(6)
    library.dispatch("apply_twice", [x, out, np.uint32(5)], groups=6, threads=1)
    np.testing.assert_array_equal(out, [0, 2, 4, 6, 8, np.nan])
    halves = np.zeros(6, np.float16)
    library.dispatch("apply_squared_half", [x.astype(np.float16), halves, np.uint32(6)], groups=6, threads=1)
    np.testing.assert_array_equal(halves, x**2 - 1)
    ints = np.zeros(6, np.int32)
    library.dispatch("apply_squared_int", [x.astype(np.int32), ints, np.uint32(6)], groups=6, threads=1)
    np.testing.assert_array_equal(ints, x**2 + 4)


def test_functions_of_numbers(library: KernelLibrary) -> None:
    expected = [3 + 1 + 9, 4 + 0.5 + 5 + 3, 1, 10 + 10, np.e + 8 + 0.5, 2 + np.log(np.log2(np.e)),
                4 + 4 + 16]  # fmt: skip
    out = floats(len(expected))
    library.dispatch("numbers", [out], groups=1, threads=1)
    np.testing.assert_allclose(out, np.array(expected, np.float32), rtol=1e-6)


@pytest.mark.usefixtures("order")
def test_simdgroup_operations(library: KernelLibrary) -> None:
    x = np.random.default_rng(1).integers(-50, 50, 32).astype(np.int32)
    out = np.full((8, 32), -999, np.int32)
    library.dispatch("simd_operations", [x, out], groups=1, threads=32)
    lanes = np.arange(32)
    rows = [x.sum(), x.max(), x.min(), x[lanes ^ 5], 1, x.sum(), 32, x[lanes ^ 16]]
    np.testing.assert_array_equal(out, [np.broadcast_to(row, 32) for row in rows])


@pytest.mark.parametrize("dtype", ["float", "half"])
@pytest.mark.usefixtures("order")
def test_matrix_options(library: KernelLibrary, dtype: str) -> None:
    rng = np.random.default_rng(3)
    a, b = (
        rng.integers(-4, 4, (8, 8)).astype({"float": np.float32, "half": np.float16}[dtype]) for _ in range(2)
    )
    out, copy = floats(320), np.zeros((8, 8), a.dtype)
    library.dispatch(f"matrix_options_{dtype}", [a, b, out, copy], groups=1, threads=32)
    x, y = a.astype(np.float64), b.astype(np.float64)
    p = x @ y
    blocks = out.reshape(5, 8, 8)
    np.testing.assert_array_equal(blocks[0], p)
    np.testing.assert_array_equal(blocks[1], x.T @ y)
    np.testing.assert_array_equal(blocks[2], 40 * p)
    extra = np.tile([100, 0], 32).reshape(8, 8)  # the first of each lane's two elements
    np.testing.assert_array_equal(blocks[3], 4 * p + extra)
    np.testing.assert_array_equal(blocks[4], 4 * p + extra)
    np.testing.assert_array_equal(copy, a)


@pytest.mark.parametrize("n", [32, 20, 1])
@pytest.mark.usefixtures("order")
def test_returned_lanes_are_inactive(library: KernelLibrary, n: int) -> None:
    x, out = np.arange(1, 33, dtype=np.int32), np.full((2, 32), -1, np.int32)
    library.dispatch("early_return", [x, out, np.uint32(n)], groups=1, threads=32)
    even = np.arange(0, n, 2)
    np.testing.assert_array_equal(out[0, :n], x[:n].sum())
    np.testing.assert_array_equal(out[1, even], x[even].max())
    assert (out[0, n:] == -1).all()
    assert (out[1, 1::2] == -1).all()
