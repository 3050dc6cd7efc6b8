"""Benchmark single steps of the CPU engine against the limits of this machine.

``python tools/measure/bench_kernels.py`` times products and attention together with loops that only multiply
registers, and with plain reading of memory: the share of these limits measures a kernel independently of the
load of the machine.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Protocol

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from rich.console import Console
from rich.table import Table

from metal_prefill import _core
from metal_prefill._support.atomic_write import check_target, replacing
from metal_prefill.bench import BenchError, _machine
from metal_prefill.bench._peak import PeakProcess
from metal_prefill.bench._summary import Spread, spread
from metal_prefill.commands import common

# Rows and columns of SmolLM-135M: attention's output, Q K V as one, gate and up as one, down, the head.
SHAPES = ((576, 576), (960, 576), (3072, 576), (576, 1536), (49152, 576))
HEADS, KV_HEADS, HEAD_DIM = 9, 3, 64
MAX_HEAD_ROWS = 32  # tokens whose logits the engine computes at a time
TOKENS = (1, 8, 32, 128, 512)
ATTENTION_TOKENS = (512, 1024, 2048, 8000)
TYPES = ("Q4_0", "Q8_0", "F16")
SAMPLE_S = 4e-3  # a sample: long compared with the start of the threads
LIMIT_S = 1e-3  # of each limit, before and after it
GIGA = 1e9


class Timed(Protocol):
    """Work that can be timed: see `_core.cpu.Workload`."""

    @property
    def multiply_adds(self) -> float:
        """Products of a repetition."""
        ...

    @property
    def bytes(self) -> float:
        """Bytes of weights that a repetition reads."""
        ...

    def run(self, repetitions: int) -> float:
        """Return the seconds that the repetitions take."""
        ...


@dataclass(frozen=True)
class KernelRow:
    """One step at one number of tokens.

    Attributes
    ----------
    kernel : str
        Type and shape of the matrix, or attention.
    isa : str
        Instruction set.
    tokens, threads : int
    limit : {"int8", "float32", "bfloat16"}
        The limit of its arithmetic.
    gmacs : Spread
        10^9 multiply-adds a second.
    of_products, of_memory : Spread or None
        Share of the limits that were measured before and after each sample, 1 for all of it. The second is 0
        where no weights are read. None where the limit could not be measured.
    note : str
        Why not.
    """

    kernel: str
    isa: str
    tokens: int
    threads: int
    limit: str
    gmacs: Spread
    of_products: Spread | None
    of_memory: Spread | None
    note: str = ""


class Limit:
    """A limit of the machine, as a rate: multiply-adds or bytes per second.

    Parameters
    ----------
    start
        Function to time. Once it fails, here or later, the limit is unknown.

    Attributes
    ----------
    failure : str
        Why it is not known.
    """

    def __init__(self, start: Callable[[], Timed]) -> None:
        self.failure = ""
        self._workload: Timed | None = None
        try:
            self._workload = start()
            self._repetitions = repetitions_for(self._workload, LIMIT_S)
        except BenchError as error:
            self._fail(error)

    def measure(self) -> float | None:
        """Measure it now; None where it is not known."""
        if self._workload is None:
            return None
        try:
            seconds = self._workload.run(self._repetitions)
        except BenchError as error:
            self._fail(error)
            return None
        return self._repetitions * (self._workload.multiply_adds or self._workload.bytes) / seconds

    def _fail(self, error: BenchError) -> None:
        self.failure = str(error)
        self._workload = None


def repetitions_for(workload: Timed, seconds: float) -> int:
    """Warm up a workload, and return the number of repetitions that take about the given time."""
    count = 1
    while (taken := workload.run(count)) < seconds / 4 and count < 1 << 16:
        count *= 4
    return max(1, round(count * seconds / taken))


def measure(
    kernel: str,
    workload: Timed,
    tokens: int,
    threads: int,
    isa: str,
    limit: str,
    limits: dict[str, Limit],
    repetitions: int,
) -> KernelRow:
    """Time a workload between measurements of the limits."""
    count = repetitions_for(workload, SAMPLE_S)
    work = {limit: workload.multiply_adds, "memory": workload.bytes}
    rates: list[float] = []
    shares: dict[str, list[float]] = {name: [] for name in work}
    before = {name: limits[name].measure() for name in work}
    for _ in range(repetitions):
        seconds = workload.run(count)
        after = {name: limits[name].measure() for name in work}
        rates.append(count * workload.multiply_adds / seconds / GIGA)
        for name, done in work.items():
            first, last = before[name], after[name]
            if first is not None and last is not None:
                shares[name].append(count * done / seconds / ((first + last) / 2))
        before = after
    of_products, of_memory = (spread(shares[name]) if shares[name] else None for name in work)
    note = "; ".join(limits[name].failure for name in work if limits[name].failure)
    return KernelRow(kernel, isa, tokens, threads, limit, spread(rates), of_products, of_memory, note)


def run(
    *,
    types: Sequence[str] = TYPES,
    shapes: Sequence[tuple[int, int]] = SHAPES,
    tokens: Sequence[int] = TOKENS,
    attention_tokens: Sequence[int] = ATTENTION_TOKENS,
    threads: Sequence[int] = (1,),
    repetitions: int = 9,
    isa: str | None = None,
    compute: str = "int8",
    progress: Callable[[str], object] | None = None,
) -> list[KernelRow]:
    """Measure products and attention.

    Parameters
    ----------
    types
        GGUF types of the matrices; those of K-quants need columns in multiples of 256.
    shapes
        Rows and columns; unsupported shapes of a type are omitted.
    tokens, attention_tokens
        Chunk sizes; the head is measured up to those that the engine passes to it.
    threads
        Sizes of the team.
    repetitions
        Samples of each.
    isa
        A kernel set of this machine; None for the fastest.
    compute
        "int8" or "bf16", as for `metal_prefill.Model`.
    progress
        Called with the name of the next measurement.

    Raises
    ------
    ValueError
        An unknown type or kernel set.
    """
    isa = isa or _core.cpu.kernel_sets()[0]
    rows = []
    for n_threads in threads:
        with ExitStack() as stack:
            limits = {
                name: Limit(partial(_start_peak, stack, isa, name, n_threads))
                for name in _core.cpu.peaks(isa)
            }
            for kernel, limit, n, make in _cases(
                isa, types, shapes, tokens, attention_tokens, n_threads, compute
            ):
                if progress is not None:
                    progress(
                        f"{kernel}, {_machine.counted(n, 'token')}, {_machine.counted(n_threads, 'thread')}"
                    )
                rows.append(measure(kernel, make(), n, n_threads, isa, limit, limits, repetitions))
    return rows


def _start_peak(stack: ExitStack, isa: str, limit: str, threads: int) -> Timed:
    return stack.enter_context(PeakProcess(isa, limit, threads))


def _cases(
    isa: str,
    types: Sequence[str],
    shapes: Sequence[tuple[int, int]],
    tokens: Sequence[int],
    attention_tokens: Sequence[int],
    threads: int,
    compute: str,
) -> Iterator[tuple[str, str, int, Callable[[], Timed]]]:
    for name in types:
        if name not in GGMLQuantizationType.__members__:
            raise ValueError(f"'{name}' is no tensor type")
        kind = GGMLQuantizationType[name]
        block, _ = GGML_QUANT_SIZES[kind]
        for n_rows, n_cols in shapes:
            if n_cols % block:
                continue
            for n in tokens:
                if n_rows == SHAPES[-1][0] and n > MAX_HEAD_ROWS:
                    continue

                make = partial(_steps().product_workload, isa, int(kind), n_rows, n_cols, n, threads, compute)
                yield f"{name} {n_rows}x{n_cols}", _limit_of(isa, kind, compute), n, make
    for n in attention_tokens:
        make = partial(_steps().attention_workload, isa, n, HEADS, KV_HEADS, HEAD_DIM, threads)
        limit = "bfloat16" if "bfloat16" in _core.cpu.peaks(isa) else "float32"
        yield f"attention {HEADS}/{KV_HEADS} heads of {HEAD_DIM}", limit, n, make


def _limit_of(isa: str, kind: GGMLQuantizationType, compute: str) -> str:
    if "bfloat16" in _core.cpu.peaks(isa) and (compute == "bf16" or kind == GGMLQuantizationType.BF16):
        return "bfloat16"
    return "int8" if GGML_QUANT_SIZES[kind][0] > 1 and compute == "int8" else "float32"


def _steps() -> Any:
    """Return the module that makes steps of the engine."""
    try:
        return importlib.import_module("_cpu_testing")
    except ImportError:
        raise BenchError("needs a build with METAL_PREFILL_TESTING: run `make bench-kernels`") from None


def _percent(share: Spread | None) -> str:
    if share is None:
        return "?"
    return f"{share.median:.0%} ({share.low:.0%}-{share.high:.0%})"


def render(rows: Sequence[KernelRow]) -> Table:
    """Render the rows for a terminal."""
    sets = ", ".join(dict.fromkeys(row.isa for row in rows))
    title = f"{_machine.cpu_name()}, {sets}: share of the measured limits, median (range)"
    table = Table(title=title, title_justify="left")
    for name in ("kernel", "tokens", "threads", "GMAC/s", "limit", "of products", "of memory"):
        table.add_column(name, justify="left" if name in ("kernel", "limit") else "right")
    for row in rows:
        table.add_row(
            row.kernel,
            str(row.tokens),
            str(row.threads),
            f"{row.gmacs.median:,.1f}",
            row.limit,
            _percent(row.of_products),
            _percent(row.of_memory) if row.of_memory is None or row.of_memory.median else "",
        )
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--types",
        type=lambda text: text.split(","),
        default=TYPES,
        help="types of the matrices (default: %(default)s)",
    )
    parser.add_argument(
        "--tokens",
        type=common.positives,
        default=TOKENS,
        help="chunk sizes of products (default: %(default)s)",
    )
    parser.add_argument(
        "-t",
        "--threads",
        type=common.positives,
        default=None,
        help="sizes of the team (default: one, and all cores)",
    )
    parser.add_argument("-r", "--repetitions", type=common.positive, default=9, help="samples of each")
    parser.add_argument("--isa", choices=_core.cpu.kernel_sets(), help="kernel set (default: the fastest)")
    parser.add_argument("--compute", choices=("int8", "bf16"), default="int8", help="(default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the rows as JSON; - is stdout")
    options = parser.parse_args(arguments)
    if options.json and options.json != "-":
        check_target(options.json)
    console = Console(stderr=True)
    with console.status("measuring") as status:
        try:
            rows = run(
                types=options.types,
                tokens=options.tokens,
                threads=options.threads or sorted({1, _machine.available_threads()}),
                repetitions=options.repetitions,
                isa=options.isa,
                compute=options.compute,
                progress=status.update,
            )
        except (ValueError, BenchError) as error:
            parser.error(str(error))
    text = json.dumps([asdict(row) for row in rows], indent=2)
    if options.json == "-":
        print(text)
        return 0
    common.console().print(render(rows))
    for note in dict.fromkeys(row.note for row in rows if row.note):
        common.console().print(f"note: {note}", markup=False)
    if options.json:
        with replacing(options.json) as part:
            part.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
