"""The constants of the cost model, each with its source.

Sources
-------
[MB]
    Philip Turner, metal-benchmarks, README (github.com/philipturner/metal-benchmarks): clocks, cores, caches
    and cycles of instructions of Apple 7 and 8, measured.
[CC]
    Chips and Cheese, "A Brief Look at Apple's M2 Pro iGPU", 31 October 2023: latencies, measured.
[HPC]
    Hübner et al., "Apple vs. Oranges", arXiv:2502.05317: STREAM on the GPUs of M1 to M4, measured; up to 100
    of the M4's 120 GB/s.
[APPLE]
    Apple's technical specifications: cores, memory bandwidth.
[CLK]
    Clock of the M3 from the collection of specifications at hmc-tech.com. Apple publishes none.
[ECL]
    Howard Oakley, "M4 Pro full on", eclecticlight.co, 22 January 2025: clock of an M4 Pro's GPU under full
    load, by powermetrics. M4 and M4 Max are assumed to have the same: with it, the errors of all three
    against llama.cpp's figures are within two percentage points of each other.
[M5]
    "Apple M5 GPU Roofline Analysis", michaelstinkerings.org, of a MacBook Air: clock under load, and 122 of
    153.6 GB/s, measured. That an M5 reports the family Apple10 is in logs of llama.cpp, such as
    github.com/TheTom/llama-cpp-turboquant/issues/26.
[NA]
    Taras Zakharko, "Investigating the GPU Neural Accelerators on Apple A19/M5"
    (tzakharko.github.io/apple-neural-accelerators-benchmark): products of halves by the matrix units of an
    A19, measured: 1,024 FLOP a core and cycle, which are 128 FMA for each of its four schedulers. That the
    unit keeps the scheduler from issuing anything else is assumed. simdgroup_matrix does not reach it.
[PLAN]
    1.27 microseconds a dispatch, once measured on an M4 by the authors of the plan that this engine
    implements, on their own engine. Another probe, by the timestamps of the GPU, is quoted as 2.05.
[JL]
    Metal.jl issue 783: about 0.15 ms from committing a command buffer to waking up after it.
[EST]
    An estimate: no measurement for Apple's GPUs was found. An NVIDIA H200's is 32 cycles.
[FIT]
    Fitted to published speeds, which `tests/data/published_speeds.json` marks with "fit". The other speeds
    there are held out: the accuracy of the model is its error on them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf


@dataclass(frozen=True)
class Cycles:
    """Cycles that an instruction of a simdgroup (32 lanes) takes; a core has four schedulers.

    Attributes
    ----------
    alu
        FMA, add, multiply, compare, bitwise.
    slow, exp, rcp, rsqrt
        On the pipeline for complex instructions, while others run: conversion, shift, bit field and
        integer multiplication; exponential; reciprocal; reciprocal square root.
    complex_issue
        Cycles of the scheduler for one of these.
    shuffle
    mma
        A product of 8x8 blocks: 512 FMA.
    matrix_unit
        The same on a matrix unit; infinite if kernels cannot use one.
    memory
        Issue of a load or store.
    alone
        Cycles between instructions of one simdgroup that has a scheduler to itself.
    """

    alu: float
    slow: float
    exp: float
    rcp: float
    rsqrt: float
    complex_issue: float
    shuffle: float
    mma: float
    memory: float
    alone: float
    matrix_unit: float = inf


# [MB] "ALU Layout" and "Instruction Throughputs": IMAD, LSHIFT, CONVERT, EXP2 4, RECIP 6, RSQRT 8, SHUFFLE 2.
# complex_issue: from "Mixed workload performance": EXP2 + 2 FMUL 4.08, EXP2 + 3 FMUL 5.20, IMAD + 2 IADD
# 4.12, IMAD + 3 IADD 5.40 cycles, which is max(4, 2 + n).
# mma: "Matrix FFMA32: 101.7 per core and cycle", 512 / (101.7 / 4).
# alone: "FFMA, ILP 4, 4 simds/core: 2.75 cycles".
APPLE_CYCLES = Cycles(
    alu=1,
    slow=4,
    exp=4,
    rcp=6,
    rsqrt=8,
    complex_issue=2,
    shuffle=2,
    mma=512 / (101.7 / 4),
    memory=1,
    alone=2.75,
)

# mma: [FIT] to llama.cpp's prefill on an M4; products of blocks are faster than in earlier families.
APPLE9_CYCLES = replace(APPLE_CYCLES, mma=APPLE_CYCLES.mma * 0.84)


@dataclass(frozen=True)
class Chip:
    """A GPU.

    Attributes
    ----------
    family
        Apple GPU family, which decides the engine's tuning.
    cores
    ghz
    dram_gbs
        Memory bandwidth by the data sheet, 1e9 bytes a second.
    dram_efficiency
        The share of it that a stream reaches.
    slc_bytes
        Last cache before memory.
    slc_gbs, l2_gbs
        Bandwidth of that cache, and of the one that all cores share before it.
    core_bytes
        Bytes per cycle from the first-level cache and threadgroup memory of a core.
    dram_ns, slc_ns
        From a load to its value.
    local_cycles
        From a load of threadgroup memory to its value.
    dispatch_us, dispatch_us_range
        From one dispatch to the next that waits for it, in addition to the work; and between which values it
        may be.
    wait_us
        From the end of a pass to the program that waits for it, and from the program to its start.
    threads, groups, threadgroup_bytes
        Most threads and threadgroups resident on a core, and its threadgroup memory.
    """

    name: str
    family: int
    cores: int
    ghz: float
    dram_gbs: float
    slc_bytes: float
    slc_gbs: float
    l2_gbs: float
    dram_efficiency: float = 100 / 120  # [HPC], the M4's
    core_bytes: float = 64  # [MB] "On-Core Data BW/Cycle"
    dram_ns: float = 342  # [CC]
    slc_ns: float = 234  # [CC]
    local_cycles: float = 48  # [EST]
    dispatch_us: float = 2.05  # [PLAN]
    dispatch_us_range: tuple[float, float] = (1.27, 2.64)  # [PLAN]; [FIT] to another engine's decode on an M4
    wait_us: float = 150  # [JL]
    threads: int = 3072  # [MB] "Max Threads"
    groups: int = 3072 // 32  # one of each simdgroup: no other limit is known
    threadgroup_bytes: int = 60 << 10  # [MB] "Shared Memory"
    cycles: Cycles = APPLE_CYCLES

    @property
    def gpu(self) -> str:
        """Name reported by Metal."""
        return "Apple " + self.name.replace("-", " ").title()


def _apple(name: str, family: int, cores: int, ghz: float, dram_gbs: float, slc_mib: int) -> Chip:
    # [MB] "SLC BW/Cycle" is twice "RAM BW/Cycle"; "On-GPU Data BW/Cycle" is 32 bytes a core.
    return Chip(
        name,
        family,
        cores,
        ghz,
        dram_gbs,
        slc_mib << 20,
        slc_gbs=2 * dram_gbs,
        l2_gbs=32 * cores * ghz,
        cycles=APPLE9_CYCLES if family >= 9 else APPLE_CYCLES,
    )


CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        # Clock and cores of M1 and M2: [MB]; bandwidth: [APPLE]; clock of M3 [CLK], of M4 [ECL]; SLC of M1
        # and M2 [MB], for the others assumed to be that of their predecessors.
        _apple("m1", 7, 8, 1.278, 68.3, 8),
        _apple("m1-pro", 7, 16, 1.296, 204.8, 24),
        _apple("m1-max", 7, 32, 1.296, 409.6, 48),
        _apple("m2", 8, 10, 1.398, 102.4, 8),
        _apple("m2-pro", 8, 19, 1.398, 204.8, 24),
        _apple("m2-max", 8, 38, 1.398, 409.6, 48),
        _apple("m3", 9, 10, 1.398, 102.4, 8),
        _apple("m3-max", 9, 40, 1.398, 409.6, 48),
        _apple("m4", 9, 10, 1.578, 120.0, 8),
        _apple("m4-pro", 9, 20, 1.578, 273.0, 24),
        _apple("m4-max", 9, 40, 1.578, 546.0, 48),
        # [M5]; cores [APPLE]; matrix units [NA]; the rest is assumed to be as in the M4
        replace(
            _apple("m5", 10, 10, 1.578, 153.6, 8),
            dram_efficiency=122 / 153.6,
            cycles=replace(APPLE9_CYCLES, matrix_unit=512 / 128),
        ),
    )
}


def find_chip(name: str) -> Chip:
    """Return a chip by name.

    Raises
    ------
    ValueError
        If it is not known.
    """
    chip = CHIPS.get(name.lower())
    if chip is None:
        raise ValueError(f"unknown chip {name!r}; known are {', '.join(CHIPS)}")
    return chip
