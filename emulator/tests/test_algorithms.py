"""The emulator runs textbook algorithms as NumPy does, in any order of threads."""

from __future__ import annotations

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


@pytest.mark.parametrize("order", ORDERS)
def test_scan(kernels: ShaderLibrary, rng: np.random.Generator, order: dict[str, Any]) -> None:
    x = rng.integers(-1000, 1000, (3, 1024)).astype(np.int32)
    out = np.full_like(x, -1)
    kernels.run("scan", (3,), (1024,), [x, out], **order)
    np.testing.assert_array_equal(out, np.cumsum(x, axis=1) - x)


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
def test_histogram(kernels: ShaderLibrary, rng: np.random.Generator, order: dict[str, Any]) -> None:
    x = rng.integers(0, 64, 20_000).astype(np.uint8)
    counts = np.zeros(64, np.uint32)
    kernels.run("histogram", (7,), (96,), [x, counts, np.uint32(len(x))], **order)
    np.testing.assert_array_equal(counts, np.bincount(x, minlength=64))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("size", [(16, 16, 16), (5, 37, 50), (33, 64, 100)])
def test_tiled_matmul(
    kernels: ShaderLibrary, rng: np.random.Generator, order: dict[str, Any], size: tuple[int, int, int]
) -> None:
    m, n, k = size
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((m, k), (k, n)))
    c = np.full((m, n), np.nan, np.float32)
    grid = (-(-n // 16), -(-m // 16))
    kernels.run("matmul_tiled", grid, (16, 16), [a, b, c, np.array([m, n, k], np.uint32)], **order)
    np.testing.assert_allclose(c, a.astype(np.float64) @ b, atol=1e-5 * k)


def bfloat_bits(x: Array) -> Array:
    """Round to bfloat, to nearest even, and return its 16 bits."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def bfloat_values(bits: Array) -> Array:
    return (bits.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", ["float", "half", "bfloat"])
def test_simdgroup_matmul(
    kernels: ShaderLibrary, rng: np.random.Generator, order: dict[str, Any], dtype: str
) -> None:
    m, n, k = 48, 32, 64
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((m, k), (k, n)))
    given: list[Array]
    if dtype == "bfloat":
        given = [bfloat_bits(a), bfloat_bits(b)]
        a, b = (bfloat_values(bits) for bits in given)
    else:
        given = [x.astype({"float": np.float32, "half": np.float16}[dtype]) for x in (a, b)]
        a, b = (x.astype(np.float32) for x in given)
    c = np.full((m, n), np.nan, np.float32)
    sizes = np.array([m, n, k], np.uint32)
    kernels.run(f"matmul_simdgroup_{dtype}", (n // 16, m // 16), (32,), [*given, c, sizes], **order)
    np.testing.assert_allclose(c, a.astype(np.float64) @ b, atol=1e-5 * k)


@pytest.mark.parametrize("order", ORDERS)
def test_attention(kernels: ShaderLibrary, rng: np.random.Generator, order: dict[str, Any]) -> None:
    n = 45  # with four simdgroups per threadgroup, the last ones return immediately
    q, k, v = (rng.standard_normal((n, 64)).astype(np.float32) for _ in range(3))
    out = np.full((n, 64), np.nan, np.float32)
    arguments = [q, k, v, out, np.uint32(n), np.float32(0.125)]
    kernels.run("attention", (-(-n // 4),), (128,), arguments, **order)
    scores = q.astype(np.float64) @ k.T * 0.125
    scores[np.triu_indices(n, 1)] = -np.inf
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    expected = weights / weights.sum(axis=1, keepdims=True) @ v
    np.testing.assert_allclose(out, expected, atol=1e-5)


def test_grid_that_is_not_a_multiple_of_the_threadgroup(kernels: ShaderLibrary) -> None:
    vector = np.dtype([("xyz", np.uint32, 3), ("pad", np.uint32)])
    names = ("in_grid", "in_group", "group", "group_size", "grid")
    scalars = ("index", "lane", "simdgroup", "simdgroups")
    dtype = np.dtype([*((n, vector) for n in names), *((n, np.uint32) for n in scalars)])
    threads, group = (11, 5, 3), (4, 4, 2)
    out = np.zeros(threads[::-1], dtype)
    run = kernels.run("places", (3, 2, 2), group, [out], threads=threads)
    assert run.threads == 11 * 5 * 3
    z, y, x = np.indices(threads[::-1])
    position = np.stack([x, y, z], -1)
    np.testing.assert_array_equal(out["in_grid"]["xyz"], position)
    np.testing.assert_array_equal(out["in_group"]["xyz"], position % group)
    np.testing.assert_array_equal(out["group"]["xyz"], position // group)
    size = np.minimum(group, np.array(threads) - position // group * group)
    np.testing.assert_array_equal(out["group_size"]["xyz"], size)
    np.testing.assert_array_equal(out["grid"]["xyz"], np.broadcast_to(threads, position.shape))
    index = ((position % group)[..., 2] * size[..., 1] + (position % group)[..., 1]) * size[..., 0]
    index += (position % group)[..., 0]
    np.testing.assert_array_equal(out["index"], index)
    np.testing.assert_array_equal(out["lane"], index % 32)
    np.testing.assert_array_equal(out["simdgroups"], (size.prod(-1) + 31) // 32)


def test_statistics(kernels: ShaderLibrary) -> None:
    x, out = np.zeros((3, 1024), np.int32), np.zeros((3, 1024), np.int32)
    run = kernels.run("scan", (3,), (1024,), [x, out])
    assert (run.threads, run.barriers) == (3072, 6)
    assert run.static_threadgroup_bytes == 32 * 4


@pytest.mark.usefixtures("has_checked_mode")
def test_checked_mode_counts_bytes(kernels: ShaderLibrary) -> None:
    x, out = np.zeros((3, 1024), np.int32), np.zeros((3, 1024), np.int32)
    run = kernels.run("scan", (3,), (1024,), [x, out], checked=True)
    assert (run.bytes_read[0], run.bytes_written[0]) == (3 * 4096, 0)
    assert (run.bytes_read[1], run.bytes_written[1]) == (0, 3 * 4096)
