"""Objective-C and Foundation: the small runtime behaves as programs expect of Apple's."""

from typing import Any

import pytest


@pytest.mark.usefixtures("emulator")
def test_objective_c(metal_testing: Any) -> None:
    for name, check in metal_testing.objc_checks.items():
        try:
            check()
        except RuntimeError as error:
            pytest.fail(f"{name}: {error}")
