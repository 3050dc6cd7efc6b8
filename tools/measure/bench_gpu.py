#!/usr/bin/env python3
"""Measure the Metal engine on a GPU: speeds, the time of every kernel, and the limits of the GPU.

It needs a build with METAL_PREFILL_EMULATOR_CUDA=ON and an NVIDIA GPU (``make bench-gpu``). Times of kernels
come from a second process, in which the emulator puts an event between all dispatches; speeds come from the
first, without events.

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
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from metal_prefill import Model, Session, _core
from metal_prefill.synth import synthesize

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
TIMED_PROMPTS = (1, 4, 8, 32, 128, 512, 2048)
STREAMS = (8, 32)  # sequences that decode together
SEQUENTIAL = (32, 128, 512)
DEPTH, DECODED = 32, 64  # tokens in the context before decoding, and decoded ones
# SmolLM-135M's shape in Q4_0 with a head in Q8_0: operations of the layers' weights for a token and of the
# head for a prompt, and the bytes of both.
LINEAR_FLOP, HEAD_FLOP, WEIGHT_BYTES = 212.3e6, 56.6e6, 89.8e6
APPLE_FAMILY = 9  # the engine is tuned as for an M3 or M4
Record = dict[str, Any]


def median_seconds(
    run: Callable[[], object], repeats: int, prepare: Callable[[], object]
) -> tuple[float, float]:
    """Return the median and the spread (from the smallest to the largest) of the times of `run`."""
    samples = []
    for _ in range(repeats):
        prepare()
        begin = time.perf_counter()
        run()
        samples.append(time.perf_counter() - begin)
    return statistics.median(samples), max(samples) - min(samples)


def prompt_of(n: int) -> np.ndarray[Any, Any]:
    """Return n deterministic token ids."""
    return np.random.default_rng(n).integers(0, 49152, n).astype(np.int32)


def measure_speeds(path: Path, repeats: int) -> Record:
    """Return tokens a second of prompts and of decoding, and prompts against tokens one by one."""
    rows: list[Record] = []
    with Model(path, device="metal") as model, model.session() as session:
        for n in PROMPTS:
            ids = prompt_of(n)
            for _ in range(3):
                session.reset()
                session.forward_prompt(ids)
            seconds, spread = median_seconds(partial(session.forward_prompt, ids), repeats, session.reset)
            rows.append({"tokens": n, "seconds": seconds, "spread": spread, "tokens_per_second": n / seconds,
                         "gpu_seconds": session.stats()["gpu_seconds"],
                         "dispatches": session.stats()["dispatches"]})  # fmt: skip

        sequential = []
        for n in SEQUENTIAL:
            one_by_one, _ = median_seconds(partial(decode, session, n), 3, session.reset)
            together = next(row["seconds"] for row in rows if row["tokens"] == n)
            sequential.append({"tokens": n, "seconds": one_by_one, "ratio": one_by_one / together})
        device = model.device
    decoding = [measure_decoding(path, repeats, fused_norm) for fused_norm in (False, True)]
    streams = [measure_streams(path, repeats, n) for n in STREAMS]
    return {
        "device": device,
        "prefill": rows,
        "decode": decoding,
        "streams": streams,
        "sequential": sequential,
    }


def decode(session: Session, count: int) -> float:
    """Decode greedily; return the GPU's seconds."""
    token, gpu_seconds = 1, 0.0
    for _ in range(count):
        token = session.forward_token_greedy(token)
        gpu_seconds += session.stats()["gpu_seconds"]
    return gpu_seconds


def measure_decoding(path: Path, repeats: int, fused_norm: bool) -> Record:
    """Return the speed of decoding after a short prompt."""
    with Model(path, device="metal", fused_norm=fused_norm) as model, model.session() as session:

        def fill() -> None:
            session.reset()
            session.forward_prompt(prompt_of(DEPTH))

        fill()
        gpu_seconds = decode(session, DECODED) / DECODED
        seconds, spread = median_seconds(partial(decode, session, DECODED), repeats, fill)
        return {"fused_norm": fused_norm, "tokens_per_second": DECODED / seconds,
                "seconds": seconds / DECODED, "spread": spread / DECODED, "gpu_seconds": gpu_seconds,
                "dispatches": session.stats()["dispatches"]}  # fmt: skip


def decoding_sessions(model: Model, count: int) -> list[Session]:
    """Return sessions after short prompts of their own."""
    sessions = [model.session() for _ in range(count)]
    for i, session in enumerate(sessions):
        session.forward_prompt(prompt_of(DEPTH + i)[:DEPTH])
    return sessions


def measure_streams(path: Path, repeats: int, count: int) -> Record:
    """Return the speed of passes with one token for each of several sequences."""
    with Model(path, device="metal") as model:
        sessions = decoding_sessions(model, count)
        gpu_seconds: list[float] = []

        def step() -> None:
            model.forward_batch(sessions, [[1]] * count)
            gpu_seconds.append(sessions[0].stats()["gpu_seconds"])

        for _ in range(3):
            step()
        seconds, spread = median_seconds(step, 4 * repeats, lambda: None)
        dispatches = sessions[0].stats()["dispatches"]
    return {"streams": count, "tokens_per_second": count / seconds, "seconds": seconds, "spread": spread,
            "gpu_seconds": statistics.median(gpu_seconds[3:]), "dispatches": dispatches}  # fmt: skip


def median_rows(samples: list[list[Any]]) -> list[Record]:
    """Return the dispatches of a pass, with the medians of their times in all samples but the first two."""
    return [
        {"kernel": runs[0].kernel, "grid": list(runs[0].grid), "threads": list(runs[0].group),
         "microseconds": statistics.median(run.seconds for run in runs) * 1e6}
        for runs in zip(*samples[2:], strict=True)
    ]  # fmt: skip


def dispatches_of(prepare: Callable[[], object], run: Callable[[], object]) -> list[Any]:
    """Return the dispatches of the last pass of `run`; a pass is one command buffer or several."""
    prepare()
    _core.emulator.set_history_depth(0)
    _core.emulator.set_history_depth(8)
    run()
    history = _core.emulator.history()
    return [d for buffer in history if buffer.label == history[-1].label for d in buffer.dispatches]


def measure_dispatches(path: Path, repeats: int) -> list[Record]:
    """Return the dispatches of prompts, and of passes with one token for each of several sequences.

    They are in order, with the median of their times on the GPU.
    """
    with Model(path, device="metal") as model, model.session() as session:
        runs: list[tuple[Record, Callable[[], object], Callable[[], object]]] = [
            ({"tokens": n}, session.reset, partial(session.forward_prompt, prompt_of(n)))
            for n in TIMED_PROMPTS
        ]
        for n in STREAMS:
            step = partial(model.forward_batch, decoding_sessions(model, n), [[1]] * n)
            runs.append(({"tokens": n, "streams": n}, lambda: None, step))
        return [
            about | {"dispatches": median_rows([dispatches_of(prepare, run) for _ in range(repeats + 2)])}
            for about, prepare, run in runs
        ]


def dispatch_times(path: Path, repeats: int) -> list[Record]:
    """Run measure_dispatches in a separate process, in timed mode."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "dispatches.json"
        command = [sys.executable, __file__, "--model", str(path), "--repeats", str(repeats), "--dispatches",
                   str(output)]  # fmt: skip
        subprocess.run(command, check=True, env={**os.environ, "METAL_EMULATOR_TIMED": "1"})
        records: list[Record] = json.loads(output.read_text())
        return records


def measure_ceilings() -> Record:
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


def share_table(record: Record) -> list[str]:
    """Return the time of each kernel in one pass, largest first."""
    total = sum(row["microseconds"] for row in record["dispatches"])
    times: dict[str, list[float]] = defaultdict(list)
    for row in record["dispatches"]:
        times[row["kernel"]].append(row["microseconds"])
    what = f"{record['streams']} streams" if "streams" in record else f"{record['tokens']} tokens"
    lines = [f"{what}: {total:.0f} us in {len(record['dispatches'])} dispatches"]
    for kernel, values in sorted(times.items(), key=lambda item: -sum(item[1])):
        share = 100 * sum(values) / total
        lines.append(f"  {share:5.1f}%  {kernel:36} {len(values):4} x {statistics.median(values):7.2f} us")
    return lines


def projection_seconds(record: Record) -> float:
    """Return the time of one pass in the layers' weight products, without the head, which comes last."""
    names = ("matvec", "multi_token", "matmul")
    products = [row for row in record["dispatches"] if row["kernel"].startswith(names)]
    return sum(float(row["microseconds"]) for row in products[:-1]) * 1e-6


def report(result: Record) -> list[str]:
    """Return the tables."""
    speeds, ceilings = result["speeds"], result["ceilings"]
    lines = [speeds["device"], "", "prefill     tok/s      ms   GPU ms  dispatches"]
    for row in speeds["prefill"]:
        lines.append(f"{row['tokens']:7} {row['tokens_per_second']:9.0f} {row['seconds'] * 1e3:7.2f} "
                     f"{row['gpu_seconds'] * 1e3:8.2f} {row['dispatches']:11.0f}")  # fmt: skip
    for row in speeds["decode"]:
        name = "decode, norms fused" if row["fused_norm"] else "decode"
        lines.append(f"{name}: {row['tokens_per_second']:.0f} tok/s, {row['seconds'] * 1e3:.2f} ms, GPU "
                     f"{row['gpu_seconds'] * 1e3:.2f} ms, {row['dispatches']:.0f} dispatches")  # fmt: skip
    for row in speeds["streams"]:
        lines.append(
            f"{row['streams']} streams: {row['tokens_per_second']:.0f} tok/s, {row['seconds'] * 1e3:.2f} ms, "
            f"GPU {row['gpu_seconds'] * 1e3:.2f} ms, {row['dispatches']:.0f} dispatches"
        )
    lines += ["", "a prompt against its tokens one by one"]
    lines += [f"{row['tokens']:7} {row['ratio']:9.1f} x" for row in speeds["sequential"]]
    by_tokens = {record["tokens"]: record for record in result["dispatches"] if "streams" not in record}
    one = projection_seconds(by_tokens[1])
    lines += ["", "products of weights per token, against one token (the layers, without the head)"]
    lines += [f"{n:7} {one / (projection_seconds(by_tokens[n]) / n):9.1f} x" for n in by_tokens if n > 1]
    lines += ["", "ceilings measured here",
              f"  copy {ceilings['copied_bytes_per_second'] / 1e12:.2f} TB/s, read and written",
              f"  float {ceilings['float_flops'] / 1e12:.1f} TFLOP/s, 8x8 half matrices "
              f"{ceilings['half_matrix_flops'] / 1e12:.1f} TFLOP/s",
              f"  a dispatch that does nothing {ceilings['dispatch_seconds'] * 1e6:.2f} us",
              "", "against them"]  # fmt: skip
    for row in speeds["prefill"]:
        flops = (row["tokens"] * LINEAR_FLOP + HEAD_FLOP) / row["gpu_seconds"]
        read = WEIGHT_BYTES / row["gpu_seconds"]
        lines.append(
            f"{row['tokens']:7} {100 * flops / ceilings['half_matrix_flops']:6.2f}% of matrix operations, "
            f"{100 * read / ceilings['copied_bytes_per_second']:6.2f}% of the bytes"
        )
    for n in (1, 32, 512):
        lines += ["", *share_table(by_tokens[n])]
    for record in result["dispatches"]:
        if "streams" in record:
            lines += ["", *share_table(record)]
    return lines


def main() -> int:
    """Run the command line; see the module's text."""
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
        path = options.model
        if not path:
            path = synthesize(Path(folder) / "smollm-135m.Q4_0.gguf")
        result = {
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
