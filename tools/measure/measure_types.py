"""Compare the speed, opening time and memory of each tensor type with llama.cpp.

Makes a file of each type and measures it as ``metal-prefill bench --compare llama.cpp`` does. A table for
the records, a row for each type, with how many times as fast as llama.cpp the package is: medians, with the
lowest and the highest ratio of samples next to each other. ``packed`` is the size in memory of the tensors
that the CPU engine packs, over their size in the file; ``limit`` how many times llama.cpp's speed with the
longest prompt the machine's rate of 8-bit products allows::

    pip install . llama-cpp-python
    python tools/measure/measure_types.py                           # SmolLM2-135M, as llama.cpp quantizes it
    python tools/measure/measure_types.py --types Q4_K_M Q6_K -r 3  # some of its types
    python tools/measure/measure_types.py --shape tinyllama-1.1b --layers 8 --types Q4_K  # random weights
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import llama_cpp
from compare_accuracy import LOG_CALLBACK, chosen_types, print_header, quantized

from metal_prefill import Model, bench, synth
from metal_prefill.bench._summary import Spread
from metal_prefill.hub._bundled_models import packaged_model

PEER = "llama.cpp"
MIB = 1 << 20


def speed(value: float, ratio: Spread) -> str:
    """Tokens a second, and how many times the peer's speed that is."""
    return f"{value:,.0f} [{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})]"


def packed_share(path: Path) -> str:
    """Bytes of the packed tensors over those in the file; empty if none is packed."""
    with Model(path, device="cpu", threads=1, max_context=16) as model:
        packed = model.stats()["weight_bytes"]
        floats = ("F32", "F16", "BF16")
        tensors = model.gguf.tensors
        used = [
            t for t in tensors.values() if t.name != "token_embd.weight" or "output.weight" not in tensors
        ]
        in_file = sum(t.nbytes for t in used if len(t.shape) == 2 and t.type_name not in floats)
    return f"{packed / in_file:.2f}" if in_file else ""


def measure(path: Path, arguments: argparse.Namespace) -> list[str]:
    """Return the cells of the row of a file."""
    results = bench.run(
        path,
        prompts=arguments.prompts,
        n_gen=arguments.tokens,
        repetitions=arguments.repetitions,
        threads=arguments.threads,
        device="cpu",
        compare=[PEER],
        patience=arguments.patience,
    )
    cells = [f"{path.stat().st_size / MIB:.0f}", packed_share(path)]
    for test in results.tests:
        ratio = results.row(PEER, test).ratio
        cells.append(speed(results.row("metal_prefill", test).median_ts, ratio) if ratio else "")
    ours, peer = (results.row(engine, results.tests[0]) for engine in ("metal_prefill", PEER))
    cells.append(f"{ours.load_ns / 1e9:.2f} s [{peer.load_ns / ours.load_ns:.2f}]")
    cells.append(f"{ours.peak_rss / MIB:.0f} [{peer.peak_rss / ours.peak_rss:.2f}]")
    longest = f"pp{max(arguments.prompts)}"
    limit = results.row("metal_prefill", longest).limit_ts
    cells.append(f"{limit / results.row(PEER, longest).median_ts:.2f}" if limit else "")
    degraded = sum(row.n_degraded for row in results.rows)
    cells.append(f"{degraded} of {sum(len(row.samples_ns) for row in results.rows)}")
    return cells


def writer(arguments: argparse.Namespace) -> tuple[list[str], Callable[[str, Path], bool]]:
    """Return the types to measure, and a function that writes the file of one or returns False."""
    if arguments.shape:

        def synthesized(name: str, path: Path) -> bool:
            synth.synthesize(
                path, preset=arguments.shape, layers=arguments.layers, tensor_type=name, embedding_type="Q8_0"
            )
            return True

        return arguments.types or list(synth.TENSOR_TYPES), synthesized
    source = packaged_model(arguments.model) or Path(arguments.model)
    numbers = chosen_types(arguments.types or [])
    return list(numbers), lambda name, path: quantized(source, numbers[name], path)


def main() -> None:
    """Measure the given types, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", default="smollm2", help="file to quantize (default: smollm2)")
    parser.add_argument("--shape", choices=tuple(synth.PRESETS), help="random weights of a shape instead")
    parser.add_argument("--layers", type=int, help="number of layers of that shape")
    parser.add_argument("--types", nargs="+", metavar="TYPE", help="measure only these types")
    parser.add_argument("-p", "--prompts", type=int, nargs="+", default=[32, 512], metavar="N")
    parser.add_argument("-n", "--tokens", type=int, default=32, help="decoded tokens (default: 32)")
    parser.add_argument("-r", "--repetitions", type=int, default=3)
    parser.add_argument("-t", "--threads", type=int)
    parser.add_argument(
        "--patience", type=float, default=5.0, help="seconds for a degraded machine, of each type"
    )
    arguments = parser.parse_args()
    llama_cpp.llama_log_set(LOG_CALLBACK, None)
    names, write = writer(arguments)
    tests = [*(f"pp{n}" for n in arguments.prompts), *([f"tg{arguments.tokens}"] if arguments.tokens else [])]
    header = ["type", "MiB", "packed", *tests, "load", "peak MiB", "limit", "degraded samples"]
    print_header(header)
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.gguf"
            if write(name, path):
                print("|", " | ".join([name, *measure(path, arguments)]), "|", flush=True)
            else:
                print(f"{name}: llama.cpp does not write it", file=sys.stderr)


if __name__ == "__main__":
    main()
