"""``metal-prefill run``: continue one prompt or a batch of prompts, and report the speed."""

import argparse
import json
import sys
import time
from typing import Any

from metal_prefill._support.messages import counted
from metal_prefill.commands import common

EXAMPLE = "metal-prefill run -p 'ROMEO:' -n 20"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_model_arguments(parser)
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument(
        "-p",
        "--prompt",
        action="append",
        metavar="TEXT",
        help="text to continue; repeatable, several are continued as a batch",
    )
    prompt.add_argument("-f", "--file", metavar="FILE", help="file that holds the prompt; - is stdin")
    prompt.add_argument(
        "--prompts",
        metavar="JSONL",
        help='file of prompts, one per line: a string, or an object with "prompt" and options such as '
        '"max_tokens"; - is stdin. Results are JSON lines',
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="JSONL",
        help="write results as JSON lines, in the order of the prompts; a file that holds the first ones is "
        "continued",
    )
    common.add_number(parser, "--streams", "maximum number of prompts in flight", 32)
    what = "maximum number of tokens to generate"
    common.add_number(parser, "-n --max-tokens", what, 128, common.not_negative)
    common.add_number(
        parser,
        "--answers",
        "number of texts per prompt, which is computed once; each has separate random numbers, from the "
        "seed and its number",
        1,
    )
    sampling = common.add_sampling_arguments(parser)
    sampling.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before TEXT; repeatable"
    )
    parser.add_argument(
        "--json-schema",
        metavar="FILE",
        help="constrain the text to JSON that matches the schema in FILE (requires the extra guide)",
    )


def constraint(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the constraint on all texts, as an option of each."""
    path = arguments.json_schema
    if path is None:
        return {}
    try:
        return {"json_schema": json.loads(common.read_text(path))}
    except (json.JSONDecodeError, RecursionError) as error:
        raise common.UsageError(f"{path} is not JSON: {error}") from error


def read_prompt(arguments: argparse.Namespace) -> str:
    """Return the text of the prompt from the option, a file or stdin."""
    if arguments.file is None:
        return str(arguments.prompt[0])
    return common.read_text(arguments.file)


def execute(arguments: argparse.Namespace) -> None:
    """Continue one prompt as a stream, or several prompts as a batch."""
    many = arguments.prompts is not None or arguments.output is not None or len(arguments.prompt or []) > 1
    if many or arguments.answers > 1:
        from metal_prefill.commands import run_many

        texts = [read_prompt(arguments)] if arguments.file is not None else arguments.prompt
        run_many.execute(arguments, texts, constraint(arguments))
    else:
        continue_one(arguments)


def continue_one(arguments: argparse.Namespace) -> None:
    """Stream the prompt and its continuation to stdout, and the rates to stderr."""
    prompt = read_prompt(arguments)
    with common.open_model(arguments, generates=True) as model:
        ids = model.tokenizer.encode(prompt)
        prompt_done = 0.0
        with common.progress_bar("prompt", "tokens", len(ids) >= common.PROGRESS_FROM) as progress:

            def on_progress(done: int, total: int) -> None:
                nonlocal prompt_done
                if done == total:
                    prompt_done = time.perf_counter()
                if progress is not None:
                    progress(done, total)

            pieces = model.generate(
                ids,
                arguments.max_tokens,
                stop=arguments.stop,
                progress=on_progress,
                **common.sampling_options(arguments),
                **common.speculation(arguments),
                **constraint(arguments),
            )
            begin = time.perf_counter()
            first = next(pieces, "")
        try:
            print(prompt, first, sep="", end="", flush=True)
            for piece in pieces:
                print(piece, end="", flush=True)
        finally:
            end, decoded = time.perf_counter(), model.position - len(ids)
            print(flush=True)
        if prompt_done:
            print(_rates(len(ids), prompt_done - begin, decoded, end - prompt_done), file=sys.stderr)


def _rates(prompt_tokens: int, prompt_s: float, decoded: int, decode_s: float) -> str:
    """Return a line with the rates of prompt and decoding in tokens per second.

    The prompt's time ends with its last logits, which determine the first new token. `n` new tokens therefore
    take `n - 1` further passes, from which the decoding speed is computed.
    """
    text = f"prompt: {counted(prompt_tokens, 'token')}, {prompt_tokens / prompt_s:.1f} tok/s"
    if decoded and decode_s > 0:
        text += f"  |  decode: {counted(decoded, 'token')}, {decoded / decode_s:.1f} tok/s"
    return text
