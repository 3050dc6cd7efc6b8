"""Instructions and bytes of a dispatch, and the cost of loops and of dequantizing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from metal_prefill.gpu._trace import Dispatch

SIMD = 32
HALF, FLOAT = 2, 4
BLOCK = 64  # values of an 8x8 block


@dataclass(frozen=True)
class Ops:
    """Instructions of one simdgroup, by kind; see :class:`metal_prefill.gpu._cost_model.chips.Cycles`."""

    alu: float = 0
    slow: float = 0
    shuffle: float = 0
    mma: float = 0
    memory: float = 0
    matrix_unit: float = 0

    def __add__(self, other: Ops) -> Ops:
        return Ops(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))

    def __mul__(self, factor: float) -> Ops:
        return Ops(*(a * factor for a in vars(self).values()))


LOOP = Ops(alu=8, slow=2)  # addresses, the comparison and the branch of a loop


@dataclass(frozen=True)
class Work:
    groups: int
    simdgroups: int  # of a group
    ops: Ops  # of a simdgroup
    trips: float  # times that a simdgroup waits for memory, one after another
    dram_bytes: float  # each once: weights, and data that is not in the last cache
    cached_bytes: float  # each once: activations
    fetched_bytes: float  # read and written by threadgroups, counted for each
    core_bytes: float  # to and from the first cache and threadgroup memory
    threadgroup_bytes: int = 0  # of a group
    local_trips: float = 0  # times that a simdgroup waits for threadgroup memory
    covered: bool = False  # its products run while it waits for memory
    ahead: bool = False  # all of its instructions run while it waits
    longest: float = 1.0  # work of the longest simdgroup, in multiples of the average


def dispatch_work(
    d: Dispatch,
    ops: Ops,
    trips: float,
    *,
    dram: float = 0,
    cached: float,
    fetched: float | None = None,
    core: float | None = None,
    **others: Any,
) -> Work:
    """Return the work of a dispatch; by default bytes are fetched once, and fetched bytes moved once."""
    once = dram + cached if fetched is None else fetched
    moved = once if core is None else core
    return Work(d.groups, d.threads // SIMD, ops, trips, dram, cached, once, moved, **others)


# By tensor type, for an item of 8 values: bytes that a thread loads, and instructions to dequantize it.
_ITEMS: dict[str, tuple[float, Ops]] = {
    "q4_0": (6, Ops(alu=19, slow=2, memory=3)),  # nibbles become halves without conversions
    "q4_1": (8, Ops(alu=25, slow=2, memory=4)),
    "q5_0": (10, Ops(alu=36, slow=25, memory=5)),
    "q5_1": (12, Ops(alu=29, slow=25, memory=6)),
    "q8_0": (10, Ops(alu=9, slow=12, memory=5)),  # pairs of bytes: blocks begin at even addresses
    "q4_k": (14.5, Ops(alu=40, slow=12, memory=8)),
    "q5_k": (22.5, Ops(alu=50, slow=42, memory=12)),
    "q6_k": (19, Ops(alu=50, slow=38, memory=10)),
    "f32": (32, Ops(memory=2)),
    "f16": (16, Ops(memory=2)),
    "bf16": (16, Ops(slow=8, memory=2)),
}


class UnknownKernelError(ValueError):
    """The cost model has no counts for the tensor type of a product."""


def item_of(kernel: str) -> tuple[float, Ops]:
    """Return the bytes of an item of 8 values, and the instructions that dequantize it."""
    kinds = [kind for kind in _ITEMS if f"_{kind}" in kernel]
    if not kinds:
        raise UnknownKernelError(
            f"the cost model has no counts for the tensor type of {kernel}; it has those of "
            f"{', '.join(_ITEMS)}"
        )
    return _ITEMS[max(kinds, key=len)]
