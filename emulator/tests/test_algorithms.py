"""The emulator runs textbook algorithms as NumPy does, in any order of threads."""

from typing import Any

import numpy as np
import pytest
from metal_kernels import KernelLibrary

pytestmark = pytest.mark.emulator
KERNEL_SOURCE = "algorithms.metal"


@pytest.fixture(
    params=[{}, {"seed": 1}, {"seed": 2, "workers": 1}, {"checked": True}],
    ids=["in-order", "shuffled", "one-worker", "checked"],
)
def order(request: pytest.FixtureRequest, emulator: Any) -> None:
    if "checked" in request.param:
        request.getfixturevalue("checked_mode")
    else:
        emulator.set_options(emulator.Options(**{"workers": 2} | request.param))


@pytest.fixture(scope="module")
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize("n", [1, 31, 1000, 100_003])
def test_reduction(library: KernelLibrary, rng: np.random.Generator, n: int) -> None:
    x = rng.standard_normal(n).astype(np.float32)
    out = np.full(5, np.nan, np.float32)
    library.dispatch("reduce_sum", [x, out, np.uint32(n)], groups=5, threads=224)
    assert out.sum(dtype=np.float64) == pytest.approx(x.sum(dtype=np.float64), abs=1e-5 * n**0.5)


@pytest.mark.parametrize("threads", [64, 192, 1024])
def test_most_orders_show_that_a_barrier_is_missing(
    library: KernelLibrary, emulator: Any, threads: int
) -> None:
    x = np.arange(threads, dtype=np.float32) % 7
    expected = np.full(threads, x.sum() + (x * x).sum())
    wrong = 0
    for seed in range(1, 21):
        emulator.set_options(emulator.Options(seed=seed))
        for planted in (0, 1):
            out = np.full(threads, np.nan, np.float32)
            library.dispatch("reduce_twice", [x, out, np.uint32(planted)], groups=1, threads=threads)
            if planted:
                wrong += not np.array_equal(out, expected)
            else:
                np.testing.assert_array_equal(out, expected)
    assert wrong >= 10


def test_positions(library: KernelLibrary) -> None:
    vector = np.dtype([("xyz", np.uint32, 3), ("pad", np.uint32)])
    names = ("in_grid", "group", "group_size", "grid")
    scalars = ("index", "lane", "simdgroup", "simdgroups")
    dtype = np.dtype([*((n, vector) for n in names), *((n, np.uint32) for n in scalars)])
    groups, group = (3, 2, 2), (4, 5, 2)
    threads = tuple(np.multiply(groups, group))
    out = np.zeros(threads[::-1], dtype)
    library.dispatch("places", [out], groups=groups, threads=group)
    z, y, x = np.indices(threads[::-1])
    position = np.stack([x, y, z], -1)
    np.testing.assert_array_equal(out["in_grid"]["xyz"], position)
    np.testing.assert_array_equal(out["group"]["xyz"], position // group)
    np.testing.assert_array_equal(out["group_size"]["xyz"], np.broadcast_to(group, position.shape))
    np.testing.assert_array_equal(out["grid"]["xyz"], np.broadcast_to(threads, position.shape))
    index = (position % group) @ np.cumprod((1, *group[:2]))
    np.testing.assert_array_equal(out["index"], index)
    np.testing.assert_array_equal(out["lane"], index % 32)
    np.testing.assert_array_equal(out["simdgroup"], index // 32)
    np.testing.assert_array_equal(out["simdgroups"], 2)


def test_statistics(library: KernelLibrary, emulator: Any) -> None:
    emulator.set_history_depth(1)
    x, out = np.zeros(3 * 1024, np.float32), np.zeros(3, np.float32)
    library.dispatch("reduce_sum", [x, out, np.uint32(len(x))], groups=3, threads=1024)
    (run,) = emulator.history()[0].dispatches
    assert (run.threads, run.barriers) == (3072, 3)
