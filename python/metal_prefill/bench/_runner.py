"""Sampling: engines alternate, and the machine is calibrated before and after each sample."""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from metal_prefill.bench import _machine
from metal_prefill.bench._cases import Case, in_turns
from metal_prefill.bench._client import Worker
from metal_prefill.bench._engines import why_not
from metal_prefill.bench._machine import Calibrator
from metal_prefill.bench._samples import Sample, Selection, is_clean, select

ATTEMPTS = 4  # samples taken at most, as a multiple of those wanted
WAIT_S = 1.0  # how long one sample waits for a degraded machine to recover
PATIENCE_S = 60.0  # extra time for a degraded machine, in all

Progress = Callable[[str, int, int], object]  # what is done now, samples that count so far, samples wanted


@dataclass
class Runner:
    """Runner that interleaves engines, and tests that are compared with each other.

    They alternate sample by sample, so that disturbances affect all equally; the order rotates, so that none
    always runs after the same neighbour. Samples from a degraded machine are repeated,
    up to `ATTEMPTS` times as many as are wanted.
    """

    workers: Sequence[Worker]
    calibrator: Calibrator
    repetitions: int  # samples wanted of each test of each engine
    progress: Progress | None = None
    # Seconds left to lose to a degraded machine, by waiting for it and by samples that do not count.
    patience_s: float = PATIENCE_S
    # All that were taken, in order.
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

    def selection(self, worker: Worker, case: Case) -> Selection:
        """Return the selected samples."""
        return select(self.samples[worker.name, case], self.repetitions, self._limit())

    def _of(self, group: Sequence[Case]) -> list[tuple[Case, Worker]]:
        return [(case, worker) for case in group for worker in self.workers if not why_not(worker.name, case)]

    def _limit(self) -> float:
        return _machine.TOLERANCE * self.calibrator.reference_ns

    def _clean(self, worker: Worker, case: Case) -> int:
        limit = self._limit()
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

    def _wants(self, case: Case, worker: Worker) -> bool:
        taken = len(self.samples[worker.name, case])
        if taken < self.repetitions:
            return True
        may_repeat = self.patience_s > 0 and taken < ATTEMPTS * self.repetitions
        return may_repeat and self._clean(worker, case) < self.repetitions

    def _sample(self, worker: Worker, case: Case) -> Sample:
        begin = time.monotonic()
        before = self.calibrator.settle(min(WAIT_S, self.patience_s))
        lost = time.monotonic() - begin
        stolen = _machine.stolen_ns()
        elapsed, switches = worker.sample(case)
        stolen = _machine.stolen_ns() - stolen
        sample = Sample(elapsed, max(before, self.calibrator.measure()), switches, stolen)
        if not is_clean(sample, self._limit()):
            lost += elapsed * 1e-9
        self.patience_s = max(0.0, self.patience_s - lost)
        return sample

    def _report(self, what: str, group: Sequence[Case]) -> None:
        if self.progress is not None:
            counts = [min(self._clean(worker, case), self.repetitions) for case, worker in self._of(group)]
            self.progress(what, sum(counts), self.repetitions * len(counts))
