"""The emulator runs textbook algorithms as NumPy does, in any order of threads."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from shader_library import ShaderLibrary

pytestmark = pytest.mark.emulator
Array = np.ndarray[Any, Any]

ORDERS = [
    pytest.param({}, id="in-order"),
    pytest.param({"seed": 1}, id="shuffled"),
    pytest.param({"seed": 2, "workers": 1}, id="one-worker"),
    pytest.param({"checked": True}, id="checked"),
]


@pytest.fixture(scope="module")
def kernels(load_shaders: Callable[[str], ShaderLibrary]) -> ShaderLibrary:
    return load_shaders("algorithms")


@pytest.fixture(scope="module")
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("n", [1, 31, 1000, 100_003])
def test_reduction(kernels: ShaderLibrary, rng: np.random.Generator, order: dict[str, Any], n: int) -> None:
    x = rng.standard_normal(n).astype(np.float32)
    out = np.full(5, np.nan, np.float32)
    kernels.run("reduce_sum", (5,), (224,), [x, out, np.uint32(n)], **order)
    assert out.sum(dtype=np.float64) == pytest.approx(x.sum(dtype=np.float64), abs=1e-5 * n**0.5)


@pytest.mark.parametrize("threads", [64, 192, 1024])
def test_most_orders_show_that_a_barrier_is_missing(kernels: ShaderLibrary, threads: int) -> None:
    x = np.arange(threads, dtype=np.float32) % 7
    expected = np.full(threads, x.sum() + (x * x).sum())
    wrong = 0
    for seed in range(1, 21):
        for planted in (0, 1):
            out = np.full(threads, np.nan, np.float32)
            kernels.run("reduce_twice", (1,), (threads,), [x, out, np.uint32(planted)], seed=seed)
            if planted:
                wrong += not np.array_equal(out, expected)
            else:
                np.testing.assert_array_equal(out, expected)
    assert wrong >= 10


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("shape", [(16, 16), (33, 70), (1, 50)])
def test_transpose(
    kernels: ShaderLibrary, rng: np.random.Generator, order: dict[str, Any], shape: tuple[int, int]
) -> None:
    x = rng.standard_normal(shape).astype(np.float32)
    out = np.full(shape[::-1], np.nan, np.float32)
    grid = (-(-shape[1] // 16), -(-shape[0] // 16))
    size = np.array([shape[1], shape[0]], np.uint32)
    kernels.run("transpose", grid, (16, 16), [x, out, size], threadgroup=(16 * 17 * 4,), **order)
    np.testing.assert_array_equal(out, x.T)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", ["float", "half"])
def test_simdgroup_matmul(
    kernels: ShaderLibrary, rng: np.random.Generator, order: dict[str, Any], dtype: str
) -> None:
    m, n, k = 48, 32, 64
    numpy_type = {"float": np.float32, "half": np.float16}[dtype]
    given = [rng.standard_normal(shape).astype(numpy_type) for shape in ((m, k), (k, n))]
    a, b = (x.astype(np.float64) for x in given)
    c = np.full((m, n), np.nan, np.float32)
    sizes = np.array([m, n, k], np.uint32)
    kernels.run(f"matmul_simdgroup_{dtype}", (n // 16, m // 16), (32,), [*given, c, sizes], **order)
    np.testing.assert_allclose(c, a @ b, atol=1e-5 * k)


def test_positions(kernels: ShaderLibrary) -> None:
    vector = np.dtype([("xyz", np.uint32, 3), ("pad", np.uint32)])
    names = ("in_grid", "in_group", "group", "group_size", "grid")
    scalars = ("index", "lane", "simdgroup", "simdgroups")
    dtype = np.dtype([*((n, vector) for n in names), *((n, np.uint32) for n in scalars)])
    groups, group = (3, 2, 2), (4, 5, 2)
    threads = tuple(np.multiply(groups, group))
    out = np.zeros(threads[::-1], dtype)
    run = kernels.run("places", groups, group, [out])
    assert run.threads == out.size
    z, y, x = np.indices(threads[::-1])
    position = np.stack([x, y, z], -1)
    np.testing.assert_array_equal(out["in_grid"]["xyz"], position)
    np.testing.assert_array_equal(out["in_group"]["xyz"], position % group)
    np.testing.assert_array_equal(out["group"]["xyz"], position // group)
    np.testing.assert_array_equal(out["group_size"]["xyz"], np.broadcast_to(group, position.shape))
    np.testing.assert_array_equal(out["grid"]["xyz"], np.broadcast_to(threads, position.shape))
    index = (position % group) @ np.cumprod((1, *group[:2]))
    np.testing.assert_array_equal(out["index"], index)
    np.testing.assert_array_equal(out["lane"], index % 32)
    np.testing.assert_array_equal(out["simdgroup"], index // 32)
    np.testing.assert_array_equal(out["simdgroups"], 2)


def test_statistics(kernels: ShaderLibrary) -> None:
    x, out = np.zeros(3 * 1024, np.float32), np.zeros(3, np.float32)
    run = kernels.run("reduce_sum", (3,), (1024,), [x, out, np.uint32(len(x))])
    assert (run.threads, run.barriers) == (3072, 3)
    assert run.static_threadgroup_bytes == 32 * 4
