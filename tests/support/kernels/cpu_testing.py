"""The extension module for calls of the CPU engine's kernels."""

import importlib
from functools import cache
from typing import Any

import pytest

from metal_prefill import _core
from support.missing import fail_or_skip

EMULATE_AMX = "METAL_PREFILL_EMULATE_AMX"  # read by builds for tests: see `tests/native/amx_emulator.cpp`
MISSING = "the package was built without METAL_PREFILL_TESTING, which tests of kernels need: run `make test`"


@cache
def _with_emulated_amx() -> Any:
    """Import the module and enable the kernels of AMX, emulated if the processor lacks them."""
    module = importlib.import_module("_cpu_testing")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(EMULATE_AMX, "1")
        module.kernel_sets()  # reads the processor's features, only once
    return module


def native_sets() -> list[str]:
    """Return the kernel sets that this processor runs or that are emulated, fastest first."""
    try:
        sets: list[str] = _with_emulated_amx().kernel_sets()
    except ImportError:
        sets = _core.kernel_sets()
    return sets


def cpu_testing() -> Any:
    """Return the module. If it was not built, skip the test, or fail it if all tests must run."""
    try:
        return _with_emulated_amx()
    except ImportError:
        fail_or_skip(MISSING, "METAL_PREFILL_REQUIRE_EMULATOR")
