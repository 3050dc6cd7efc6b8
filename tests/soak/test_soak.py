"""Many threads on one model while allocations fail: every result equals the serial one, and nothing leaks.

The suite runs a second of it; ``make soak MINUTES=n`` runs longer, with another seed each time.
"""

import os
import sys
import threading
import time
from collections import Counter
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path

import pytest
from support import soak as support_soak
from support.allocation_faults import require_failing_allocations
from support.small_models import write
from support.soak import MOST_STREAMS, SETTLING, Footprint, soak
from support.tiny_models import TINY_MODELS

from metal_prefill._support.threads import in_thread

SEED = os.environ.get("SOAK_SEED", "1")
SECONDS = float(os.environ.get("SOAK_SECONDS", "0"))  # per device; 0: the time of the suite
ROUND_S = 20.0

pytestmark = pytest.mark.timeout(0 if SECONDS else 300)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_threads_that_do_not_end_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of jobs are kept, as many as there were jobs at a time."""
    settled, done, together = Footprint.now(), threading.Event(), threading.Barrier(5)
    jobs = [in_thread(together.wait) for _ in range(4)]
    together.wait()
    wait(jobs)
    now = Footprint.now()
    now.assert_no_growth(settled)
    with pytest.raises(AssertionError):
        replace(now, jobs=MOST_STREAMS + 1).assert_no_growth(settled)
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        with pytest.raises(AssertionError):
            Footprint.now().assert_no_growth(settled)
        monkeypatch.setattr(support_soak, "JOB_S", 0.05)
        in_thread(done.wait)
        with pytest.raises(AssertionError, match="a job did not end"):
            Footprint.now()
    finally:
        done.set()
        thread.join()
    Footprint.now().assert_no_growth(settled)


def test_results_match_sequential_calls(device: str, tmp_path: Path) -> None:
    if device == "metal" and not SECONDS:
        pytest.skip("the suite soaks the CPU engine only")
    if sys.platform != "linux":
        pytest.skip("reads /proc")
    require_failing_allocations(device)
    path = write(tmp_path / "m.gguf", TINY_MODELS["gemma3"])
    end = time.monotonic() + SECONDS
    counts: Counter[str] = Counter()
    footprints: list[Footprint] = []
    while not footprints or time.monotonic() < end:
        seconds = min(ROUND_S, max(end - time.monotonic(), 1.0))
        counts.update(soak(path, device, tmp_path, seconds, f"{SEED}.{len(footprints)}"))
        footprints.append(Footprint.now())
        print(f"{footprints[-1]} {dict(counts)}", flush=True)
    assert counts["calls"] > 0
    assert counts["failed allocations"] > 0
    if len(footprints) > SETTLING:
        settled = footprints[SETTLING - 1]
        for footprint in footprints[SETTLING:]:
            footprint.assert_no_growth(settled)
