"""Statistics of samples."""

from __future__ import annotations

import pytest

from metal_prefill.bench import _summary
from metal_prefill.bench._summary import Spread


def test_spread_is_median_and_range() -> None:
    assert _summary.spread([5.0, 1.0, 2.0]) == Spread(2.0, 1.0, 5.0)
    assert _summary.spread([4.0, 1.0]) == Spread(2.5, 1.0, 4.0)
    with pytest.raises(ValueError, match="no samples"):
        _summary.spread([])


def test_standard_deviation_is_that_of_a_sample() -> None:
    assert _summary.stddev([2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0]) == pytest.approx((32 / 7) ** 0.5)
    assert _summary.stddev([3.0]) == 0.0


def test_ratios_pair_neighbours_in_time() -> None:
    # Both slow down to a tenth together: the ratio stays 2, which a ratio of extremes would not show.
    assert _summary.ratios([200.0, 20.0, 200.0], [100.0, 10.0, 100.0]) == Spread(2.0, 2.0, 2.0)
    assert _summary.ratios([50.0, 80.0, 90.0], [100.0, 100.0]) == Spread(0.65, 0.5, 0.8)
    assert _summary.ratios([20.0, 10.0], [10.0, 20.0]) == Spread(1.25, 0.5, 2.0)
