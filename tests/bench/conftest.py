"""Shared by the tests of benchmarks. No test depends on how fast anything is."""

from pathlib import Path

import pytest
from support.bench_fakes import SteadyCalibrator

from metal_prefill import bench
from metal_prefill.bench import BenchResults, _engines, _machine


@pytest.fixture(name="_quiet_machine")
def quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give all engines a machine that is never disturbed."""
    monkeypatch.setattr(_machine, "Calibrator", lambda threads: SteadyCalibrator())
    monkeypatch.setattr(_machine, "stolen_ns", lambda: 0)
    monkeypatch.setattr(_engines, "check_peer", lambda name, embeds: None)


@pytest.fixture(scope="session")
def measured(demo_path: Path) -> BenchResults:
    """Measure the bundled model, in a real process."""
    return bench.run(demo_path, prompts=[4, 16], n_gen=3, repetitions=2, threads=1, device="cpu", patience=0)
