"""``metal-prefill run --beams``: the most probable continuations of a prompt."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict
from typing import Any

from metal_prefill.commands import common
from metal_prefill.generation._sampling import Options


def check(arguments: argparse.Namespace) -> None:
    """Reject options that do not apply to beam search.

    Raises
    ------
    UsageError
        An option for sampling, penalties, speculative decoding or constraints is set; or there are several
        prompts, or more answers than beams.
    """
    without_meaning: dict[str, Any] = {
        **asdict(Options()),
        "logit_bias": [],
        "seed": None,
        "speculate": "lookup",
        "json_schema": None,
        "prompts": None,
        "output": None,
    }
    for name, default in without_meaning.items():
        if getattr(arguments, name) != default:
            raise common.UsageError(f"--beams does not support --{name.replace('_', '-')}")
    if len(arguments.prompt or []) > 1:
        raise common.UsageError("--beams supports only one prompt")
    if arguments.answers > arguments.beams:
        raise common.UsageError(f"--answers {arguments.answers} must be at most --beams {arguments.beams}")
    if arguments.max_tokens < 1:
        raise common.UsageError("--beams requires -n of at least 1")


def execute(arguments: argparse.Namespace, prompt: str) -> None:
    """Print the best texts to stdout, and the duration of the search to stderr."""
    with common.open_model(arguments, generates=True) as model:
        begin = time.perf_counter()
        beams = model.generate_beams(
            prompt,
            arguments.max_tokens,
            num_beams=arguments.beams,
            length_penalty=1.0 if arguments.length_penalty is None else arguments.length_penalty,
            min_tokens=arguments.min_tokens,
            stop=[*arguments.stop, *arguments.stop_token],
            echo=True,
        )
        seconds = time.perf_counter() - begin
    best = beams[: arguments.answers]
    notes = [f"score {beam.score:.4f}, {beam.finish_reason}" for beam in best]
    common.print_answers([beam.text for beam in best], sys.stdout, notes)
    print(f"{arguments.beams} beams in {seconds:.1f} s; best score {beams[0].score:.4f}", file=sys.stderr)
