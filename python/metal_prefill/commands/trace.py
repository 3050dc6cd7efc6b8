"""``metal-prefill trace``: a timeline of the dispatches."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from metal_prefill.commands import common

if TYPE_CHECKING:
    from metal_prefill.gpu._trace import Step
    from metal_prefill.session import Session

EXAMPLE = "metal-prefill trace -p 64 -n 4"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_model_arguments(parser)
    common.add_number(parser, "-p --prompt", "length of the prompt in tokens", 512)
    what = "number of tokens to decode after the prompt"
    common.add_number(parser, "-n --n-gen", what, 0, common.not_negative)
    what = "output file for chrome://tracing or ui.perfetto.dev"
    common.add_option(parser, "-o --output", what, Path("trace.json"), type=Path, metavar="FILE")


def execute(arguments: argparse.Namespace) -> None:
    """Run the prompt and write the file."""
    from metal_prefill import __version__
    from metal_prefill._support.atomic_write import replacing
    from metal_prefill.gpu._self_test import known_tokens
    from metal_prefill.gpu._trace import GPU_CLOCK, HOST_CLOCK, SERIALIZED, chrome_trace, runs_on_host

    output: Path = arguments.output
    with replacing(output) as part:  # report an unwritable file before the work
        with common.open_model(arguments, generates=arguments.n_gen > 0) as model:
            tokens = known_tokens(arguments.prompt, model.config.vocab_size).tolist()
            with model.session() as session, common.progress_bar("tracing", "tokens") as progress:
                steps = trace_session(session, tokens, arguments.n_gen, progress)
            metadata = {
                "version": __version__,
                "device": model.device,
                "model": str(model.path),
                "n_prompt": arguments.prompt,
                "n_gen": arguments.n_gen,
                "clock": HOST_CLOCK if runs_on_host(model.device) else GPU_CLOCK,
                "dispatches": SERIALIZED,
            }
        with open(part, "w", encoding="utf-8") as file:
            json.dump(chrome_trace(steps, metadata), file)
    n = sum(len(step.dispatches) for step in steps)
    print(f"{output}: {n} dispatches of {metadata['device']}", file=sys.stderr)


def trace_session(
    session: Session, tokens: Sequence[int], decode: int, progress: Callable[[int, int], object] | None = None
) -> list[Step]:
    """Process a prompt and continue it greedily by `decode` tokens, running each dispatch separately.

    Raises the errors of :meth:`metal_prefill.Session.plan` for all of the tokens before anything runs.
    """
    from metal_prefill.gpu._trace import Step

    total = len(tokens) + decode
    session.plan(total)

    def report(done: int, _: int = 0) -> None:
        if progress is not None:
            progress(done, total)

    token, dispatches = session.trace(tokens, progress=report)
    steps = [Step(len(tokens), dispatches)]
    for i in range(decode):
        token, dispatches = session.trace([token])
        steps.append(Step(1, dispatches))
        report(len(tokens) + i + 1)
    return steps
