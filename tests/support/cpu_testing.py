"""The module through which tests call the CPU engine's kernels."""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest

MISSING = "the package was built without METAL_PREFILL_TESTING, which tests of kernels need: run `make test`"


def cpu_testing() -> Any:
    """Return it; skips a test where the package lacks it, or fails where all tests must run."""
    try:
        return importlib.import_module("_cpu_testing")
    except ImportError:
        if os.environ.get("METAL_PREFILL_REQUIRE_EMULATOR"):
            pytest.fail(MISSING)
        pytest.skip(MISSING)
