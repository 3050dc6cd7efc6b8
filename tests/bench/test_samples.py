"""Which samples count, and their statistics."""

import pytest

from metal_prefill.bench import _samples
from metal_prefill.bench._samples import Sample, Spread, ratios, select, spread, stddev


def test_clean_samples_come_first_and_degraded_ones_are_counted() -> None:
    good, slow = Sample(10, calibration_ns=100), Sample(10, calibration_ns=200)
    selection = select([slow, good, slow, good, good], 3, calibration_limit_ns=125)
    assert selection.kept == [good, good, good]
    assert (selection.n_dropped, selection.n_degraded) == (2, 0)


def test_the_least_degraded_samples_follow_in_order() -> None:
    good, slow, slower = Sample(1, 100), Sample(2, 200), Sample(3, 300)
    selection = select([slow, slower, good], 2, calibration_limit_ns=125)
    assert selection.kept == [slow, good]
    assert (selection.n_dropped, selection.n_degraded) == (1, 1)


def test_samples_are_selected_regardless_of_their_duration() -> None:
    chosen = [select([Sample(ns, 100), Sample(5, 100), Sample(6, 500)], 2, 125).kept for ns in (1, 10**9)]
    assert [[sample.calibration_ns for sample in kept] for kept in chosen] == [[100, 100], [100, 100]]


@pytest.mark.parametrize(
    ("sample", "disturbed"),
    [
        (Sample(10_000_000, 100, switches=_samples.SWITCHES_ALLOWED), False),
        (Sample(10_000_000, 100, switches=_samples.SWITCHES_ALLOWED + 1), True),
        (Sample(1_000_000_000, 100, switches=_samples.SWITCHES_ALLOWED + 20), False),
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


def test_standard_deviation_is_that_of_a_sample() -> None:
    assert stddev([2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0]) == pytest.approx((32 / 7) ** 0.5)
    assert stddev([3.0]) == 0.0


def test_ratios_pair_neighbours_in_time() -> None:
    # Both slow down to a tenth together: the ratio stays 2, which a ratio of extremes would not show.
    assert ratios([200.0, 20.0, 200.0], [100.0, 10.0, 100.0]) == Spread(2.0, 2.0, 2.0)
    assert ratios([50.0, 80.0, 90.0], [100.0, 100.0]) == Spread(0.65, 0.5, 0.8)
    assert ratios([20.0, 10.0], [10.0, 20.0]) == Spread(1.25, 0.5, 2.0)
