#!/usr/bin/env python3
"""Measure the gain of running ahead: greedy decoding with and without sending the next token early.

It needs the Metal engine: a Mac, or a build with METAL_PREFILL_EMULATOR_CUDA=ON and an NVIDIA GPU. The texts
are compared as well.

Examples
--------
``METAL_EMULATOR_EXECUTOR=cuda METAL_EMULATOR_VALIDATION=0 python tools/measure/bench_decode.py``
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from metal_prefill import Model, _core
from metal_prefill.synth import synthesize

DEPTH = 32  # tokens in the context before decoding


class Run(NamedTuple):
    """Seconds per token, their GPU-busy part, and the text."""

    seconds: float
    gpu_seconds: float
    text: list[int]


def decode(session: _core.Session, count: int, ahead: bool) -> Run:
    """Decode greedily as generate() does, without decoding tokens to text."""
    session.rewind(0)
    ids = np.random.default_rng(DEPTH).integers(0, 49152, DEPTH).astype(np.int32)
    text, gpu_seconds = [session.forward_prompt(ids, continues=ahead)], 0.0
    begin = time.perf_counter()
    for step in range(count):
        more = ahead and step + 1 < count
        text += session.forward_drafts(np.array(text[-1:], np.int32), 0, continues=more)
        gpu_seconds += session.stats()["gpu_seconds"]
    seconds = time.perf_counter() - begin
    return Run(seconds / count, gpu_seconds / count, text)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; see the module's text."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", "--model", type=Path, help="GGUF file; by default SmolLM-135M's shape in Q4_0")
    parser.add_argument("-n", "--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        path = options.model or synthesize(Path(folder) / "smol.gguf")
        with Model(path, device="metal") as model:
            session = model.session().native
            for ahead in (False, True):  # pipelines, buffers
                decode(session, 32, ahead)
            runs = [(decode(session, options.tokens, False), decode(session, options.tokens, True))
                    for _ in range(options.repeats)]  # fmt: skip
            print(model.device)
    for name, index in (("after the host has seen it", 0), ("ahead of the host", 1)):
        seconds = statistics.median(run[index].seconds for run in runs)
        gpu = statistics.median(run[index].gpu_seconds for run in runs)
        print(f"{name:>28}: {1 / seconds:8.1f} tok/s, {seconds * 1e3:.3f} ms a token, GPU {gpu * 1e3:.3f} ms")
    ratios = [late.seconds / early.seconds for late, early in runs]
    print(
        f"ratio of each pair: median {statistics.median(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f}"
    )
    same = all(late.text == early.text for late, early in runs)
    print("the texts are the same" if same else "THE TEXTS DIFFER")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
