"""Orders and positions of threads."""

from typing import Any

import numpy as np
import pytest
from metal_kernels import KernelLibrary

pytestmark = pytest.mark.emulator
KERNEL_SOURCE = "algorithms.metal"


@pytest.mark.parametrize("threads", [64, 192, 1024])
def test_most_orders_show_that_a_barrier_is_missing(
    library: KernelLibrary, emulator: Any, threads: int
) -> None:
    if emulator.sanitizer == "thread":
        pytest.skip("the first dispatch without the barrier would end the process with a report")
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
    x, out = np.zeros((2, 1024), np.float32)
    library.dispatch("reduce_twice", [x, out, np.uint32(0)], groups=2, threads=1024)
    (run,) = emulator.history()[0].dispatches
    assert (run.threads, run.barriers) == (2048, 6)
