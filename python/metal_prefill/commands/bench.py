"""``metal-prefill bench``."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console

from metal_prefill import bench, default_model_path
from metal_prefill._support.atomic_write import check_target, replacing
from metal_prefill.bench._cases import DECODE_DEPTH
from metal_prefill.bench._engines import peers
from metal_prefill.bench._runner import Progress, no_progress
from metal_prefill.commands import common

EXAMPLE = "metal-prefill bench --demo -p 64 -n 8 -r 1"

# Modes; the first one is measured if none is named.
MODES = {
    "tokens": "measure prefill and decode (the default)",
    "embed": "measure an embedding model on 64 texts of 8 to 512 tokens",
    "serve": "measure servers: this package's and those of --compare (llama-cpp-python,llama-server)",
    "agents": "replay sessions of agents on servers, and count the tokens of prompts that they compute",
}
_FUNCTIONS = {"embed": "run_embeddings", "serve": "run_serving", "agents": "run_agents"}  # others: run
# Arguments that no function of `bench` has.
_OWN = ("command", "version", "execute", "parser", "mode", "model", "demo", "json")


def _names(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _numbers(parser: argparse.ArgumentParser, flags: str, text: str, default: Sequence[int] = ()) -> None:
    shown = f" (default: {','.join(map(str, default))})" if default else ""
    parser.add_argument(
        *flags.split(), type=common.positives, default=list(default), metavar="N,N,...", help=text + shown
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the modes of the command, each with its options."""
    modes = parser.add_subparsers(dest="mode", metavar="MODE", title="what to measure", required=True)
    for name, text in MODES.items():
        added = modes.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        added.set_defaults(parser=added)
        model = added.add_mutually_exclusive_group()
        made = "SmolLM-135M's shape with random weights, written once and cached"
        common.add_model_argument(model, made)
        model.add_argument("--demo", action="store_true", help="measure the bundled model")
        if name == "tokens":
            _add_token_arguments(added)
        elif name == "embed":
            _numbers(added, "--text-tokens", "lengths of texts in tokens, instead of texts of many lengths")
            _numbers(added, "--text-counts", "with --text-tokens: numbers of texts in a call (default: 64)")
        elif name == "serve":
            _numbers(added, "--clients", "numbers of concurrent requests", (1, 8, 32))
        if name != "agents":
            common.add_number(added, "-r --repetitions", "number of samples per test", 5)
        _add_shared_arguments(added, name)


def _add_token_arguments(parser: argparse.ArgumentParser) -> None:
    _numbers(parser, "-p --prompts", "lengths of the prompts in tokens", (32, 128, 512))
    common.add_number(parser, "-n --n-gen", "tokens to decode", 64, common.not_negative)
    before = "tokens in the context before decoding is timed"
    common.add_number(parser, "-d --depth", before, DECODE_DEPTH)
    _numbers(
        parser,
        "--streams",
        "also decode this many sequences in one batch, and process 64 prompts of 16 tokens in one batch",
    )
    parser.add_argument(
        "--sampled",
        action="store_true",
        help="also measure sampling inside the engines, with the same settings, alternating with greedy ones",
    )
    parser.add_argument(
        "--speculate",
        action="store_true",
        help="also measure copying a text, with and without speculative decoding by lookup",
    )


def _add_shared_arguments(parser: argparse.ArgumentParser, mode: str) -> None:
    serves = mode in ("serve", "agents")
    if serves:
        common.add_number(parser, "-t --threads", "CPU threads")
    else:
        wait = "maximum seconds to wait for a busy machine and to repeat samples"
        common.add_number(parser, "--patience", wait, 60.0, float, "S")
        common.add_engine_arguments(parser)
    output = parser.add_argument_group("output")
    output.add_argument(
        "--compare",
        type=_names,
        default=[],
        metavar="llama-cpp-python,llama-server" if serves else ",".join(peers(embeds=mode == "embed")),
        help="also measure others on the same file, alternating with this package"
        + ("; llama-server may be the path of its program" if serves else ""),
    )
    output.add_argument(
        "--json", metavar="FILE", help="write the rows as JSON; - prints them instead of the table"
    )


def execute(arguments: argparse.Namespace) -> None:
    """Measure, then print a table or JSON."""
    model = default_model_path() if arguments.demo else common.model_path(arguments.model)
    # Report an unwritable file before measuring, which takes minutes.
    if arguments.json and arguments.json != "-":
        check_target(arguments.json)
    options = {name: value for name, value in vars(arguments).items() if name not in _OWN}
    measure = getattr(bench, _FUNCTIONS.get(arguments.mode, "run"))
    with _shown_progress() as progress:
        results = measure(model, progress=progress, **options)
    if arguments.json == "-":
        print(results.to_json())
    else:
        common.console().print(results)
        if arguments.json:
            with replacing(arguments.json) as part:
                part.write_text(results.to_json() + "\n", encoding="utf-8")


@contextmanager
def _shown_progress() -> Iterator[Progress]:
    """Show the current measurement and its progress on stderr, if that is a terminal."""
    if not sys.stderr.isatty():
        yield no_progress
        return
    with Console(stderr=True).status("") as status:
        yield lambda what, done, total: status.update(f"{what}  {done}/{total}")
