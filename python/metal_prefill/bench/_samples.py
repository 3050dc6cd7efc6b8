"""Samples: one timed run of one test on one engine, the state of the machine around it, and statistics."""

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


def ratios(
    # Speeds in tokens per second. The longer list is cut to the length of the shorter.
    ours: Sequence[float],
    peer: Sequence[float],
) -> Spread:
    """Spread of our speed over the peer's, from samples in the order in which they were taken.

    The engines take turns, so the i-th sample of one is next to the i-th of the other in time: the ratio of
    such a pair is free of what slows both. A value below 1 is a loss.
    """
    return spread([a / b for a, b in zip(ours, peer, strict=False)])


# Involuntary context switches that occur on an idle machine, because kernel threads need a core.
SWITCHES_ALLOWED = 2
SWITCHES_ALLOWED_PER_SECOND = 20.0
STOLEN_ALLOWED = 0.02  # share of a sample's time


@dataclass(frozen=True)
class Sample:
    """One timed run of a test."""

    ns: int  # duration
    calibration_ns: int = 0  # the slower of the calibrations before and after it
    switches: int = 0  # involuntary context switches of the engine's threads during it
    stolen_ns: int = 0  # time that the hypervisor withheld during it

    def disturbed(self) -> bool:
        """Whether something else ran on the engine's cores."""
        allowed = SWITCHES_ALLOWED + SWITCHES_ALLOWED_PER_SECOND * self.ns * 1e-9
        return self.switches > allowed or self.stolen_ns > STOLEN_ALLOWED * self.ns


@dataclass(frozen=True)
class Selection:
    """Selected samples."""

    kept: list[Sample]  # in the order in which they were taken
    n_dropped: int  # samples taken in a degraded state and left out
    # Samples among `kept` that were taken in a degraded state, because there were not enough good ones.
    n_degraded: int


def is_clean(sample: Sample, calibration_limit_ns: float) -> bool:
    """Whether the sample was taken on an undisturbed machine."""
    return sample.calibration_ns <= calibration_limit_ns and not sample.disturbed()


def select(samples: Sequence[Sample], wanted: int, calibration_limit_ns: float) -> Selection:
    """Choose the samples that count: the first clean ones, filled up with the least degraded.

    The duration of the timed run is not considered, so that the choice cannot favour an engine.
    """
    clean = [i for i, sample in enumerate(samples) if is_clean(sample, calibration_limit_ns)][:wanted]
    degraded = [i for i, sample in enumerate(samples) if not is_clean(sample, calibration_limit_ns)]
    degraded.sort(key=lambda i: (samples[i].disturbed(), samples[i].calibration_ns))
    filled = degraded[: wanted - len(clean)]
    kept = [samples[i] for i in sorted(clean + filled)]
    return Selection(kept, len(degraded) - len(filled), len(filled))
