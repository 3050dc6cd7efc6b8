#!/usr/bin/env python3
"""Compare versions of the package, or ways to decode, on an NVIDIA GPU: in turns, each time in a new process.

It needs builds with METAL_PREFILL_EMULATOR_CUDA=ON. A variant is a name, optionally with the folder of
another installation, and with ``fused_norm``, ``matvec_rows`` or the name of the emulated GPU, which decides
about tiles.

Examples
--------
``METAL_EMULATOR_EXECUTOR=cuda METAL_EMULATOR_VALIDATION=0 python tools/measure/bench_gpu_turns.py now
before=/tmp/before fused:fused_norm=1 "cores:gpu=Apple M4 Ultra"``
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

PROMPTS = (32, 128, 512, 2000)
DEPTH, DECODED = 32, 128  # tokens in the context before decoding, and decoded ones
STREAMS = (8, 32)
APPLE_FAMILY = 9  # the engine is tuned as for an M3 or M4


class Variant(NamedTuple):
    """Variant that a process measures."""

    text: str  # as given
    name: str
    folder: str  # of another installation; empty: the one that runs this
    options: dict[str, str]

    @classmethod
    def parse(cls, text: str) -> Variant:
        """Parse ``NAME[=FOLDER][:OPTION=VALUE,...]``."""
        first, _, rest = text.partition(":")
        name, _, folder = first.partition("=")
        options = dict(pair.split("=", 1) for pair in rest.split(",") if pair)
        if unknown := set(options) - {"fused_norm", "matvec_rows", "gpu"}:
            raise ValueError(f"unknown options {sorted(unknown)} in {text!r}")
        return cls(text, name, folder, options)


def median_speed(run: Callable[[], int], repeats: int) -> float:
    """Return the median of tokens per second of `run`, which returns its tokens and ran twice before."""
    speeds = []
    for _ in range(repeats + 2):
        begin = time.perf_counter()
        tokens = run()
        speeds.append(tokens / (time.perf_counter() - begin))
    return statistics.median(speeds[2:])


def measure(path: Path, options: dict[str, str], repeats: int) -> dict[str, float]:
    """Return tokens per second by what is measured, in this process."""
    from metal_prefill import Model, _core

    gpu = options.pop("gpu", "Apple M4")
    _core.emulator.set_limits(_core.emulator.Limits(apple_family=APPLE_FAMILY, name=gpu))
    if options:
        from metal_prefill.gpu import _fastest_decode

        os.environ["METAL_PREFILL_CHECK"] = os.environ["METAL_PREFILL_TUNE"] = "1"
        fused, rows = options.get("fused_norm") == "1", int(options.get("matvec_rows", "1"))
        _fastest_decode.fastest = lambda *_: _fastest_decode.Choice(fused, rows)
    rng = np.random.default_rng(0)

    def random_prompt(n: int) -> np.ndarray[Any, Any]:
        return rng.integers(0, 49152, n).astype(np.int32)

    with Model(path, device="metal") as model, model.session() as session:

        def prompt(ids: np.ndarray[Any, Any]) -> int:
            session.reset()
            session.forward_prompt(ids)
            return len(ids)

        def text(ids: np.ndarray[Any, Any]) -> int:
            return sum(1 for _ in session.stream(ids, DECODED, speculate="off"))

        def texts(prompts: list[np.ndarray[Any, Any]]) -> int:
            pieces = model.stream_many(prompts, DECODED, max_streams=len(prompts), speculate="off")
            return sum(1 for _ in pieces)

        found = {f"prompt of {n}": median_speed(partial(prompt, random_prompt(n)), repeats) for n in PROMPTS}
        found["decode"] = median_speed(partial(text, random_prompt(DEPTH)), repeats)
        for n in STREAMS:
            prompts = [random_prompt(DEPTH) for _ in range(n)]
            found[f"{n} streams"] = median_speed(partial(texts, prompts), max(3, repeats // 3))
    return found


def main() -> int:
    """Run the command line; see the module's text."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("variants", nargs="+", type=Variant.parse, metavar="NAME[=FOLDER][:OPTION=VALUE,...]")
    parser.add_argument(
        "-m", "--model", type=Path, help="default: SmolLM-135M's shape in Q4_0, random weights"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.model, options.variants[0].options, options.repeats)))
        return 0
    if "CUDA" not in os.environ.get("METAL_EMULATOR_EXECUTOR", "").upper():
        parser.error("set METAL_EMULATOR_EXECUTOR=cuda: times of the CPU executor say nothing about a GPU")
    with tempfile.TemporaryDirectory() as folder:
        path = options.model
        if path is None:
            from metal_prefill.synth import synthesize

            path = synthesize(Path(folder) / "smollm-135m.Q4_0.gguf")
        results: dict[str, list[dict[str, float]]] = {}
        for _ in range(options.rounds):
            for variant in options.variants:
                command = [sys.executable, __file__, variant.text, "--measure", "-m", str(path)]
                command += ["--repeats", str(options.repeats)]
                environment = {**os.environ, "METAL_PREFILL_CACHE": folder}
                if variant.folder:
                    environment["PYTHONPATH"] = (
                        variant.folder + os.pathsep + environment.get("PYTHONPATH", "")
                    )
                run = subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE, text=True)
                results.setdefault(variant.name, []).append(json.loads(run.stdout.splitlines()[-1]))
    print("tokens per second, lowest to highest of the rounds")
    for what in next(iter(results.values()))[0]:
        cells = [
            f"| {name} {min(r[what] for r in rows):,.0f} to {max(r[what] for r in rows):,.0f}"
            for name, rows in results.items()
        ]
        print(f"{what:16}", *cells)
    return 0


if __name__ == "__main__":
    sys.exit(main())
