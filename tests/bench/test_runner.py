"""Tests that are measured and their tokens, the order of samples, which count, the machine's state."""

from pathlib import Path
from typing import Any

import pytest
from support.bench_fakes import FakeWorker, SteadyCalibrator, compare, fakes

from metal_prefill.bench import _engines, _machine, _runner
from metal_prefill.bench._cases import Case, make_cases, stream_ids, token_ids
from metal_prefill.bench._runner import Sample, Spread, ratios, select, spread


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
@pytest.mark.parametrize(
    ("ns_per_token", "switches", "options", "dropped", "degraded"),
    [
        (10, [0, 99, 0, 99, 0, 0], {}, 2, 0),  # the first is the warm-up
        (10, [99] * 1000, {}, 3 * _runner.ATTEMPTS - 3, 3),  # repetition is bounded
        (10, [99] * 1000, {"patience": 0.0}, 0, 3),
        (10**9, [999] * 1000, {"patience": 30.0}, 1, 3),  # each sample of 8 tokens uses up 8 s of it
    ],
)
def test_disturbed_samples_are_repeated_within_limits_and_counted(
    demo_path: Path,
    ns_per_token: int,
    switches: list[int],
    options: dict[str, Any],
    dropped: int,
    degraded: int,
) -> None:
    workers = fakes(ours=ns_per_token)
    workers[_engines.OURS].switches = iter(switches)
    results = compare(workers, demo_path, n_gen=0, **options)
    row = results.row(_engines.OURS, "pp8")
    assert (len(row.samples_ns), row.n_dropped, row.n_degraded) == (3, dropped, degraded)
    assert ("3 of 3 samples taken while the machine was busy or slow" in row.note) == (degraded == 3)
    assert any("9 samples" in note for note in results.notes()) == (dropped == 3 * _runner.ATTEMPTS - 3)


def test_earlier_samples_are_repeated_if_the_machine_gets_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_machine, "stolen_ns", lambda: 0)
    worker: Any = FakeWorker("ours", 10)
    # The first two samples are calibrated at 2000 ns, which seems the best until 1000 ns shows.
    calibrator = SteadyCalibrator(2000, 2000, 2000, 2000, best_ns=1000)
    calibrator.reference_ns = 2000
    case = Case(8, 0, 0)
    measured = _runner.Runner([worker], calibrator, 3, _runner.no_progress, patience_s=60)
    measured.run([case])
    selection = measured.selection(worker, case)
    assert [sample.calibration_ns for sample in selection.kept] == [1000] * 3
    assert selection.n_dropped == 2


@pytest.mark.parametrize(
    ("prompts", "n_gen", "streams"),
    [
        *(([0], 1, []), ([-3], 1, []), ([4, 4], 1, []), ([], 0, []), ([4], -1, [])),
        *(([8], 4, [0]), ([8], 4, [-1]), ([8], 4, [2, 2]), ([8], 0, [2])),
    ],
)
def test_invalid_cases_are_rejected(prompts: list[int], n_gen: int, streams: list[int]) -> None:
    with pytest.raises(ValueError, match="streams" if streams else r"prompt|decod|measure"):
        make_cases(prompts, n_gen, streams=streams)


def test_cases_have_names_tokens_and_enough_context() -> None:
    cases = make_cases([32], 64, depth=30, streams=[1, 8], sampled=True, task=90)
    assert [(case.name, case.timed_tokens, case.context) for case in cases] == [
        ("pp32", 32, 32),
        ("tg64", 64, 94),
        ("greedy64", 64, 94),
        ("sampled64", 64, 94),
        ("copy64", 64, 89 + 64),
        ("lookup64", 64, 89 + 64 + 31),
        ("tg64x1", 64, 94),  # the context is that of each stream
        ("tg64x8", 512, 94),
        ("pp16x64", 1024, 16),
    ]
    for options in ({"sampled": True}, {"task": 90}):
        with pytest.raises(ValueError, match="no tokens to choose: n_gen=0"):
            make_cases([8], 0, **options)


def test_streams_start_with_different_tokens() -> None:
    ids = stream_ids(Case(16, 0, 0, 64), vocab_size=50_000)
    assert ids.shape == (64, 16)
    assert len(set(ids[:, 0].tolist())) == 64  # nothing to share
    assert (ids == stream_ids(Case(16, 0, 0, 64), 50_000)).all()


def test_every_engine_gets_the_same_tokens() -> None:
    ids = token_ids(100, vocab_size=50)
    assert ids.min() >= 0
    assert ids.max() < 50
    assert (token_ids(100, 50) == ids).all()
    assert (token_ids(30, 50) == ids[:30]).all()


GOOD, SLOW, SLOWER = (Sample(10, calibration_ns=ns) for ns in (100, 200, 300))


@pytest.mark.parametrize(
    ("samples", "kept", "dropped", "degraded"),
    [
        ([SLOW, GOOD, SLOW, GOOD, GOOD], [GOOD] * 3, 2, 0),
        ([SLOW, SLOWER, GOOD], [SLOW, GOOD], 1, 1),  # in their order
        # Their duration does not matter.
        *(([Sample(ns, 100), GOOD, SLOW], [Sample(ns, 100), GOOD], 1, 0) for ns in (1, 10**9)),
    ],
)
def test_the_least_degraded_samples_are_selected_and_others_counted(
    samples: list[Sample], kept: list[Sample], dropped: int, degraded: int
) -> None:
    selection = select(samples, len(kept), calibration_limit_ns=125)
    assert selection.kept == kept
    assert (selection.n_dropped, selection.n_degraded) == (dropped, degraded)


@pytest.mark.parametrize(
    ("sample", "disturbed"),
    [
        (Sample(10_000_000, 100, switches=_runner.SWITCHES_ALLOWED), False),
        (Sample(10_000_000, 100, switches=_runner.SWITCHES_ALLOWED + 1), True),
        (Sample(1_000_000_000, 100, switches=_runner.SWITCHES_ALLOWED + 20), False),
        (Sample(10_000_000, 100, stolen_ns=10_000_000), True),
        (Sample(10_000_000_000, 100, stolen_ns=10_000_000), False),
    ],
)
def test_a_sample_is_disturbed_if_another_process_takes_the_core(sample: Sample, disturbed: bool) -> None:
    assert sample.disturbed() is disturbed


def test_spread_is_median_and_range() -> None:
    assert spread([5.0, 1.0, 2.0]) == Spread(2.0, 1.0, 5.0)
    assert spread([4.0, 1.0]) == Spread(2.5, 1.0, 4.0)
    with pytest.raises(ValueError, match="no samples"):
        spread([])


def test_ratios_pair_neighbours_in_time() -> None:
    # Both slow down to a tenth together: the ratio stays 2, which a ratio of extremes would not show.
    assert ratios([200.0, 20.0, 200.0], [100.0, 10.0, 100.0]) == Spread(2.0, 2.0, 2.0)
    assert ratios([50.0, 80.0, 90.0], [100.0, 100.0]) == Spread(0.65, 0.5, 0.8)
    assert ratios([20.0, 10.0], [10.0, 20.0]) == Spread(1.25, 0.5, 2.0)


def test_the_runner_waits_for_a_degraded_machine() -> None:
    calibrator = SteadyCalibrator(5000, 4000, 1100)
    assert calibrator.settle(patience_s=60) == 1100
    calibrator = SteadyCalibrator(*[5000] * 1000)
    assert calibrator.settle(patience_s=0) == 5000


def test_the_calibrator_keeps_its_best_time() -> None:
    calibrator = _machine.Calibrator(threads=2)
    try:
        times = [calibrator.measure() for _ in range(5)]
    finally:
        calibrator.close()
    assert 0 < calibrator.reference_ns <= min(times)
    assert calibrator.reference_ns <= calibrator.limit_ns < 2 * calibrator.reference_ns
