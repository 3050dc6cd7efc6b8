"""Prompts from JSON lines, and results as JSON lines in a file that a later run can resume."""

import io
import itertools
import json
import os
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import IO, Any

from metal_prefill._support.atomic_write import check_target
from metal_prefill.commands.common import UsageError, lock_output, read_text
from metal_prefill.generation._sampling import Options

_NUMBERS: Mapping[object, tuple[type, ...]] = {int: (int,), float: (int, float)}
# Options of a line of prompts, and their types in JSON.
OPTIONS: Mapping[str, tuple[type, ...]] = {
    "max_tokens": (int,),
    **{f.name: _NUMBERS[type(f.default)] for f in fields(Options) if type(f.default) in _NUMBERS},
    "min_tokens": (int,),
    "seed": (int, type(None)),
    "stop": (str, int, list),
}


@dataclass(frozen=True)
class Prompt:
    """A prompt with its options, or the error in its line."""

    text: str | list[int] | None  # None if the line is invalid
    options: dict[str, Any] = field(default_factory=dict)  # of :meth:`metal_prefill.Scheduler.submit`
    error: str = ""  # empty for a valid prompt

    def line(self, **result: Any) -> str:
        """Return the line of the prompt in the results, including the newline."""
        return json.dumps({"prompt": self.text} | result) + "\n"


def parse(line: bytes) -> Prompt:
    """Parse a line: a string, or an object with ``"prompt"`` and options."""
    try:
        value = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        return Prompt(None, error=f"the line is not JSON: {error}")
    if isinstance(value, str):
        return Prompt(value)
    if not isinstance(value, dict) or "prompt" not in value:
        return Prompt(None, error='the line is neither a string nor an object with "prompt"')
    text = value.pop("prompt")
    is_ids = isinstance(text, list) and all(type(token) is int for token in text)
    if not is_ids and not isinstance(text, str):
        return Prompt(None, error="the prompt is neither a string nor a list of token ids")
    for name, option in value.items():
        if name not in OPTIONS:
            return Prompt(text, error=f"unknown option {name!r}; supported are {', '.join(OPTIONS)}")
        right = isinstance(option, OPTIONS[name]) and not isinstance(option, bool)
        if right and isinstance(option, list):
            right = all(isinstance(item, str) for item in option)
        if not right:
            return Prompt(text, error=f"option {name!r} has the wrong type: {json.dumps(option)}")
    return Prompt(text, value)


@contextmanager
def read_prompts(path: str) -> Iterator[tuple[int, Iterator[Prompt]]]:
    """Yield the number of prompts in a file of JSON lines, ``-`` for stdin, and an iterator over them.

    Blank lines are ignored. Prompts are read from the file on demand.
    """
    with _opened(path) as file:
        start = len(BOM_UTF8) if file.read(len(BOM_UTF8)) == BOM_UTF8 else 0
        file.seek(start)
        count = sum(1 for line in file if line.strip())
        file.seek(start)
        yield count, (parse(line) for line in file if line.strip())


def _opened(path: str) -> IO[bytes]:
    if path == "-":
        return io.BytesIO(read_text("-").encode())
    file = open(path, "rb")  # noqa: SIM115
    if file.seekable():
        return file
    with file:  # a pipe, such as <(command)
        return io.BytesIO(file.read())


@dataclass
class Continued:
    """A results file opened to append."""

    file: IO[str]  # positioned after the last complete line
    # Number of existing results, and how many of them are errors.
    done: int
    failed: int
    prompts: Iterator[Prompt]  # without a result


@contextmanager
def continued(path: str, prompts: Iterator[Prompt], options: Mapping[str, Any]) -> Iterator[Continued]:
    """Open a results file, which need not exist, to append the missing results.

    An incomplete last line, left by a killed process, is dropped. The first line records the options of all
    results as ``"options"``; a file without them accepts any options. Raises UsageError if the file contains
    anything else, or another process is writing it, and leaves it unchanged.
    """
    descriptor = os.open(check_target(path), os.O_RDWR | os.O_CREAT, 0o666)
    with open(descriptor, "r+b") as file:
        lock_output(file, path)
        done = failed = end = 0
        for line in file:
            prompt = next(prompts, None)
            result = None if prompt is None else _result(line, prompt)
            if prompt is None or result is None:
                raise UsageError(
                    f"{path}: line {done + 1} is not a result of prompt {done + 1}; name a new file, or the "
                    "prompts of the existing results"
                )
            if done == 0 and (difference := _difference(line, options)):
                raise UsageError(
                    f"{path}: its results were computed with {difference}; name a new file, or use the same "
                    "options"
                )
            if not line.endswith(b"\n"):
                prompts = itertools.chain([prompt], prompts)
                break
            done += 1
            failed += "error" in result
            end += len(line)
        file.seek(end)
        file.truncate()
        with io.TextIOWrapper(file, encoding="utf-8", newline="") as text:
            yield Continued(text, done, failed, prompts)


def _result(line: bytes, prompt: Prompt) -> dict[str, Any] | None:
    """Return the result of a prompt, empty if its line is incomplete; None if it belongs to another one."""
    if not line.endswith(b"\n"):
        whole = prompt.line().encode()[:-2]  # without the closing brace: results follow
        return {} if line[: len(whole)] == whole[: len(line)] else None
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and value.get("prompt", value) == prompt.text else None


def _difference(line: bytes, options: Mapping[str, Any]) -> str:
    """Return the difference between the options in a file's first line and these; empty if they agree."""
    try:
        recorded = json.loads(line).get("options")
    except (ValueError, RecursionError):  # an incomplete line
        return ""
    for name in options if isinstance(recorded, dict) else ():
        if recorded.get(name) != options[name]:
            return f"{name} {json.dumps(recorded.get(name)):.80}, not {json.dumps(options[name]):.80}"
    return ""
