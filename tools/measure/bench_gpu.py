#!/usr/bin/env python3
"""Measure the Metal engine on a GPU: speeds, the time of every kernel, and the limits of the GPU.

Requires a build with METAL_PREFILL_EMULATOR_CUDA=ON and an NVIDIA GPU (``make bench-gpu``). One process
measures speeds, a second one times of kernels, with an event of the emulator between all dispatches.

Examples
--------
``METAL_EMULATOR_EXECUTOR=cuda python tools/measure/bench_gpu.py --json gpu.json``
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from metal_prefill import Model, Session, _core
from metal_prefill.synth import synthesize

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
STREAMS = (8, 32)  # sequences that decode together
SHOWN = ("1 token", "32 tokens", "512 tokens", "8 streams", "32 streams")  # cases whose kernels are listed
DEPTH = 32  # tokens in the context before decoding
# SmolLM-135M's shape in Q4_0 with a head in Q8_0: operations of the layers' weights for a token and of the
# head for a prompt, and the bytes of both.
LINEAR_FLOP, HEAD_FLOP, WEIGHT_BYTES = 212.3e6, 56.6e6, 89.8e6
APPLE_FAMILY = 9  # tunes the engine for an M3 or M4
Record = dict[str, Any]


class Case(NamedTuple):
    """A call of one or more passes, and its preparation."""

    name: str
    tokens: int
    session: Session  # provides the statistics of the call
    prepare: Callable[[], object]
    run: Callable[[], object]


def prompt_of(n: int) -> np.ndarray[Any, Any]:
    """Return n deterministic token ids."""
    return np.random.default_rng(n).integers(0, 49152, n).astype(np.int32)


def cases(model: Model) -> Iterator[Case]:
    """Yield prompts, the next token of a sequence, and passes with one token of each of several sequences."""
    for n in PROMPTS:
        session = model.session()
        name = f"{n} token{'s' * (n > 1)}"
        yield Case(name, n, session, session.reset, partial(session.forward_prompt, prompt_of(n)))
    sessions = [model.session() for _ in range(max(STREAMS))]
    for i, session in enumerate(sessions):
        session.forward_prompt(prompt_of(DEPTH + i)[:DEPTH])
    first = sessions[0]
    yield Case("next token", 1, first, lambda: None, partial(first.forward_token_greedy, 1))
    for n in STREAMS:
        step = partial(model.forward_batch, sessions[:n], [[1]] * n)
        yield Case(f"{n} streams", n, first, lambda: None, step)


def measure_speeds(path: Path, repeats: int) -> list[Record]:
    """Return the median time of each case by the host's clock and the GPU's, and the number of dispatches."""
    rows: list[Record] = []
    with Model(path, device="metal") as model:
        for case in cases(model):
            times, gpu_times = [], []
            for _ in range(repeats + 3):
                case.prepare()
                begin = time.perf_counter()
                case.run()
                times.append(time.perf_counter() - begin)
                gpu_times.append(case.session.stats()["gpu_seconds"])
            times, gpu_times = times[3:], gpu_times[3:]
            rows.append({"case": case.name, "tokens": case.tokens, "seconds": statistics.median(times),
                         "spread": max(times) - min(times), "gpu_seconds": statistics.median(gpu_times),
                         "dispatches": case.session.stats()["dispatches"]})  # fmt: skip
    return rows


def median_rows(samples: list[list[Any]]) -> list[Record]:
    """Return the dispatches of a pass, with the medians of their times in all samples but the first two."""
    return [
        {"kernel": runs[0].kernel, "grid": list(runs[0].grid), "threads": list(runs[0].group),
         "microseconds": statistics.median(run.seconds for run in runs) * 1e6}
        for runs in zip(*samples[2:], strict=True)
    ]  # fmt: skip


def dispatches_of(case: Case) -> list[Any]:
    """Return the dispatches of the last pass of a case; a pass is one command buffer or several."""
    case.prepare()
    _core.emulator.set_history_depth(0)
    _core.emulator.set_history_depth(8)
    case.run()
    history = _core.emulator.history()
    return [d for buffer in history if buffer.label == history[-1].label for d in buffer.dispatches]


def measure_dispatches(path: Path, repeats: int) -> dict[str, list[Record]]:
    """Return the dispatches of each case in order, with the median of their times on the GPU."""
    with Model(path, device="metal") as model:
        return {
            case.name: median_rows([dispatches_of(case) for _ in range(repeats + 2)]) for case in cases(model)
        }


def dispatch_times(path: Path, repeats: int) -> dict[str, list[Record]]:
    """Run measure_dispatches in a separate process, in timed mode."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "dispatches.json"
        command = [sys.executable, __file__, "--model", str(path), "--repeats", str(repeats), "--dispatches",
                   str(output)]  # fmt: skip
        subprocess.run(command, check=True, env={**os.environ, "METAL_EMULATOR_TIMED": "1"})
        return json.loads(output.read_text())


def measure_ceilings() -> dict[str, float]:
    """Return the GPU's peak rates of bytes and operations per second, and the cost of a dispatch."""
    sys.path.insert(0, str(ROOT / "emulator/testing"))
    from metal_kernels import KernelLibrary

    library = KernelLibrary((ROOT / "emulator/tests/kernels/ceilings.metal").read_text())
    size = 1 << 30
    buffers = [library.device.new_buffer(size, storage="private") for _ in range(2)]

    def seconds(encode: Callable[[Any], None]) -> float:
        samples: list[float] = []
        for _ in range(7):
            commands = library.queue.command_buffer()
            encode(commands)
            commands.commit()
            commands.wait()
            if commands.status != "completed":
                raise RuntimeError(commands.error)
            samples.append(commands.gpu_end - commands.gpu_start)
        return statistics.median(samples[2:])

    def copy(commands: Any) -> None:
        blit = commands.blit_encoder()
        blit.copy(buffers[0], 0, buffers[1], 0, size)
        blit.end()

    def compute(kernel: str, groups: int, threads: int, rounds: int, times: int = 1) -> Callable[[Any], None]:
        pipeline = library.pipeline(kernel)

        def encode(commands: Any) -> None:
            encoder = commands.compute_encoder()
            encoder.set_pipeline(pipeline)
            encoder.set_buffer(0, buffers[0])
            encoder.set_bytes(1, np.uint32(rounds).tobytes())
            for _ in range(times):
                encoder.dispatch_threadgroups((groups, 1, 1), (threads, 1, 1))
            encoder.end()

        return encode

    groups, threads, rounds, chains = 132 * 16, 256, 4096, 16
    flop = 2 * chains * rounds * groups * threads
    floats = seconds(compute("multiply_add", groups, threads, rounds))
    matrices = seconds(compute("multiply_matrices", groups, threads, rounds))
    one, many = seconds(compute("nothing", 1, 32, 0)), seconds(compute("nothing", 1, 32, 0, 1001))
    return {
        "copied_bytes_per_second": 2 * size / seconds(copy),
        "float_flops": flop / floats,
        "half_matrix_flops": flop * 512 / 32 / matrices,
        "dispatch_seconds": (many - one) / 1000,
    }


def share_table(name: str, dispatches: list[Record]) -> list[str]:
    """Return the time of each kernel in one pass, largest first."""
    total = sum(row["microseconds"] for row in dispatches)
    times: dict[str, list[float]] = defaultdict(list)
    for row in dispatches:
        times[row["kernel"]].append(row["microseconds"])
    lines = ["", f"{name}: {total:.0f} us in {len(dispatches)} dispatches"]
    for kernel, values in sorted(times.items(), key=lambda item: -sum(item[1])):
        share = 100 * sum(values) / total
        lines.append(f"  {share:5.1f}%  {kernel:36} {len(values):4} x {statistics.median(values):7.2f} us")
    return lines


def report(result: Record) -> list[str]:
    """Return the tables."""
    ceilings = result["ceilings"]
    lines = [result["device"], ""]
    lines += ["             tok/s      ms   GPU ms  dispatches  share of matrix operations, of the bytes"]
    for row in result["speeds"]:
        flops = (row["tokens"] * LINEAR_FLOP + HEAD_FLOP) / row["gpu_seconds"]
        read = WEIGHT_BYTES / row["gpu_seconds"]
        lines.append(f"{row['case']:11} {row['tokens'] / row['seconds']:6.0f} {row['seconds'] * 1e3:7.2f} "
                     f"{row['gpu_seconds'] * 1e3:8.2f} {row['dispatches']:11.0f} "
                     f"{100 * flops / ceilings['half_matrix_flops']:6.2f}% "
                     f"{100 * read / ceilings['copied_bytes_per_second']:6.2f}%")  # fmt: skip
    lines += ["", "ceilings measured here",
              f"  copy {ceilings['copied_bytes_per_second'] / 1e12:.2f} TB/s, read and written",
              f"  float {ceilings['float_flops'] / 1e12:.1f} TFLOP/s, 8x8 half matrices "
              f"{ceilings['half_matrix_flops'] / 1e12:.1f} TFLOP/s",
              f"  a dispatch that does nothing {ceilings['dispatch_seconds'] * 1e6:.2f} us"]  # fmt: skip
    for name in SHOWN:
        lines += share_table(name, result["dispatches"][name])
    return lines


def main() -> int:
    """Run the command line; see the module docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="default: SmolLM-135M's shape in Q4_0 with random weights")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--dispatches", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    _core.emulator.set_limits(_core.emulator.Limits(apple_family=APPLE_FAMILY))
    if options.dispatches:
        options.dispatches.write_text(json.dumps(measure_dispatches(options.model, options.repeats)))
        return 0
    if "CUDA" not in os.environ.get("METAL_EMULATOR_EXECUTOR", "").upper():
        parser.error("set METAL_EMULATOR_EXECUTOR=cuda: times of the CPU executor say nothing about a GPU")
    with tempfile.TemporaryDirectory() as folder:
        path = options.model or synthesize(Path(folder) / "smollm-135m.Q4_0.gguf")
        with Model(path, device="metal") as model:
            device = model.device
        result = {
            "device": device,
            "speeds": measure_speeds(path, options.repeats),
            "dispatches": dispatch_times(path, options.repeats),
            "ceilings": measure_ceilings(),
        }
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    print("\n".join(report(result)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
