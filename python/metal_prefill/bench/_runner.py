"""Sampling: alternates engines, calibrates the machine around each sample, and selects samples."""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from metal_prefill.bench import _machine
from metal_prefill.bench._cases import Case, in_turns
from metal_prefill.bench._engines import why_not
from metal_prefill.bench._machine import Calibrator
from metal_prefill.bench._worker import WorkerProcess


@dataclass(frozen=True)
class Spread:
    """Median and range of a quantity."""

    median: float
    low: float
    high: float

    def text(self, shown: Callable[[float], str], unit: str = "") -> str:
        """Return the median with its unit, and the range."""
        return f"{shown(self.median)}{unit} ({shown(self.low)}-{shown(self.high)})"


def spread(values: Sequence[float]) -> Spread:
    if not values:
        raise ValueError("no samples to summarize")
    return Spread(statistics.median(values), min(values), max(values))


def stddev(values: Sequence[float]) -> float:
    """Sample standard deviation (n - 1), 0 for a single value, as llama-bench reports it."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def ratios(ours: Sequence[float], peer: Sequence[float]) -> Spread:
    """Return the spread of our speed over the peer's, from samples in order; a value below 1 is a loss.

    The longer list is truncated. Engines alternate, so the i-th samples of both are adjacent in time, and
    their ratio does not depend on disturbances that slow both.
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
        """Whether other work ran on the engine's cores."""
        allowed = SWITCHES_ALLOWED + SWITCHES_ALLOWED_PER_SECOND * self.ns * 1e-9
        return self.switches > allowed or self.stolen_ns > STOLEN_ALLOWED * self.ns


@dataclass(frozen=True)
class Selection:
    kept: list[Sample]  # in the order in which they were taken
    n_dropped: int  # dropped samples, taken in a degraded state
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


ATTEMPTS = 4  # maximum number of samples, as a multiple of those wanted
WAIT_S = 1.0  # wait of one sample for a degraded machine to recover

Progress = Callable[[str, int, int], object]  # current activity, valid samples so far, samples wanted


def no_progress(what: str, done: int, total: int) -> None:
    """Report nothing."""


@dataclass
class Runner:
    """Runner that interleaves engines, and tests that are compared with each other.

    They alternate sample by sample, so that disturbances affect all equally; the order rotates, so that none
    always runs after the same neighbour. Samples from a degraded machine are repeated,
    up to `ATTEMPTS` times as many as are wanted.
    """

    workers: Sequence[WorkerProcess]
    calibrator: Calibrator
    repetitions: int  # samples wanted of each test of each engine
    progress: Progress
    patience_s: float  # seconds left for a degraded machine: waits, and samples that are not valid
    # All samples, in order.
    samples: dict[tuple[str, Case], list[Sample]] = field(default_factory=lambda: defaultdict(list))

    def run(self, cases: Sequence[Case]) -> None:
        """Take the samples of all tests.

        The machine may reach its best state late. At the end, samples are therefore judged by it once more,
        and a second pass over the tests repeats the degraded ones.
        """
        groups = in_turns(cases)
        for group in groups:
            for case, worker in self._of(group):
                self._report(f"{case.name}: warming up {worker.name}", group)
                worker.sample(case)
            self._collect(group)
        for group in groups:
            self._collect(group)

    def selection(self, worker: WorkerProcess, case: Case) -> Selection:
        return select(self.samples[worker.name, case], self.repetitions, self.calibrator.limit_ns)

    def _of(self, group: Sequence[Case]) -> list[tuple[Case, WorkerProcess]]:
        return [(case, worker) for case in group for worker in self.workers if not why_not(worker.name, case)]

    def _clean(self, worker: WorkerProcess, case: Case) -> int:
        limit = self.calibrator.limit_ns
        return sum(is_clean(sample, limit) for sample in self.samples[worker.name, case])

    def _collect(self, group: Sequence[Case]) -> None:
        turn = 0
        while lacking := [pair for pair in self._of(group) if self._wants(*pair)]:
            # Pairs with enough samples are skipped; the order of the others rotates.
            shift = turn % len(lacking)
            for case, worker in lacking[shift:] + lacking[:shift]:
                self._report(f"{case.name}: {worker.name}", group)
                self.samples[worker.name, case].append(self._sample(worker, case))
            turn += 1

    def _wants(self, case: Case, worker: WorkerProcess) -> bool:
        taken = len(self.samples[worker.name, case])
        if taken < self.repetitions:
            return True
        may_repeat = self.patience_s > 0 and taken < ATTEMPTS * self.repetitions
        return may_repeat and self._clean(worker, case) < self.repetitions

    def _sample(self, worker: WorkerProcess, case: Case) -> Sample:
        begin = time.monotonic()
        before = self.calibrator.settle(min(WAIT_S, self.patience_s))
        lost = time.monotonic() - begin
        stolen = _machine.stolen_ns()
        elapsed, switches = worker.sample(case)
        stolen = _machine.stolen_ns() - stolen
        sample = Sample(elapsed, max(before, self.calibrator.measure()), switches, stolen)
        if not is_clean(sample, self.calibrator.limit_ns):
            lost += elapsed * 1e-9
        self.patience_s = max(0.0, self.patience_s - lost)
        return sample

    def _report(self, what: str, group: Sequence[Case]) -> None:
        counts = [min(self._clean(worker, case), self.repetitions) for case, worker in self._of(group)]
        self.progress(what, sum(counts), self.repetitions * len(counts))
