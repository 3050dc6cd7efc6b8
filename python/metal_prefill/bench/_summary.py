"""Statistics of samples."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """Median and range of a quantity."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """Summarize values."""
    if not values:
        raise ValueError("no samples to summarize")
    return Spread(statistics.median(values), min(values), max(values))


def stddev(values: Sequence[float]) -> float:
    """Sample standard deviation (n - 1), 0 for a single value, as llama-bench reports it."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def ratios(ours: Sequence[float], peer: Sequence[float]) -> Spread:
    """Spread of our speed over the peer's, from samples in the order in which they were taken.

    The engines take turns, so the i-th sample of one is next to the i-th of the other in time: the ratio of
    such a pair is free of what slows both. A value below 1 is a loss.

    Parameters
    ----------
    ours, peer
        Speeds in tokens per second. The longer list is cut to the length of the shorter.
    """
    return spread([a / b for a, b in zip(ours, peer, strict=False)])
