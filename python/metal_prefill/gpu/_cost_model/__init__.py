"""How long a prompt should take on a GPU that is not available: a prediction, never a measurement.

For each dispatch of the engine::

    time = overhead + max(memory, cache, core, issue, latency)

memory
    Bytes that come from or go to DRAM over its bandwidth.
cache
    Bytes that all threadgroups fetch, over the bandwidth of the cache that the cores share; those of them
    that do not fit there, over the bandwidth of the last cache.
core
    Bytes that the simdgroups move to and from the first-level cache and threadgroup memory of a core, over
    its bandwidth.
issue
    Instructions, each with the cycles it takes a scheduler, on the core that has the most threadgroups.
latency
    The time of the longest simdgroup alone, including the latency of each memory access that waits for the
    previous one, times the number of threadgroups that run one after another on a core. It limits dispatches
    with little work.

A program that waits for a pass waits `Chip.wait_us` longer than the GPU computes.

The constants are in `chips.py`. Errors on published speeds and on an H200 give the range of a prediction
(`SPREAD`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil

from metal_prefill.gpu._cost_model.chips import CHIPS, Chip, find_chip
from metal_prefill.gpu._cost_model.operations import Ops, UnknownKernelError, Work
from metal_prefill.gpu._cost_model.shapes import Shape, plan, shape_of
from metal_prefill.gpu._cost_model.work import find_work, work_of
from metal_prefill.gpu._dispatches import Dispatch

__all__ = [
    "CHIPS",
    "SPREAD",
    "Chip",
    "Ops",
    "Prediction",
    "Shape",
    "Time",
    "UnknownKernelError",
    "Work",
    "find_chip",
    "find_work",
    "plan",
    "predict",
    "shape_of",
    "time_of",
    "work_of",
]

SCHEDULERS = 4  # of a core
SIMD = 32

# Lowest and highest ratio of measured to predicted speed, for prompts and for passes of a few tokens, as
# docs/measurements/cost-model.md records them: the lowest on an H200, the highest of published speeds.
SPREAD = {"prompt": (0.79, 1.16), "token": (0.79, 1.05)}


@dataclass(frozen=True)
class Time:
    """Predicted microseconds of a dispatch: each bound, and the overhead."""

    bounds: dict[str, float]
    overhead: float

    @property
    def bound(self) -> str:
        """Name of the largest bound."""
        return max(self.bounds, key=lambda name: self.bounds[name])

    @property
    def total(self) -> float:
        """Overhead and the largest bound."""
        return self.overhead + max(self.bounds.values())


def time_of(chip: Chip, work: Work) -> Time:
    """Predict one dispatch."""
    c, ops = chip.cycles, work.ops
    products = ops.mma * c.mma + (ops.matrix_unit * c.matrix_unit if ops.matrix_unit else 0)
    other = ops.alu * c.alu + ops.slow * c.slow_issue + ops.shuffle * c.shuffle + ops.memory * c.memory
    slow = ops.slow * c.slow
    groups_of_core = ceil(work.groups / chip.cores)
    # The longest simdgroup determines the time if a core has few of them.
    busiest = max(groups_of_core * work.simdgroups / SCHEDULERS, work.longest)
    issue = busiest * max(products + other, slow)

    resident = min(
        chip.groups,
        chip.threads // (SIMD * work.simdgroups),
        chip.threadgroup_bytes // work.threadgroup_bytes if work.threadgroup_bytes else groups_of_core,
    )
    waves = ceil(groups_of_core / max(resident, 1))
    # Each step of a matmul needs weights from memory, in addition to its other reads.
    from_memory = work.covered or work.dram_bytes > work.cached_bytes
    waiting = work.trips * (chip.dram_ns if from_memory else chip.slc_ns) * chip.ghz
    alone = max(other * c.alone, slow) + work.local_trips * chip.local_cycles
    path = waiting + products + alone
    if work.covered:
        path = max(waiting, products) + alone
    if work.ahead:
        path = max(waiting, products + alone)
    latency = waves * path * (work.longest if waves == 1 else 1)

    fits = work.cached_bytes <= chip.slc_bytes
    dram_bytes = work.dram_bytes + (0 if fits else work.cached_bytes)
    last = (work.dram_bytes + work.cached_bytes) / chip.slc_gbs
    nanoseconds = {
        "memory": dram_bytes / (chip.dram_gbs * chip.dram_efficiency),
        "cache": max(work.fetched_bytes / chip.l2_gbs, last),
        "core": work.core_bytes / (chip.core_bytes * chip.cores * chip.ghz),
        "issue": issue / chip.ghz,
        "latency": latency / chip.ghz,
    }
    return Time({name: time / 1e3 for name, time in nanoseconds.items()}, chip.dispatch_us)


@dataclass(frozen=True)
class Prediction:
    """Predicted times of a sequence of dispatches.

    Attributes
    ----------
    tokens
        That the dispatches process.
    waits
        How often the program waits for the GPU.
    """

    chip: Chip
    tokens: int
    dispatches: Sequence[Dispatch]
    times: Sequence[Time]
    waits: int = 0

    @property
    def seconds(self) -> float:
        """All dispatches, one after the other, and the waits."""
        return (sum(time.total for time in self.times) + self.waits * self.chip.wait_us) / 1e6

    @property
    def tokens_per_second(self) -> float:
        """Tokens over time."""
        return self.tokens / self.seconds

    @property
    def tokens_per_second_range(self) -> tuple[float, float]:
        """Lowest and highest tokens over time.

        The ends combine the range of the time between dispatches with the errors on published speeds.
        """
        fast, slow = (
            self.seconds + len(self.times) * (us - self.chip.dispatch_us) / 1e6
            for us in self.chip.dispatch_us_range
        )
        prompt = any(d.kernel.startswith("matmul") for d in self.dispatches)
        low, high = SPREAD["prompt" if prompt else "token"]
        return self.tokens / slow * low, self.tokens / fast * high

    def by_kernel(self) -> list[KernelTime]:
        """Return sums over the dispatches of each kernel, the longest first."""
        times: dict[str, list[Time]] = {}
        for d, time in zip(self.dispatches, self.times, strict=True):
            times.setdefault(d.kernel, []).append(time)
        rows = []
        for kernel, of_kernel in times.items():
            bounds: dict[str, float] = {}
            for time in of_kernel:
                bounds[time.bound] = bounds.get(time.bound, 0) + time.total
            overhead, bound = sum(t.overhead for t in of_kernel), max(bounds, key=lambda name: bounds[name])
            rows.append(KernelTime(kernel, len(of_kernel), sum(bounds.values()), overhead, bound))
        return sorted(rows, key=lambda row: -row.microseconds)


@dataclass(frozen=True)
class KernelTime:
    """The time of all dispatches of a kernel; `bound` names the limit of most of that time."""

    kernel: str
    dispatches: int
    microseconds: float
    overhead: float
    bound: str


def predict(chip: Chip, dispatches: Iterable[Dispatch], tokens: int, *, waits: int = 0) -> Prediction:
    """Predict the time of dispatches that run one after another.

    Parameters
    ----------
    chip
        One of `CHIPS`.
    dispatches
        Of :func:`plan`, or of an engine.
    tokens
        Tokens that they process, for the tokens per second.
    waits
        How often the program waits for the GPU: once for a prompt, and not at all for tokens of
        :meth:`metal_prefill.Model.generate`, whose passes run ahead.

    Raises
    ------
    UnknownKernelError
        A kernel or its tensor type is not known.
    """
    listed = list(dispatches)
    known: dict[str, Time] = {}  # layers repeat each other
    times = []
    for d in listed:
        key = f"{d.kernel} {d.grid} {d.threads} {d.args} {d.runs}"
        if key not in known:
            known[key] = time_of(chip, work_of(d))
        times.append(known[key])
    return Prediction(chip, tokens, listed, times, waits)
