"""How long a prompt should take on a GPU that is not available: a prediction, never a measurement.

`docs/cost_model.md` describes the bounds of a dispatch, `chips.py` has the constants and their sources.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple

from metal_prefill.gpu._cost_model import attention, products
from metal_prefill.gpu._cost_model.chips import CHIPS, Chip
from metal_prefill.gpu._cost_model.operations import (
    FLOAT,
    LOOP,
    SIMD,
    Ops,
    UnknownKernelError,
    Work,
    dispatch_work,
)
from metal_prefill.gpu._cost_model.shapes import Shape, plan, shape_of
from metal_prefill.gpu._trace import Dispatch

__all__ = [
    "CHIPS", "SPREAD", "Chip", "Ops", "Prediction", "Shape", "Time", "UnknownKernelError", "Work",
    "plan", "predict", "predict_run", "shape_of", "time_of", "work_of",
]  # fmt: skip

SCHEDULERS = 4  # per core

# By the prefix of a kernel's name: products and attention, which take nearly all of the time. Instructions
# are counted from the source of the shaders; the code that Apple's compiler generates has not been seen.
COUNTED: dict[str, Callable[[Dispatch], Work]] = {
    "matvec_experts": products.experts,
    "matmul_experts": products.experts,
    "matvec": products.matvec,
    "rmsnorm_matvec": products.matvec,
    "multi_token_matvec": products.matvec,
    "matmul": products.matmul,
    "rope_attention_decode": attention.attention_decode,
    "attention_decode": attention.attention_decode,
    "attention_prefill": attention.attention_prefill,
    "attention_tensor": attention.attention_tensor,
}

# Lowest and highest ratio of measured to predicted speed, for prompts and for passes of a few tokens, as
# docs/cost_model.md records them: the lowest on an H200, the highest of published speeds.
SPREAD = {"prompt": (0.79, 1.16), "token": (0.79, 1.05)}


def work_of(d: Dispatch) -> Work:
    """Return the work of a dispatch; raises UnknownKernelError for products of a type without counts."""
    for stem, count in COUNTED.items():
        if d.kernel.startswith(stem):
            return count(d)
    # A thread reads and writes a value, four of a norm, or a share of a head.
    values = 4 if "norm" in d.kernel else d.args["key_dim"] / SIMD if "rope" in d.kernel else 1
    in_order = 0  # tokens of recurrences, and parts that attention_combine joins
    if d.kernel.startswith(("scan", "gated_delta")):
        in_order = max(n for _, n in d.runs)
    elif d.kernel.startswith("attention_combine"):
        in_order = d.args["splits"]
    ops = (Ops(alu=12, slow=1, memory=3) + LOOP) * max(in_order, 1) + Ops(alu=20, slow=3.5, shuffle=10)
    return dispatch_work(d, ops, 2 + in_order, cached=2 * values * FLOAT * d.groups * d.threads)


@dataclass(frozen=True)
class Time:
    """Predicted microseconds of a dispatch: each bound, and the overhead."""

    bounds: dict[str, float]
    overhead: float

    @property
    def bound(self) -> str:
        return max(self.bounds, key=lambda name: self.bounds[name])

    @property
    def total(self) -> float:
        return self.overhead + max(self.bounds.values())


def time_of(chip: Chip, work: Work) -> Time:
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
    """Predicted times of dispatches that process `tokens`, and of `waits` of the program for the GPU."""

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
        return self.tokens / self.seconds

    @property
    def tokens_per_second_range(self) -> tuple[float, float]:
        """Lowest and highest tokens over time, by the range of the time between dispatches and `SPREAD`."""
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
        for kernel, found in times.items():
            longest = max(found, key=lambda time: time.total)
            rows.append(KernelTime(kernel, len(found), sum(time.total for time in found), longest.bound))
        return sorted(rows, key=lambda row: -row.microseconds)


class KernelTime(NamedTuple):
    """Time of all dispatches of a kernel, overhead included; `bound` limits the longest."""

    kernel: str
    dispatches: int
    microseconds: float
    bound: str


def predict(chip: Chip, dispatches: Iterable[Dispatch], tokens: int, *, waits: int = 0) -> Prediction:
    """Predict the time of dispatches, of :func:`plan` or an engine, that process `tokens` one after another.

    `waits` is the number of waits for the GPU: one for a prompt, and none for tokens of
    :meth:`metal_prefill.Model.generate`, whose passes run ahead. Raises UnknownKernelError if a tensor type
    of a product has no counts.
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


def predict_run(
    chip: Chip, shape: Shape, prompt: int, decodes: int, *, waits: int = 0, **options: Any
) -> list[tuple[str, Prediction]]:
    """Predict a prompt that a program waits for and tokens after it, each with its name in benchmarks.

    `waits` is the number of waits for the GPU during the tokens; `options` are passed to :func:`plan`.
    """
    options = {"family": chip.family, "gpu": chip.gpu, **options}
    found = []
    if prompt:
        found.append((f"pp{prompt}", predict(chip, plan(shape, prompt, **options), prompt, waits=1)))
    if decodes:
        steps = [d for i in range(decodes) for d in plan(shape, 1, position=prompt + i, **options)]
        found.append((f"tg{decodes}", predict(chip, steps, decodes, waits=waits)))
    return found
