"""Which samples count."""

from __future__ import annotations

import pytest

from metal_prefill.bench import _samples
from metal_prefill.bench._samples import Sample, select


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
