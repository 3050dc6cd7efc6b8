"""How much speed another process on one of the cores costs.

Samples of a prompt alternate: alone, then beside a process that keeps one core busy. The system gives that
process half of its core, so an engine that degrades in proportion keeps (cores - 1/2) / cores of its speed:
three quarters on two cores. One whose threads wait for the one that is off its core keeps less than half, or
far less where they spin.

    python tools/bench_contention.py [MODEL] [--prompt N] [--threads N] [--rounds N]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np

from metal_prefill import Model, default_model_path


def keep_busy(core: int, wanted: Event) -> None:
    """Run on one core whenever asked to."""
    os.sched_setaffinity(0, {core})
    while True:
        wanted.wait()
        for _ in range(100_000):
            pass


def measure(model: Model, ids: np.ndarray[tuple[int], np.dtype[np.int64]], seconds: float) -> float:
    """Tokens a second over prompts that take `seconds` together."""
    start, prompts = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - start) < seconds:
        model.reset()
        model.forward_prompt(ids)
        prompts += 1
    return prompts * len(ids) / elapsed


def main() -> None:
    """Alternate samples and print both medians and their ratio."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", type=Path, default=default_model_path())
    parser.add_argument("-p", "--prompt", type=int, default=512, help="tokens")
    parser.add_argument("-t", "--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("-r", "--rounds", type=int, default=7)
    parser.add_argument("-s", "--seconds", type=float, default=1.0, help="of a sample")
    args = parser.parse_args()

    cores = sorted(os.sched_getaffinity(0))
    wanted = multiprocessing.Event()
    rival = multiprocessing.Process(target=keep_busy, args=(cores[-1], wanted), daemon=True)
    rival.start()
    alone, beside = [], []
    with Model(args.model, device="cpu", threads=args.threads) as model:
        ids = np.arange(args.prompt) % 100
        measure(model, ids, args.seconds)
        for _ in range(args.rounds):
            alone.append(measure(model, ids, args.seconds))
            wanted.set()
            time.sleep(0.1)
            beside.append(measure(model, ids, args.seconds))
            wanted.clear()
            time.sleep(0.1)
    rival.terminate()
    kept = sorted(b / a for a, b in zip(alone, beside, strict=True))
    fair = (len(cores) - 0.5) / len(cores)
    median, low, high = statistics.median(kept), kept[0], kept[-1]
    print(f"alone {statistics.median(alone):.0f} tok/s, beside another {statistics.median(beside):.0f} tok/s")
    print(f"kept {median:.2f} ({low:.2f}-{high:.2f}); in proportion would be {fair:.2f}")
    print(f"({args.threads} threads on {len(cores)} cores)")


if __name__ == "__main__":
    main()
