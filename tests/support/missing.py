"""Skip tests, or fail them, if something that they need is missing."""

import os
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
