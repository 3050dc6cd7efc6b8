"""Fuzzers run for as long as `make fuzz` asks for."""

import pytest
from support.fuzzing import SECONDS


def pytest_itemcollected(item: pytest.Item) -> None:
    """Give tests no limit on their time if they get a duration."""
    if SECONDS:
        item.add_marker(pytest.mark.timeout(0))
