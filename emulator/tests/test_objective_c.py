"""Objective-C and Foundation: the small runtime behaves as programs expect of Apple's."""

from typing import Any

import pytest


@pytest.mark.usefixtures("emulator")
def test_objective_c(metal_testing: Any) -> None:
    metal_testing.check_objc()
