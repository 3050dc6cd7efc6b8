"""The engine's kernels for tests, one dispatch at a time, on a Mac's GPU or on the emulator."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from metal_kernels import KernelLibrary, testing_module
from support.kernel_harness import SHADERS, Array, Run, flat_source

MISSING = "the package was built without the means to dispatch single kernels: run `make test`"
SHUFFLED = 7  # seed of the order of threads


@pytest.fixture(scope="module")
def libraries() -> Iterator[dict[str, KernelLibrary]]:
    """Yield the library of each kernel, by its name."""
    try:
        testing_module()
    except ImportError:
        if os.environ.get("METAL_PREFILL_REQUIRE_EMULATOR"):
            pytest.fail(MISSING)
        pytest.skip(MISSING)
    opened = [KernelLibrary(flat_source(path)) for path in sorted(SHADERS.glob("*.metal"))]
    yield {name: library for library in opened for name in library.library.function_names}
    for library in opened:
        library.close()
    gc.collect()


@pytest.fixture(params=["ordered", "shuffled"])
def run(request: pytest.FixtureRequest, libraries: dict[str, KernelLibrary]) -> Iterator[Run]:
    """Dispatch kernels; on the emulator with the threads of a threadgroup in order, and shuffled."""
    emulator: Any = getattr(testing_module(), "emulator", None)
    if request.param == "shuffled":
        if emulator is None:
            pytest.skip("a GPU runs its threads in an order of its own")
        emulator.set_options(emulator.Options(seed=SHUFFLED))

    def dispatch(
        kernel: str,
        *buffers: Array,
        groups: Sequence[int],
        threads: Sequence[int],
        threadgroup_bytes: int = 0,
    ) -> None:
        *arrays, args = buffers
        libraries[kernel].dispatch(
            kernel,
            [*arrays, args.tobytes()],
            groups=tuple(groups),
            threads=tuple(threads),
            threadgroup=[threadgroup_bytes] if threadgroup_bytes else [],
        )

    yield dispatch
    if emulator is not None:
        emulator.set_options(emulator.Options())
