"""Skip tests, or fail them, if something that they need is missing."""

import os
from pathlib import Path
from typing import NoReturn

import pytest

# With either, a missing GPU fails a test. CI sets the first on a Mac, the second with the emulator.
REQUIRE_METAL = ("METAL_PREFILL_REQUIRE_METAL", "METAL_PREFILL_REQUIRE_EMULATOR")


def skip_where_the_cpu_is_selected() -> None:
    """Skip a test of the GPU if ``METAL_PREFILL_DEVICE`` selects the CPU for all models."""
    if os.environ.get("METAL_PREFILL_DEVICE") == "cpu":
        pytest.skip("METAL_PREFILL_DEVICE selects the CPU")


def fail_or_skip(message: str, *variables: str) -> NoReturn:
    """Fail the test if one of the environment variables is set; otherwise skip it."""
    if any(os.environ.get(variable) for variable in variables):
        pytest.fail(message)
    pytest.skip(message)


def resident_bytes() -> int:
    """Return the resident memory of this process; skip the test on systems without ``/proc``."""
    memory = Path("/proc/self/statm")
    if not memory.exists():
        pytest.skip("resident memory is read from /proc")
    return int(memory.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
