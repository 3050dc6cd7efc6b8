"""Measure the slowdown caused by another process on one of the cores.

Samples alternate: alone, then together with a process that keeps one core busy. The system gives that process
half of its core, so an engine that degrades in proportion keeps (cores - 1/2) / cores of its speed: three
quarters on two cores. An engine whose threads wait for the preempted one keeps less than half, or far less if
they spin.

The share that this machine really leaves is measured in the same way, with perfectly divisible work: loops of
products in registers, in small independent pieces, taken by as many threads. If two processors share a core,
or the scheduler is unfair, that work loses more than its share as well.

    python tools/measure/bench_contention.py [MODEL] [--prompt N] [--threads N] [--rounds N]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np

from metal_prefill import Model, _core, default_model_path

PIECE_ROUNDS = 16  # of some microseconds each: far below a time slice, far above the cost of a call


def keep_busy(core: int, wanted: Event) -> None:
    """Load one core on demand."""
    os.sched_setaffinity(0, {core})
    while True:
        wanted.wait()
        for _ in range(100_000):
            pass


class Prompts:
    """Engine that processes prompts of one length."""

    def __init__(self, model: Model, tokens: int) -> None:
        self._model = model
        self._ids = np.arange(tokens) % 100

    def measure(self, seconds: float) -> float:
        """Tokens a second over prompts that take `seconds` together."""
        start, prompts = time.perf_counter(), 0
        while (elapsed := time.perf_counter() - start) < seconds:
            self._model.reset()
            self._model.forward_prompt(self._ids)
            prompts += 1
        return prompts * len(self._ids) / elapsed


class Pieces:
    """Products in registers on independent threads that never wait for each other."""

    def __init__(self, threads: int) -> None:
        isa = _core.cpu.kernel_sets()[0]
        self._loops = [_core.cpu.peak_workload(isa, "int8", 1) for _ in range(threads)]
        self._pool = ThreadPoolExecutor(threads)

    def measure(self, seconds: float) -> float:
        """Multiply-adds a second of all threads together."""
        start = time.perf_counter()

        def work(loop: _core.cpu.Workload) -> float:
            done = 0.0
            while time.perf_counter() - start < seconds:
                loop.run(PIECE_ROUNDS)
                done += PIECE_ROUNDS * loop.multiply_adds
            return done

        done = sum(self._pool.map(work, self._loops))
        return done / (time.perf_counter() - start)


def kept(alone: list[float], contended: list[float]) -> list[float]:
    """Return the sorted speed ratios of the pairs of samples."""
    return sorted(b / a for a, b in zip(alone, contended, strict=True))


def describe(shares: list[float]) -> str:
    """Format the median and range."""
    return f"{statistics.median(shares):.2f} ({shares[0]:.2f}-{shares[-1]:.2f})"


def main() -> None:
    """Alternate samples and print both medians and their ratio."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", type=Path, default=default_model_path())
    parser.add_argument("-p", "--prompt", type=int, default=512, help="prompt length in tokens")
    parser.add_argument("-t", "--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("-r", "--rounds", type=int, default=7)
    parser.add_argument("-s", "--seconds", type=float, default=1.0, help="duration of a sample")
    args = parser.parse_args()

    cores = sorted(os.sched_getaffinity(0))
    wanted = multiprocessing.Event()
    rival = multiprocessing.Process(target=keep_busy, args=(cores[-1], wanted), daemon=True)
    rival.start()
    with Model(args.model, device="cpu", threads=args.threads) as model:
        subjects: dict[str, Callable[[float], float]] = {
            "engine": Prompts(model, args.prompt).measure,
            "pieces": Pieces(args.threads).measure,
        }
        alone: dict[str, list[float]] = {name: [] for name in subjects}
        contended: dict[str, list[float]] = {name: [] for name in subjects}
        for measure in subjects.values():
            measure(args.seconds)
        for _ in range(args.rounds):
            for name, measure in subjects.items():
                alone[name].append(measure(args.seconds))
            wanted.set()
            time.sleep(0.1)
            for name, measure in subjects.items():
                contended[name].append(measure(args.seconds))
            wanted.clear()
            time.sleep(0.1)
    rival.terminate()
    fair = (len(cores) - 0.5) / len(cores)
    engine, pieces = (kept(alone[name], contended[name]) for name in subjects)
    before, after = statistics.median(alone["engine"]), statistics.median(contended["engine"])
    print(f"alone {before:.0f} tok/s, next to another {after:.0f} tok/s")
    print(f"kept {describe(engine)}; independent pieces kept {describe(pieces)}; in proportion: {fair:.2f}")
    print(f"({args.threads} threads on {len(cores)} cores)")


if __name__ == "__main__":
    main()
