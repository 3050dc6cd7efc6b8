"""``metal-prefill run`` with many prompts: continuous batches, results in the order of the prompts."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from metal_prefill._commands import common
from metal_prefill._commands.result_lines import Prompt, continued, read_prompts
from metal_prefill.errors import MetalPrefillError
from metal_prefill.generation._sampling import Options, core_sampler
from metal_prefill.generation._scheduler import Scheduler
from metal_prefill.generation._stream import REFUSALS, Stream
from metal_prefill.generation._text_generation import split_stops

# Results that may wait for an earlier prompt, which is slower than they were: bounds their memory.
MOST_WAITING = 1024


@dataclass
class Answer:
    """A text that follows a prompt.

    Attributes
    ----------
    pieces : list of str
    finish_reason : str
        See :class:`metal_prefill.Stream`; empty while there may be more text.
    """

    pieces: list[str] = field(default_factory=list)
    finish_reason: str = ""

    def entry(self) -> dict[str, str]:
        """Return it as an object of JSON."""
        return {"continuation": "".join(self.pieces), "finish_reason": self.finish_reason}


@dataclass
class Result:
    """The result of a prompt.

    Attributes
    ----------
    prompt : Prompt
    answers : list of Answer
        The texts that follow it; none before it is submitted.
    error : str
        Why there are none; empty where there are.
    """

    prompt: Prompt
    answers: list[Answer] = field(default_factory=list)
    error: str = ""

    @property
    def done(self) -> bool:
        """Whether nothing of it is under way."""
        return bool(self.error) or all(answer.finish_reason for answer in self.answers)

    def line(self, **more: Any) -> str:
        """Return it as a line of JSON that ends with `more`."""
        if self.error:
            return self.prompt.line(error=self.error, **more)
        entries = [answer.entry() for answer in self.answers]
        found: dict[str, Any] = {**entries[0]} if len(entries) == 1 else {"answers": entries}
        return self.prompt.line(**found, **more)


def in_order(
    scheduler: Scheduler, prompts: Iterator[Prompt], options: Mapping[str, Any], answers: int = 1
) -> Iterator[Result]:
    """Continue prompts together; yield the result of each once those before it are done.

    Parameters
    ----------
    scheduler
        Without streams.
    prompts
        Read as they enter.
    options
        Of all prompts, which those of a prompt override.
    answers
        Texts to make of each prompt.
    """
    waiting: deque[Result] = deque()
    under_way: dict[Stream, tuple[Result, Answer]] = {}
    more = True
    while more or waiting:
        # One prompt more than there is room for: the next one enters with the pass after the one that ends.
        while more and scheduler.streams <= scheduler.max_streams and len(waiting) < MOST_WAITING:
            prompt = next(prompts, None)
            if prompt is None:
                more = False
                break
            result = Result(prompt)
            waiting.append(result)
            try:
                for stream in _submit(scheduler, prompt, answers, options):
                    result.answers.append(Answer())
                    under_way[stream] = result, result.answers[-1]
            except REFUSALS as error:
                result.error = str(error)
        for stream, piece in scheduler.step():
            under_way[stream][1].pieces.append(piece)
        for stream in [s for s in under_way if s.finish_reason is not None]:
            result, answer = under_way.pop(stream)
            answer.finish_reason = stream.finish_reason or ""
            if stream.error is not None:
                result.error = str(stream.error) or type(stream.error).__name__
        while waiting and waiting[0].done:
            yield waiting.popleft()


def _submit(scheduler: Scheduler, prompt: Prompt, answers: int, options: Mapping[str, Any]) -> list[Stream]:
    if prompt.text is None or prompt.error:
        raise ValueError(prompt.error)
    return scheduler.submit_answers(prompt.text, answers, **{**options, **prompt.options})


def checked_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options of all prompts; wrong ones are an error of the command, not of each prompt."""
    if arguments.max_tokens < 1:
        raise common.UsageError("many prompts are continued by at least 1 token: -n 1 or more")
    options = common.sampling_options(arguments)
    choosing = {name: value for name, value in options.items() if name not in ("seed", "min_tokens")}
    core_sampler(Options(**choosing), options["seed"], [])
    return {
        **options,
        **common.speculation(arguments),
        "max_tokens": arguments.max_tokens,
        "stop": [*split_stops(arguments.stop, vocab_size=0)[0], *arguments.stop_token],
    }


def recorded_options(arguments: argparse.Namespace, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what results depend on besides their prompts, as JSON reads it."""
    model = None if arguments.model is None else Path(arguments.model).name
    chosen = {name: value for name, value in options.items() if name != "speculate"}  # changes no result
    written = json.dumps({"model": model, "answers": arguments.answers, **chosen})
    recorded: dict[str, Any] = json.loads(written, parse_constant=str)  # a bias may be -inf
    return recorded


def execute(
    arguments: argparse.Namespace, texts: Sequence[str] | None, constraint: Mapping[str, Any]
) -> None:
    """Continue prompts; lines of JSON go to a file or stdout, texts of several ``-p`` to stdout.

    Parameters
    ----------
    arguments
        Of the command.
    texts
        The prompts; None where ``--prompts`` names a file of them.
    constraint
        On each text that has none of its own.
    """
    options = {**checked_options(arguments), **constraint}
    done_before = failed = 0
    as_lines = arguments.prompts is not None or arguments.output is not None
    out: IO[str] = sys.stdout  # which the bar takes for itself
    with ExitStack() as stack:
        if texts is None:
            total, prompts = stack.enter_context(read_prompts(arguments.prompts))
        else:
            total, prompts = len(texts), (Prompt(text) for text in texts)
        if arguments.output is not None:
            made_with = recorded_options(arguments, options)
            results = stack.enter_context(continued(arguments.output, prompts, made_with))
            out, prompts, done_before = results.file, results.prompts, results.done
        model = stack.enter_context(common.open_model(arguments))
        bar = total > 1 and not out.isatty()  # texts that appear show how far it is
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
                texts_made = ["".join([str(result.prompt.text), *answer.pieces]) for answer in result.answers]
                common.print_answers(texts_made, out)
            if progress is not None:
                progress(done, total)
        seconds = time.perf_counter() - begin
    print(summary(done - done_before, failed, done_before, seconds), file=sys.stderr)
    if failed and not as_lines:
        raise MetalPrefillError(f"{failed} of {total} prompts failed")


def summary(done: int, failed: int, done_before: int, seconds: float) -> str:
    """Say how many prompts were continued, how long that took, and how many failed or were done before."""
    text = f"{_prompts(done)} in {seconds:.1f} s"
    if failed:
        text += f", {failed} failed"
    return text + (f"; {_prompts(done_before)} done before" if done_before else "")


def _prompts(count: int) -> str:
    return "1 prompt" if count == 1 else f"{count:,} prompts"
