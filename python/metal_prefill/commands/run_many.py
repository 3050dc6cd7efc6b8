"""``metal-prefill run`` with many prompts: continuous batches, results in the order of the prompts."""

import argparse
import itertools
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from metal_prefill._support.messages import counted
from metal_prefill.commands import common
from metal_prefill.commands.result_lines import Prompt, continued, read_prompts
from metal_prefill.errors import MetalPrefillError
from metal_prefill.generation._many import pieces_of
from metal_prefill.generation._sampling import Options, core_sampler
from metal_prefill.generation._scheduler import Scheduler
from metal_prefill.generation._text_generation import split_stops


@dataclass
class Answer:
    """A continuation of a prompt."""

    pieces: list[str] = field(default_factory=list)
    finish_reason: str = ""  # see :class:`metal_prefill.generation.Stream`; empty while it is in progress


@dataclass
class Result:
    """Result of a prompt."""

    prompt: Prompt
    answers: list[Answer]
    error: str  # empty on success

    @property
    def done(self) -> bool:
        """Whether all answers are complete."""
        return bool(self.error) or all(answer.finish_reason for answer in self.answers)

    def line(self, **more: Any) -> str:
        """Return the result as a line of JSON that ends with `more`."""
        if self.error:
            return self.prompt.line(error=self.error, **more)
        entries = [
            {"continuation": "".join(a.pieces), "finish_reason": a.finish_reason} for a in self.answers
        ]
        found: dict[str, Any] = {**entries[0]} if len(entries) == 1 else {"answers": entries}
        return self.prompt.line(**found, **more)


def in_order(
    scheduler: Scheduler, prompts: Iterator[Prompt], options: Mapping[str, Any], answers: int = 1
) -> Iterator[Result]:
    """Continue prompts in continuous batches, and yield the results in the order of the prompts.

    Prompts are read when there is room for them; their options override the common ones.
    """
    waiting: deque[Result] = deque()
    under_way: dict[int, tuple[Result, Answer]] = {}
    begun = itertools.count()

    def submitted() -> Iterator[tuple[str | list[int], dict[str, Any]]]:
        for prompt in prompts:
            result = Result(prompt, [Answer() for _ in range(answers)], prompt.error)
            waiting.append(result)
            if prompt.text is not None and not prompt.error:
                under_way.update((next(begun), (result, answer)) for answer in result.answers)
                yield prompt.text, prompt.options

    for index, piece in pieces_of(scheduler, submitted(), answers, options):
        result, answer = under_way[index]
        if isinstance(piece, Exception):
            result.error = str(piece) or type(piece).__name__
        else:
            answer.pieces.append(piece.text)
            answer.finish_reason = piece.finish_reason or ""
        if answer.finish_reason or isinstance(piece, Exception):
            del under_way[index]
        while waiting and waiting[0].done:
            yield waiting.popleft()
    yield from waiting


def checked_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the default options; invalid values are an error of the command, not of each prompt."""
    if arguments.max_tokens < 1:
        raise common.UsageError("several prompts require -n of at least 1")
    options = common.sampling_options(arguments)
    choosing = {name: value for name, value in options.items() if name != "seed"}
    core_sampler(Options(**choosing), options["seed"], [])
    return {
        **options,
        **common.speculation(arguments),
        "max_tokens": arguments.max_tokens,
        "stop": split_stops(arguments.stop, vocab_size=0)[0],
    }


def recorded_options(arguments: argparse.Namespace, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that affect results, as JSON values."""
    model = None if arguments.model is None else Path(arguments.model).name
    chosen = {name: value for name, value in options.items() if name != "speculate"}  # has no effect on them
    return {"model": model, "answers": arguments.answers, **chosen}


def execute(
    arguments: argparse.Namespace, texts: Sequence[str] | None, constraint: Mapping[str, Any]
) -> None:
    """Continue `texts`, or the prompts of a file; write JSON lines to a file or stdout, or texts to stdout.

    Raises MetalPrefillError if some prompts failed; all results are written.
    """
    options = {**checked_options(arguments), **constraint}
    done_before = failed_before = failed = 0
    as_lines = arguments.prompts is not None or arguments.output is not None
    out: IO[str] = sys.stdout  # the progress bar replaces sys.stdout
    with ExitStack() as stack:
        if texts is None:
            total, prompts = stack.enter_context(read_prompts(arguments.prompts))
        else:
            total, prompts = len(texts), (Prompt(text) for text in texts)
        if arguments.output is not None:
            made_with = recorded_options(arguments, options)
            results = stack.enter_context(continued(arguments.output, prompts, made_with))
            out, prompts = results.file, results.prompts
            done_before, failed_before = results.done, results.failed
        model = stack.enter_context(common.open_model(arguments, generates=True))
        bar = total > 1 and not out.isatty()  # on a terminal, the texts themselves show the progress
        progress = stack.enter_context(common.progress_bar("prompts", "prompts", bar))
        begin = time.perf_counter()
        done = done_before
        scheduler = Scheduler(model, max_streams=max(arguments.streams, arguments.answers))
        for result in in_order(scheduler, prompts, options, arguments.answers):
            done += 1
            failed += bool(result.error)
            if as_lines:
                first = {"options": made_with} if done == 1 and arguments.output is not None else {}
                print(result.line(**first), end="", file=out, flush=True)
            elif result.error:
                print(f"error: prompt {done}: {result.error}", file=sys.stderr)
            else:
                for i, answer in enumerate(result.answers, 1):
                    if len(result.answers) > 1:
                        print(f"--- answer {i} of {len(result.answers)}", file=out)
                    print(result.prompt.text, *answer.pieces, sep="", file=out, flush=True)
            if progress is not None:
                progress(done, total)
        seconds = time.perf_counter() - begin
    print(summary(done - done_before, failed, done_before, seconds), file=sys.stderr)
    if failed + failed_before:
        place = f"; {arguments.output} has their errors" if arguments.output is not None else ""
        raise MetalPrefillError(f"{failed + failed_before} of {total} prompts failed{place}")


def summary(done: int, failed: int, done_before: int, seconds: float) -> str:
    """Summarize the number of prompts, the time, and the numbers of failed and previously done prompts."""
    text = f"{counted(done, 'prompt')} in {seconds:.1f} s"
    if failed:
        text += f", {failed} failed"
    return text + (f"; {counted(done_before, 'prompt')} done before" if done_before else "")
