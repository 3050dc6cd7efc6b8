"""``metal-prefill bench``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from metal_prefill._support.atomic_write import check_target, replacing
from metal_prefill.bench._cases import DECODE_DEPTH
from metal_prefill.bench._engines import KINDS, OURS
from metal_prefill.commands import common

if TYPE_CHECKING:
    from metal_prefill.bench import BenchResults, ServingResults


def _lengths(text: str) -> list[int]:
    return common.positives(text) if text else []


def _names(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "-m",
        "--model",
        metavar="FILE",
        help=f"{common.MODEL_HELP} (default: SmolLM-135M's shape with random weights, written once and "
        "cached)",
    )
    parser.add_argument("positional_model", nargs="?", metavar="FILE", help="the same as -m FILE")
    parser.add_argument("--demo", action="store_true", help="measure the bundled model")
    parser.add_argument(
        "-p",
        "--prompts",
        type=_lengths,
        default=[32, 128, 512],
        metavar="N,N,...",
        help="lengths of the prompts in tokens (default: 32,128,512)",
    )
    parser.add_argument(
        "-n",
        "--n-gen",
        type=common.not_negative,
        default=64,
        metavar="N",
        help="tokens to decode (default: 64)",
    )
    parser.add_argument(
        "-d",
        "--depth",
        type=common.positive,
        default=DECODE_DEPTH,
        metavar="N",
        help=f"tokens in the context before decoding is timed (default: {DECODE_DEPTH})",
    )
    parser.add_argument(
        "--streams",
        type=_lengths,
        default=[],
        metavar="N,N,...",
        help="also decode this many sequences in one batch, and process 64 prompts of 16 tokens in one batch",
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
    parser.add_argument(
        "--embed",
        action="store_true",
        help="measure an embedding model on 64 texts of 8 to 512 tokens instead",
    )
    parser.add_argument(
        "--text-tokens",
        type=_lengths,
        default=[],
        metavar="N,N,...",
        help="with --embed: lengths of texts in tokens, instead of texts of many lengths",
    )
    parser.add_argument(
        "--text-counts",
        type=_lengths,
        default=[],
        metavar="N,N,...",
        help="with --text-tokens: numbers of texts in a call (default: 64)",
    )
    parser.add_argument(
        "--rerank",
        action="store_true",
        help='measure the reranking of 20 documents of 300 tokens for one query instead, by "yes" and "no"',
    )
    parser.add_argument(
        "--evaluate",
        action="store_true",
        help="measure log likelihoods of 4 answers to each of 4 questions instead",
    )
    parser.add_argument(
        "--serve",
        action="store_true",
        help="measure servers instead, this package's and those of --compare (llama-cpp-python,llama-server)",
    )
    parser.add_argument(
        "--clients",
        type=_lengths,
        default=[1, 8, 32],
        metavar="N,N,...",
        help="with --serve: numbers of concurrent requests (default: 1,8,32)",
    )
    parser.add_argument(
        "-r",
        "--repetitions",
        type=common.positive,
        default=5,
        metavar="N",
        help="number of samples per test (default: 5)",
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=60.0,
        metavar="S",
        help="maximum seconds to wait for a busy machine and to repeat samples (default: 60)",
    )
    common.add_engine_arguments(parser)
    output = parser.add_argument_group("output")
    peers = ",".join(name for name in KINDS if name != OURS)
    output.add_argument(
        "--compare",
        type=_names,
        default=[],
        metavar=peers,
        help="also measure other engines on the same file, alternating with this one",
    )
    output.add_argument(
        "--json", metavar="FILE", help="write the rows as JSON; - prints them instead of the table"
    )
    output.add_argument(
        "--plot", metavar="PNG", help="plot speed over prompt length (requires the extra [plot])"
    )


def execute(arguments: argparse.Namespace) -> None:
    """Measure, then print a table or JSON."""
    from metal_prefill import bench, default_model_path
    from metal_prefill.bench import _plot

    named = [arguments.model, arguments.positional_model, "--demo" if arguments.demo else None]
    if len([name for name in named if name]) > 1:
        raise common.UsageError("name the model once: -m FILE, FILE, or --demo for the bundled model")
    if arguments.plot and arguments.serve:
        raise common.UsageError("--plot draws speed over prompt length, which --serve does not measure")
    # Report an unwritable file before measuring, which takes minutes.
    if arguments.plot:
        _plot.check(arguments.plot)
    if arguments.json and arguments.json != "-":
        check_target(arguments.json)
    model = (
        default_model_path()
        if arguments.demo
        else common.model_path(arguments.model or arguments.positional_model)
    )
    if arguments.serve:
        _measure_servers(arguments, model)
        return
    with common.status_line() as show:
        results = bench.run(
            model,
            prompts=arguments.prompts,
            n_gen=arguments.n_gen,
            depth=arguments.depth,
            streams=arguments.streams,
            embed=arguments.embed,
            text_tokens=arguments.text_tokens,
            text_counts=arguments.text_counts,
            rerank=arguments.rerank,
            evaluate=arguments.evaluate,
            sampled=arguments.sampled,
            speculate=arguments.speculate,
            repetitions=arguments.repetitions,
            threads=arguments.threads,
            device=arguments.device,
            compute=arguments.compute,
            kv_dtype=arguments.kv_dtype,
            compare=arguments.compare,
            patience=arguments.patience,
            progress=_counted(show),
        )
    _show(results, arguments.json)
    if arguments.plot:
        results.plot(arguments.plot)


def _counted(show: Callable[[str], object] | None) -> Callable[[str, int, int], object] | None:
    """Return a progress callback that shows the current measurement and its progress."""
    return None if show is None else lambda what, done, total: show(f"{what}  {done}/{total}")


def _measure_servers(arguments: argparse.Namespace, model: Path | None) -> None:
    from metal_prefill import bench

    with common.status_line() as show:
        results = bench.run_serving(
            model,
            clients=arguments.clients,
            compare=arguments.compare,
            repetitions=arguments.repetitions,
            threads=arguments.threads,
            progress=_counted(show),
        )
    _show(results, arguments.json)


def _show(results: BenchResults | ServingResults, file: str | None) -> None:
    """Print a table and optionally write the rows to a JSON file, or print the rows as JSON."""
    if file == "-":
        print(results.to_json())
        return
    common.console().print(results)
    if file:
        with replacing(file) as part:
            part.write_text(results.to_json() + "\n", encoding="utf-8")
