"""Objective-C and Foundation: the small runtime behaves as programs expect of Apple's."""

from typing import Any

import pytest

CHECKS = [
    "URLs and errors", "autorelease pools", "blocks keep what they capture",
    "categories and messages to nil", "collections",
    "enumeration of many objects", "exceptions release what they leave", "members of superclasses",
    "pools belong to threads", "properties", "reference counts", "strings",
]  # fmt: skip


def test_every_check_is_listed(metal_testing: Any) -> None:
    assert metal_testing.objc_checks() == CHECKS


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.usefixtures("emulator")
def test_objective_c(metal_testing: Any, check: str) -> None:
    metal_testing.run_objc_check(check)
