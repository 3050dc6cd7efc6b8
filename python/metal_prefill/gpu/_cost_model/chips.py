"""The constants of the cost model, each with its source.

[MB] github.com/philipturner/metal-benchmarks: clocks, cores, caches and cycles of Apple 7 and 8, measured.
[CC] Chips and Cheese, "A Brief Look at Apple's M2 Pro iGPU": latencies, measured.
[HPC] "Apple vs. Oranges", arXiv:2502.05317: STREAM on M1 to M4, measured; up to 100 of the M4's 120 GB/s.
[APPLE] Apple's technical specifications: cores, memory bandwidth.
[CLK] hmc-tech.com: clock of the M3; Apple publishes none.
[ECL] "M4 Pro full on", eclecticlight.co: clock under load; M4 and M4 Max are assumed to have it.
[M5] "Apple M5 GPU Roofline Analysis", michaelstinkerings.org: clock under load, and 122 of 153.6 GB/s.
[NA] tzakharko.github.io/apple-neural-accelerators-benchmark: 1,024 FLOP a core and cycle on the matrix units
of an A19, which are 128 FMA for each of four schedulers. That a unit keeps its scheduler busy is assumed.
[PLAN] 1.27 microseconds a dispatch, measured by others on an M4; another probe is quoted as 2.05.
[JL] Metal.jl issue 783: about 0.15 ms from committing a command buffer to waking up after it.
[EST] An estimate: no measurement for Apple's GPUs was found. An NVIDIA H200's is 32 cycles.
[FIT] Fitted to published speeds: see docs/cost_model.md.
"""

from dataclasses import dataclass, replace
from math import inf


@dataclass(frozen=True)
class Cycles:
    """Cycles that an instruction of a simdgroup (32 lanes) takes; a core has four schedulers.

    The defaults apply to Apple 7 and 8, from [MB] "Instruction Throughputs".
    """

    alu: float = 1  # FMA, add, multiply, compare, bitwise
    # Conversion, shift, bit field, integer multiplication, exponential: a separate pipeline of each
    # scheduler. A reciprocal counts as 1.5, a reciprocal root as 2.
    slow: float = 4
    slow_issue: float = 2  # EXP2 + 2 FMUL 4.08, EXP2 + 3 FMUL 5.20 cycles, which is max(4, 2 + n)
    shuffle: float = 2
    mma: float = 512 / (101.7 / 4)  # a product of 8x8 blocks: "Matrix FFMA32: 101.7 per core and cycle"
    memory: float = 1  # issue of a load or store
    alone: float = 2.75  # between instructions of one simdgroup by itself: "FFMA, ILP 4, 4 simds/core"
    matrix_unit: float = inf  # a product of 8x8 blocks there; infinite if kernels cannot use one


# [FIT] to llama.cpp's prefill on an M4; products of blocks are faster than in earlier families.
APPLE9_CYCLES = Cycles(mma=Cycles.mma * 0.84)


@dataclass(frozen=True)
class Chip:
    """A GPU. Bandwidths are in 1e9 bytes a second."""

    name: str
    family: int  # of Apple's GPUs, which decides the engine's tuning
    cores: int
    ghz: float
    dram_gbs: float  # by the data sheet
    slc_bytes: float  # the last cache before memory
    slc_gbs: float
    l2_gbs: float  # the cache that all cores share
    dram_efficiency: float = 100 / 120  # share that a stream reaches: [HPC], the M4's
    core_bytes: float = 64  # a cycle, first cache and threadgroup memory: [MB] "On-Core Data BW/Cycle"
    dram_ns: float = 342  # from a load to its value: [CC]
    slc_ns: float = 234  # [CC]
    local_cycles: float = 48  # of threadgroup memory: [EST]
    dispatch_us: float = 2.05  # from one dispatch to the next that waits for it, besides the work: [PLAN]
    dispatch_us_range: tuple[float, float] = (1.27, 2.64)  # [PLAN]; [FIT] to another engine's decode on an M4
    wait_us: float = 150  # from the end of a pass to the waiting program, and from there to the next: [JL]
    threads: int = 3072  # on a core: [MB] "Max Threads"
    groups: int = 3072 // 32  # one of each simdgroup: no other limit is known
    threadgroup_bytes: int = 60 << 10  # of a core: [MB] "Shared Memory"
    cycles: Cycles = Cycles()

    @property
    def gpu(self) -> str:
        """Name reported by Metal."""
        return "Apple " + self.name.replace("-", " ").title()


def _apple(name: str, family: int, cores: int, ghz: float, dram_gbs: float, slc_mib: int) -> Chip:
    # [MB] "SLC BW/Cycle" is twice "RAM BW/Cycle"; "On-GPU Data BW/Cycle" is 32 bytes a core.
    cycles = APPLE9_CYCLES if family >= 9 else Cycles()
    caches = (slc_mib << 20, 2 * dram_gbs, 32 * cores * ghz)
    return Chip(name, family, cores, ghz, dram_gbs, *caches, cycles=cycles)


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
