"""Helpers shared by commands: engine and sampling options, progress bars."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TextIO

from metal_prefill._support.atomic_write import lock
from metal_prefill._support.choices import AUTO, COMPUTE, DEVICES, KV_DTYPES

if TYPE_CHECKING:
    from rich.console import Console

    from metal_prefill import Model

MIB = 1 << 20
WIDTH_OF_FILES = 160  # columns of a table written to a file or pipe
MODEL_HELP = (
    "GGUF file; or a folder with config.json and model.safetensors; or smollm2 or minilm, for "
    "SmolLM2-135M-Instruct or all-MiniLM-L6-v2 from a package; or owner/repo or owner/repo:file on the "
    "Hugging Face Hub, where file may be a pattern such as '*Q4_0.gguf'"
)
_MODEL_OPTIONS = ("device", "threads", "max_context", "mmap", "pack_cache")  # also of a draft model
MEMORY_OPTIONS = ("kv_memory", "prefix_memory")  # supported by some commands
PROGRESS_FROM = 1024  # tokens; shorter prompts finish too soon for a progress bar


class UsageError(ValueError):
    """The arguments of the command line contradict each other."""


def lock_output(file: IO[bytes], path: str | Path) -> None:
    """Lock an open file until it is closed; raise UsageError if another process is writing `path`."""
    try:
        lock(file, wait=False)
    except BlockingIOError:
        raise UsageError(f"{path}: another process is writing it") from None


def standard_input() -> TextIO:
    """Return the standard input; raises UsageError if it is closed, as by ``<&-`` in a shell."""
    # sys.stdin is None if file descriptor 0 is closed, which its declared type does not include.
    stream: TextIO | None = sys.stdin
    if stream is None:
        raise UsageError("standard input is closed; pass a file, or connect standard input")
    return stream


def read_text(path: str | Path) -> str:
    """Read a file in UTF-8, or the standard input if `path` is ``"-"``, without a byte order mark."""
    if path == "-":
        return standard_input().read().removeprefix("\ufeff")
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text: {error}") from error


def _integers(least: int, most: float = math.inf) -> Callable[[str], int]:
    """Return a parser of integers within limits, for argparse."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be an integer, got {text!r}") from None
        if not least <= value <= most:
            limit = f"at least {least}" if value < least else f"at most {most}"
            raise argparse.ArgumentTypeError(f"must be {limit}, got {value}")
        return value

    return parse


positive, not_negative = _integers(1), _integers(0)
port = _integers(0, 65535)  # 0 picks a free one


def positives(text: str) -> list[int]:
    """Parse comma-separated positive integers, or none, for argparse."""
    return [positive(word) for word in text.split(",")] if text else []


def add_option(
    parser: argparse._ActionsContainer,
    flags: str,  # names of the option, separated by spaces
    help: str,
    default: float | str | Path | None = None,
    **options: Any,  # of ``add_argument``
) -> None:
    """Add an option, whose help ends with the default if there is one."""
    if default is not None:
        options["default"] = default
        shown = f"{default:,}" if isinstance(default, int) and default >= 10_000 else default
        help += f" (default: {shown:g})" if isinstance(shown, float) else f" (default: {shown})"
    parser.add_argument(*flags.split(), help=help, **options)


def add_number(
    parser: argparse._ActionsContainer,
    flags: str,
    help: str,
    default: float | None = None,
    type: Callable[[str], float] = positive,
    metavar: str = "N",
) -> None:
    """Add an option with a number; see `add_option`."""
    add_option(parser, flags, help, default, type=type, metavar=metavar)


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose device, threads and number formats."""
    engine = parser.add_argument_group("engine")
    add_number(engine, "-t --threads", "CPU threads (default: one per core)")
    add_option(engine, "--device", "engine to use", AUTO, choices=DEVICES)
    engine.add_argument(
        "--compute",
        choices=COMPUTE,
        default=AUTO,
        help="number format of activations in products with quantized weights: 8 bits per block of 32; w8a8 "
        "and int16, 8 or 10 to 12 bits per row after a rotation (weights, too); bfloat16 (weights, too); or "
        "float32. int8 also allows bfloat16 with weights in bfloat16 (default: auto, which for encoders is "
        "bf16 or int16 if that is faster and close to float32, and int8 otherwise)",
    )
    what = "number format of the KV cache; q8_0, in 8 bits, takes half of the memory of f16"
    add_option(engine, "--kv-dtype", what, "f16", choices=KV_DTYPES)


# Type, default, unit and help of the options of `sampling_options`, by name.
_SAMPLING: Mapping[str, tuple[Callable[[str], float], float | None, str, str]] = {
    "temperature": (float, 0.0, "X", "divisor of the logits; 0 selects greedy decoding"),
    "top_k": (int, 0, "K", "keep the K most probable tokens; 0 keeps all"),
    "top_p": (float, 1.0, "P", "keep the most probable tokens whose probabilities add up to P"),
    "min_p": (float, 0.0, "P", "keep tokens of at least P times the highest probability"),
    "repeat_penalty": (float, 1.0, "X", "penalty on recent tokens; 1 disables it"),
    "frequency_penalty": (
        *(float, 0.0, "X"),
        "subtracted from the logit of a recent token once per occurrence",
    ),
    "presence_penalty": (float, 0.0, "X", "subtracted from the logit of a recent token"),
    "seed": (int, None, "N", "seed of the random numbers (default: a new one each time)"),
}


def add_sampling_arguments(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the sampling options; `sampling_options` returns their values."""
    sampling = parser.add_argument_group("sampling")
    for name, (kind, default, metavar, text) in _SAMPLING.items():
        add_number(sampling, f"--{name.replace('_', '-')}", text, default, kind, metavar)
    add_option(
        sampling,
        "--speculate",
        "speculative decoding, which does not change the text: lookup drafts from earlier occurrences "
        "of the same tokens; off; or a small model with the same vocabulary, as for -m",
        "lookup",
        metavar="HOW",
    )
    return sampling


def sampling_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling options of :meth:`metal_prefill.Session.generate`."""
    return {name: getattr(arguments, name) for name in _SAMPLING}


def speculation(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the ``speculate`` option, opening the draft model if one is named."""
    how = arguments.speculate
    if how in ("lookup", "off"):
        return {"speculate": how}
    from metal_prefill import Model

    options = {name: getattr(arguments, name) for name in _MODEL_OPTIONS}
    return {"speculate": Model(model_path(how), **options)}


def add_model_argument(parser: argparse._ActionsContainer, default: str = "the bundled model") -> None:
    """Add ``-m``; `default` names the model that is used without it."""
    add_option(parser, "-m --model", f"{MODEL_HELP} (default: {default})", metavar="FILE")


def add_adapter_argument(parser: argparse.ArgumentParser, what: str) -> None:
    """Add ``--adapter``."""
    add_option(
        parser, "--adapter", f"LoRA adapter to merge into the weights{what}", type=Path, metavar="ADAPTER"
    )


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `open_model`."""
    add_model_argument(parser)
    add_adapter_argument(parser, " of a model folder: a folder, or the name of one in it")
    parser.add_argument(
        "--no-mmap",
        dest="mmap",
        action="store_false",
        help="read the model file instead of mapping it, in case other programs truncate or modify it",
    )
    parser.add_argument(
        "--pack-cache",
        action="store_true",
        help="CPU: store packed weights in a file, so that the model opens faster the next time; "
        "`metal-prefill cache` lists and deletes these files",
    )
    add_number(parser, "--max-context", "maximum number of tokens in the context (default: the model's)")
    add_engine_arguments(parser)


def model_path(name: str | None, adapter: Path | None = None) -> Path | None:
    """Return the GGUF file of the model named by an option, fetched and converted if necessary, or None."""
    from metal_prefill.hub import default_model_path
    from metal_prefill.hub._local_file import local_file

    if name is None and adapter is None:
        return None
    with ExitStack() as stack:
        bar = cache(lambda: stack.enter_context(progress_bar("converting", "bytes")))

        def progress(done: int, total: int) -> None:
            if (update := bar()) is not None:
                update(done, total)

        return local_file(default_model_path() if name is None else name, adapter, progress)


def open_model(arguments: argparse.Namespace, *, generates: bool = False) -> Model:
    """Open the model with the given options; with `generates`, raises ValueError for an encoder."""
    from metal_prefill import Model

    model = Model(
        model_path(arguments.model, arguments.adapter),
        **{name: getattr(arguments, name) for name in (*_MODEL_OPTIONS, "compute", "kv_dtype")},
        **{name: value for name in MEMORY_OPTIONS if (value := getattr(arguments, name, None)) is not None},
    )
    if generates:
        try:
            model.engine.check_generates()
        except ValueError:
            model.close()
            raise
    return model


def console() -> Console:
    """Return a console on stdout, with a fixed width for files and pipes."""
    from rich.console import Console

    class Output(Console):
        def on_broken_pipe(self) -> None:
            raise  # the BrokenPipeError, for which rich would exit with 1

    return Output(width=None if sys.stdout.isatty() else WIDTH_OF_FILES)


@contextmanager
def progress_bar(what: str, unit: str, enabled: bool = True) -> Iterator[Callable[[int, int], None] | None]:
    """Show a progress bar on stderr while the body runs; yield a callback for the amount done and the total.

    If stderr is not a terminal or `enabled` is false, nothing is shown and the callback is None.
    """
    if not enabled or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[count]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None, count="")
        yield lambda done, total: bar.update(
            task, completed=done, total=total, count=f"{done:,}/{total:,} {unit}"
        )
