"""Many threads on one model while allocations fail: every result equals the serial one, and nothing leaks.

The suite runs half a second of it; ``make soak MINUTES=n`` runs longer, with another seed each time.
"""

import sys
from collections import Counter
from pathlib import Path

import pytest
from support.allocation_faults import require_failing_allocations
from support.small_models import write
from support.soak import SECONDS, SEED, Worker, assert_released, opened, rounds, soak
from support.tiny_models import TINY_MODELS

pytestmark = pytest.mark.timeout(0 if SECONDS else 300)


def test_a_history_of_one_thread_matches_an_oracle(device: str, tmp_path: Path) -> None:
    """The calls of a seed are the same in every run."""
    path = write(tmp_path / "m.gguf", TINY_MODELS["gemma3"])
    model, oracle = opened(path, device)
    with model:
        with model.session() as shared:
            worker = Worker(model, oracle, [shared], tmp_path, "11")
            for _ in range(120 if device == "cpu" else 30):
                worker.step()
            worker.close()
        assert worker.refused == 0
        assert len(worker.calls) == 12  # all kinds
        assert worker.largest_batch == 4
        assert_released(model)
    oracle.close()


def test_results_match_sequential_calls(device: str, tmp_path: Path) -> None:
    if device == "metal" and not SECONDS:
        pytest.skip("the suite soaks the CPU engine only")
    if sys.platform != "linux":
        pytest.skip("reads /proc")
    require_failing_allocations(device)
    path = write(tmp_path / "m.gguf", TINY_MODELS["gemma3"])
    counts: Counter[str] = Counter()
    for n, seconds in rounds(counts):
        counts.update(soak(path, device, tmp_path, seconds, f"{SEED}.{n}"))
    assert counts["calls"] > 0
    assert counts["failed allocations"] > 0
