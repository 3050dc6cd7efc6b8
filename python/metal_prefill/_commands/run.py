"""``metal-prefill run``: continue a prompt and say how fast it went."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from metal_prefill._commands import common


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    common.add_model_arguments(parser)
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("-p", "--prompt", metavar="TEXT", help="text to continue")
    prompt.add_argument("-f", "--file", metavar="FILE", help="file that holds the prompt; - is stdin")
    parser.add_argument(
        "-n",
        "--max-tokens",
        type=common.not_negative,
        default=128,
        metavar="N",
        help="tokens to make (default: 128)",
    )
    common.add_sampling_arguments(parser).add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before TEXT; repeatable"
    )
    common.add_engine_arguments(parser)


@dataclass
class Timing:
    """When things happened, in seconds of a monotonic clock.

    The prompt's time ends with its last logits. The first new token comes from them, so `n` new tokens take
    `n - 1` further passes through the model: those are what decoding is measured by.
    """

    prompt_tokens: int
    begin: float = 0.0
    prompt_done: float = 0.0
    end: float = 0.0
    decoded: int = 0

    def line(self) -> str:
        """Both rates in tokens per second, measured separately."""
        prompt_s, decode_s = self.prompt_done - self.begin, self.end - self.prompt_done
        text = f"prompt: {_tokens(self.prompt_tokens)}, {self.prompt_tokens / prompt_s:.1f} tok/s"
        if self.decoded and decode_s > 0:
            text += f"  |  decode: {_tokens(self.decoded)}, {self.decoded / decode_s:.1f} tok/s"
        return text


def _tokens(count: int) -> str:
    return "1 token" if count == 1 else f"{count} tokens"


def read_prompt(arguments: argparse.Namespace) -> str:
    """Return the prompt's text from the option, a file or stdin."""
    if arguments.file is None:
        return str(arguments.prompt)
    if arguments.file == "-":
        return sys.stdin.read()
    try:
        return Path(arguments.file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise common.UsageError(f"{arguments.file} is not UTF-8 text: {error}") from error


def execute(arguments: argparse.Namespace) -> None:
    """Stream the prompt and its continuation to stdout, and the rates to stderr."""
    prompt = read_prompt(arguments)
    with common.open_model(arguments) as model:
        ids = model.tokenizer.encode(prompt)
        timing = Timing(prompt_tokens=len(ids))
        with common.progress_bar("prompt", "tokens", len(ids) >= common.PROGRESS_FROM) as progress:

            def on_progress(done: int, total: int) -> None:
                if done == total:
                    timing.prompt_done = time.perf_counter()
                if progress is not None:
                    progress(done, total)

            pieces = model.generate(
                ids,
                arguments.max_tokens,
                stop=arguments.stop,
                progress=on_progress,
                **common.sampling_options(arguments),
            )
            timing.begin = time.perf_counter()
            first = next(pieces, "")
        try:
            print(prompt, first, sep="", end="", flush=True)
            for piece in pieces:
                print(piece, end="", flush=True)
        finally:
            timing.end = time.perf_counter()
            timing.decoded = model.position - len(ids)
            print(flush=True)
        if timing.prompt_done:
            print(timing.line(), file=sys.stderr)
