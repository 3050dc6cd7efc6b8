"""Cores of the threads that compute."""

import os
import sys
from pathlib import Path

import pytest

from metal_prefill import Model


def _threads() -> set[int]:
    return {int(task.name) for task in Path("/proc/self/task").iterdir()}


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no masks of cores")
def test_helpers_leave_the_core_of_the_caller(demo_path: Path) -> None:
    allowed = os.sched_getaffinity(0)
    before = _threads()
    with Model(demo_path, device="cpu", threads=2) as model:
        (helper,) = _threads() - before
        for core in allowed:
            os.sched_setaffinity(0, {core})  # moves the caller there
            os.sched_setaffinity(0, allowed)
            model.forward_prompt([1, 2, 3])
            now = os.sched_getaffinity(helper)
            assert now == allowed if len(allowed) == 1 else len(now) == len(allowed) - 1
        os.sched_setaffinity(helper, allowed)
        try:
            os.sched_setaffinity(0, {min(allowed)})
            model.forward_prompt([1, 2, 3])
            assert os.sched_getaffinity(helper) == allowed  # the caller has no other core to leave it
        finally:
            os.sched_setaffinity(0, allowed)
