"""Settings that save the whole suite processor time. Fixtures are in the conftest of each folder."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest

# NumPy's products of float64, which the engines are compared with, are small: its threads would mostly
# wait for one another, and they wait busily. NumPy reads this when it is imported, here and in the programs
# that tests start.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Programs that tests start list the native objects that are alive when they exit; users see no such list.
os.environ.setdefault("METAL_PREFILL_LEAK_WARNINGS", "1")


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Iterator[None]:
    """Leave out of garbage collections what lives to the end anyway: modules and collected tests.

    Among so many objects a full collection, which many tests ask for, takes a tenth of a second.
    """
    gc.disable()
    yield
    gc.collect()
    gc.freeze()
    gc.enable()
