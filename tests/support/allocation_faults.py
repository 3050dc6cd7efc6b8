"""Allocations that fail on request: of the CPU engine through the linker, of Metal in the emulator."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import pytest

from metal_prefill import _core
from support.missing import fail_or_skip

MISSING = (
    "no allocation can be made to fail: the package was built without METAL_PREFILL_TESTING, or for a Mac"
)


class Fault:
    """One allocation that fails."""

    came = False


@cache
def _native() -> Any:
    library = ctypes.CDLL(_core.__file__)
    try:
        library.metal_prefill_fail_allocation.argtypes = [ctypes.c_long, ctypes.c_bool]
        library.metal_prefill_allocation_will_fail.restype = ctypes.c_bool
    except AttributeError:
        fail_or_skip(MISSING, "METAL_PREFILL_REQUIRE_EMULATOR")
    return library


def require_failing_allocations(device: str) -> None:
    """Skip a test if no allocation can be made to fail."""
    if device == "cpu":
        _native()
    elif not _core.has_emulator:
        pytest.skip(MISSING)


@contextmanager
def failing_allocation(
    device: str,  # ``cpu``: memory allocated by the package's C++ code on any thread. ``metal``: buffers.
    nth: int,  # counted from 1
    *,
    with_gil: bool = False,  # on the CPU, also count allocations while the thread holds the GIL
) -> Iterator[Fault]:
    """Make the nth allocation within the block fail."""
    require_failing_allocations(device)
    fault = Fault()
    if device == "metal":
        gpu: Any = _core.emulator
        gpu.fail_allocation(nth)
        will_fail, clear = gpu.allocation_will_fail, gpu.clear_faults
    else:
        native = _native()
        native.metal_prefill_fail_allocation(nth, with_gil)
        will_fail = native.metal_prefill_allocation_will_fail
        clear = partial(native.metal_prefill_fail_allocation, 0, False)
    try:
        yield fault
    finally:
        fault.came = not will_fail()
        clear()
