"""Many threads on one model while allocations fail: every result equals the serial one, and nothing leaks.

The suite runs half a second of it; ``make soak MINUTES=n`` runs longer, with another seed each time.
"""

import os
import sys
from collections import Counter
from pathlib import Path

import pytest
from support.allocation_faults import require_failing_allocations
from support.small_models import write
from support.soak import rounds, soak
from support.tiny_models import TINY_MODELS

SEED = os.environ.get("SOAK_SEED", "1")
SECONDS = float(os.environ.get("SOAK_SECONDS", "0"))  # per device; 0: the time of the suite

pytestmark = pytest.mark.timeout(0 if SECONDS else 300)


def test_results_match_sequential_calls(device: str, tmp_path: Path) -> None:
    if device == "metal" and not SECONDS:
        pytest.skip("the suite soaks the CPU engine only")
    if sys.platform != "linux":
        pytest.skip("reads /proc")
    require_failing_allocations(device)
    path = write(tmp_path / "m.gguf", TINY_MODELS["gemma3"])
    counts: Counter[str] = Counter()
    for n, seconds in rounds(SECONDS, counts):
        counts.update(soak(path, device, tmp_path, seconds, f"{SEED}.{n}"))
    assert counts["calls"] > 0
    assert counts["failed allocations"] > 0
