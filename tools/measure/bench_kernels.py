"""Benchmark single steps of the CPU engine against the limits of this machine.

``python tools/measure/bench_kernels.py`` times products and attention together with register-only products
and plain reads of memory. A kernel's share of these limits does not depend on the load of the machine.
"""

import argparse
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from metal_prefill import _core
from metal_prefill._support.tables import table
from metal_prefill.bench import _machine
from metal_prefill.bench._runner import Spread, spread
from metal_prefill.commands import common

# Rows and columns of SmolLM-135M: attention's output, merged Q K V, merged gate and up, down, the head.
SHAPES = ((576, 576), (960, 576), (3072, 576), (576, 1536), (49152, 576))
HEAD_ROWS = 32_000  # a matrix with more is a head
HEADS, KV_HEADS, HEAD_DIM = 9, 3, 64
MAX_HEAD_ROWS = 32  # tokens whose logits the engine computes at a time
TOKENS = (1, 8, 32, 128, 512)
ATTENTION_TOKENS = (512, 1024, 2048, 8000)
TYPES = ("Q4_0", "Q8_0", "F16")
SAMPLE_S = 4e-3  # a sample: long compared with the start of the threads
LIMIT_S = 1e-3  # of each limit, before and after it


# Work of `_cpu_testing`: `multiply_adds` and `bytes` of weights of a repetition, and `run`, which returns the
# seconds that repetitions take.
Workload: TypeAlias = Any


def repetitions_for(workload: Workload, seconds: float) -> int:
    """Warm up a workload, and return the number of repetitions that take about the given time."""
    count = 1
    while (taken := workload.run(count)) < seconds / 4 and count < 1 << 16:
        count *= 4
    return int(max(1, round(count * seconds / taken)))


def limit_of(workload: Workload) -> Callable[[], float]:
    """Return a function that measures a limit in multiply-adds or in bytes per second."""
    count = repetitions_for(workload, LIMIT_S)
    return lambda: count * (workload.multiply_adds or workload.bytes) / workload.run(count)


def measure(
    workload: Workload, products: Callable[[], float], memory: Callable[[], float], samples: int
) -> list[Spread]:
    """Return multiply-adds per second, and the shares of both limits, measured next to each sample."""
    count = repetitions_for(workload, SAMPLE_S)
    found = []
    before = products(), memory()
    for _ in range(samples):
        rate = count / workload.run(count)
        after = products(), memory()
        work = workload.multiply_adds, workload.bytes
        shares = (2 * n * rate / (b + a) for n, b, a in zip(work, before, after, strict=True))
        found.append((workload.multiply_adds * rate, *shares))
        before = after
    return [spread(values) for values in zip(*found, strict=True)]


def testing_module() -> Any:
    """Return the extension of builds for tests and benchmarks."""
    return importlib.import_module("_cpu_testing")


def cases(
    isa: str,
    types: Sequence[str],
    shapes: Sequence[tuple[int, int]],
    tokens: Sequence[int],
    threads: int,
    compute: str,
) -> Iterator[tuple[str, str, int, Callable[[], Workload]]]:
    """Yield each step's name, the limit of its arithmetic, its number of tokens, and how to make it."""
    steps = testing_module()
    pairs = "bfloat16" in steps.peaks(isa)
    for name in types:
        kind = GGMLQuantizationType[name]
        block, _ = GGML_QUANT_SIZES[kind]
        limit = "int8" if compute == "w8a8" or (block > 1 and compute == "int8") else "float32"
        limit = "bfloat16" if pairs and (compute == "bf16" or name == "BF16") else limit
        for rows, cols in shapes:
            for n in tokens:
                if cols % block == 0 and (rows <= HEAD_ROWS or n <= MAX_HEAD_ROWS):
                    make = partial(steps.product_workload, isa, int(kind), rows, cols, n, threads, compute)
                    yield f"{name} {rows}x{cols}", limit, n, make
    for n in ATTENTION_TOKENS:
        make = partial(steps.attention_workload, isa, n, HEADS, KV_HEADS, HEAD_DIM, threads)
        yield f"attention {HEADS}/{KV_HEADS} x {HEAD_DIM}", "bfloat16" if pairs else "float32", n, make


def share(part: Spread) -> str:
    """Return a share in percent, with its range; empty without shares."""
    return part.text("{:.0%}".format) if part.median else ""


def shapes(text: str) -> list[tuple[int, ...]]:
    """Return rows and columns of each matrix of a list such as ``576x576,1536x576``."""
    return [tuple(map(int, shape.split("x", 1))) for shape in text.split(",")]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = lambda text: text.split(",")  # noqa: E731
    parser.add_argument("--types", type=names, default=TYPES, help="of matrices (default: %(default)s)")
    parser.add_argument("--shapes", type=shapes, default=SHAPES, metavar="ROWSxCOLS,...", help="of matrices")
    parser.add_argument("--tokens", type=common.positives, default=TOKENS, help="(default: %(default)s)")
    parser.add_argument("-t", "--threads", type=common.positives, help="(default: one, and all cores)")
    parser.add_argument("-r", "--repetitions", type=common.positive, default=9, help="samples of each")
    parser.add_argument("--isa", choices=_core.kernel_sets(), help="kernel set (default: the fastest)")
    modes = ("int8", "bf16", "w8a8")
    parser.add_argument("--compute", choices=modes, default="int8", help="(default: %(default)s)")
    options = parser.parse_args(arguments)
    if unknown := set(options.types) - GGMLQuantizationType.__members__.keys():
        parser.error(f"no tensor types: {', '.join(sorted(unknown))}")
    isa = options.isa or _core.kernel_sets()[0]
    rows: list[tuple[str, ...]] = []
    for threads in options.threads or sorted({1, _machine.available_threads()}):
        steps = testing_module()
        limits = {name: limit_of(steps.peak_workload(isa, name, threads)) for name in steps.peaks(isa)}
        try:
            for kernel, limit, n, make in cases(
                isa, options.types, options.shapes, options.tokens, threads, options.compute
            ):
                rate, *shares = measure(make(), limits[limit], limits["memory"], options.repetitions)
                row = (kernel, str(n), str(threads), f"{rate.median / 1e9:,.1f}", limit)
                rows.append((*row, *map(share, shares)))
        except ImportError:
            parser.error("needs a build with METAL_PREFILL_TESTING: run `make bench-kernels`")
    title = f"{_machine.cpu_name()}, {isa}: share of the limits, median (range)"
    header = ("kernel", "tokens", "threads", "GMAC/s", "limit", "of products", "of memory")
    common.console().print(table(title, header, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
