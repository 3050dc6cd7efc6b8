"""The order in which engines are measured, and repetition."""

from pathlib import Path

import pytest
from support.bench_fakes import FakeWorker, SteadyCalibrator, compare, fakes

from metal_prefill.bench import _engines, _machine, _runner
from metal_prefill.bench._cases import Case


@pytest.mark.usefixtures("_quiet_machine")
def test_engines_alternate(demo_path: Path) -> None:
    log: list[str] = []
    workers = fakes(ours=10, llama=20, openvino=30)
    for worker in workers.values():
        worker.log = log
    compare(workers, demo_path, n_gen=0)
    names = list(workers)
    assert log[:3] == names  # warm-up
    for turn in range(1, 4):
        assert sorted(log[3 * turn : 3 * turn + 3]) == sorted(names)
    assert log[3] != log[6]  # the order rotates
    assert len(log) == 12
    assert all(worker.closed for worker in workers.values())


@pytest.mark.usefixtures("_quiet_machine")
def test_disturbed_samples_are_repeated_and_counted(demo_path: Path) -> None:
    workers = fakes(ours=10)
    workers[_engines.OURS].switches = iter([0, 99, 0, 99, 0, 0])  # the first is the warm-up
    row = compare(workers, demo_path, n_gen=0).row(_engines.OURS, "pp8")
    assert len(row.samples_ns) == 3
    assert (row.n_dropped, row.n_degraded) == (2, 0)
    assert row.note == ""


@pytest.mark.usefixtures("_quiet_machine")
def test_repetition_is_bounded_and_reported(demo_path: Path) -> None:
    workers = fakes(ours=10)
    workers[_engines.OURS].switches = iter([99] * 1000)
    results = compare(workers, demo_path, n_gen=0)
    row = results.row(_engines.OURS, "pp8")
    assert len(row.samples_ns) == 3
    assert row.n_degraded == 3
    assert row.n_dropped == 3 * _runner.ATTEMPTS - 3
    assert "3 of 3 samples taken while the machine was busy or slow" in row.note
    assert any("9 samples" in note for note in results.notes())


@pytest.mark.usefixtures("_quiet_machine")
def test_nothing_is_repeated_without_patience(demo_path: Path) -> None:
    workers = fakes(ours=10)
    workers[_engines.OURS].switches = iter([99] * 1000)
    row = compare(workers, demo_path, n_gen=0, patience=0.0).row(_engines.OURS, "pp8")
    assert (len(row.samples_ns), row.n_dropped, row.n_degraded) == (3, 0, 3)


@pytest.mark.usefixtures("_quiet_machine")
def test_repeated_samples_use_up_the_patience(demo_path: Path) -> None:
    workers = fakes(ours=10**9)  # a sample of 8 tokens reports 8 s
    workers[_engines.OURS].switches = iter([999] * 1000)
    row = compare(workers, demo_path, n_gen=0, patience=30.0).row(_engines.OURS, "pp8")
    assert (len(row.samples_ns), row.n_dropped, row.n_degraded) == (3, 1, 3)


def test_earlier_samples_are_repeated_if_the_machine_gets_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_machine, "stolen_ns", lambda: 0)
    worker = FakeWorker("ours", 10)
    # The first two samples are calibrated at 2000 ns, which seems the best until 1000 ns shows.
    calibrator = SteadyCalibrator(2000, 2000, 2000, 2000, best_ns=1000)
    calibrator.reference_ns = 2000
    case = Case(8, 0, 0)
    measured = _runner.Runner([worker], calibrator, repetitions=3)
    measured.run([case])
    selection = measured.selection(worker, case)
    assert [sample.calibration_ns for sample in selection.kept] == [1000] * 3
    assert selection.n_dropped == 2
