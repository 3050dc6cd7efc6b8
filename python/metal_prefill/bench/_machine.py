"""The state of the machine: its current speed compared with its best.

On a shared or virtual machine, speed varies: a hypervisor maps two virtual CPUs to one core, or another
process uses a core. Samples taken at such times do not measure an engine.
"""

import os
import platform
import resource
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from metal_prefill.storage._kernel_set import processor_facts

TOLERANCE = 1.25  # a calibration that takes this many times the best one marks a degraded machine
REFERENCE_RUNS = 40
POLL_S = 0.02
KERNEL_VALUES = 4096  # float64 values, 32 KiB: within L1
KERNEL_PASSES = 1024  # about 2 ms: short compared with a sample, long compared with the start of a thread


def available_threads() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Calibrator:
    """Times a fixed computation on all threads at once.

    The time of the slowest thread reveals a lower clock, another process on one of the cores, and virtual
    CPUs that share a core. Each thread is bound to a separate CPU if the system allows it, since a scheduler
    may put two threads that wake together on the same one.
    """

    def __init__(self, threads: int) -> None:
        self._rows = np.broadcast_to(np.ones(KERNEL_VALUES), (KERNEL_PASSES, KERNEL_VALUES))
        self._threads = [ThreadPoolExecutor(1) for _ in range(threads)]
        if hasattr(os, "sched_setaffinity"):
            cpus = sorted(os.sched_getaffinity(0))
            for i, thread in enumerate(self._threads):
                thread.submit(os.sched_setaffinity, 0, {cpus[i % len(cpus)]}).result()
        self.reference_ns = sys.maxsize
        for _ in range(REFERENCE_RUNS):
            self.measure()

    def measure(self) -> int:
        """Run the computation once; return nanoseconds. The best time so far is the reference."""
        begin = time.perf_counter_ns()
        # Division keeps a core's vector unit busy without accessing memory; NumPy releases the GIL meanwhile.
        for done in [thread.submit(np.divide.reduce, self._rows) for thread in self._threads]:
            done.result()
        elapsed = time.perf_counter_ns() - begin
        self.reference_ns = min(self.reference_ns, elapsed)
        return elapsed

    @property
    def limit_ns(self) -> float:
        """Calibrations that take longer show a machine that is clearly slower than at its best so far."""
        return TOLERANCE * self.reference_ns

    def settle(self, patience_s: float) -> int:
        """Wait until the machine reaches its full speed; return the last calibration."""
        deadline = time.monotonic() + patience_s
        while (calibration := self.measure()) > self.limit_ns and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return calibration

    def close(self) -> None:
        for thread in self._threads:
            thread.shutdown()


def stolen_ns() -> int:
    """Return the time that the hypervisor withheld from all CPUs of this machine; 0 if unknown."""
    try:
        fields = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()
    except OSError:
        return 0
    ticks = int(fields[8]) if len(fields) > 8 else 0
    return ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")


def peak_rss_bytes() -> int:
    # Not getrusage on Linux: a child inherits its parent's peak across fork and exec there.
    try:
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if platform.system() == "Darwin" else peak * 1024


def involuntary_switches() -> int:
    """Return the number of preemptions of this process's threads."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def cpu_name() -> str:
    return processor_facts().get("model name") or platform.processor() or platform.machine()
