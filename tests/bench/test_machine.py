"""The state of the machine, measured by a computation of known duration."""

from support.bench_fakes import SteadyCalibrator

from metal_prefill.bench import _machine


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
    assert calibrator.is_degraded(2 * calibrator.reference_ns)
    assert not calibrator.is_degraded(calibrator.reference_ns)
