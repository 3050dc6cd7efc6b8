"""The command ``metal-prefill``.

Each command is a module with ``add_arguments(parser)``, ``execute(arguments)`` and ``EXAMPLE``, a use of it.
Only the module of the requested command is imported, so that ``metal-prefill --help`` does not import NumPy.
"""

import argparse
import importlib
import io
import os
import sys
import traceback
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from metal_prefill._support.interruptions import interruptions
from metal_prefill._support.messages import as_options

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE


# Modules of `metal_prefill.commands`, and their lines in the help.
COMMANDS = {
    "demo": "show text, chat, speed and the server's page, in a minute",
    "run": "continue a prompt",
    "chat": "chat with a model",
    "serve": "serve a model over HTTP with an OpenAI-compatible API",
    "bench": "measure prompt processing and decoding, optionally against other engines",
    "info": "show the contents of a model file, and the available devices",
    "doctor": "check the GPU's results and write a report",
    "trace": "time each dispatch on the GPU",
    "predict": "predict the speed on the GPU of a Mac",
    "perplexity": "compute the perplexity of a text",
    "embed": "compute embeddings of texts",
    "rerank": "rank documents by their relevance to a query",
    "label": "label texts, or names and other parts of texts",
    "models": "list models that open without a download, or delete them from the Hub's cache",
    "cache": "list, check or delete packed weights and converted models",
    "convert": "write a model folder of the Hugging Face Hub as a GGUF file",
    "synth": "write a model file of any shape with random weights",
}


class _Parser(argparse.ArgumentParser):
    """Parser of a command, whose help begins with an example."""

    example = ""

    def print_help(self, file: Any = None) -> None:
        """Print the help; argparse would ignore a full disk."""
        print(self.format_help(), end="", file=file, flush=True)

    def format_help(self) -> str:
        example = f"example: {self.example}\n\n" if self.example else ""
        return example + super().format_help()


def make_parser(wanted: str | None) -> argparse.ArgumentParser:
    """Build the parser with the options of one command; the others are only listed."""
    parser = _Parser(
        prog="metal-prefill",
        description="Fast prompt processing for small quantized language models and text encoders.",
        epilog="Exit codes: 0 success, 1 failure, 2 invalid arguments, 130 interrupted. "
        "Set METAL_PREFILL_TRACEBACK=1 to show the traceback of an error.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=28),
    )
    parser.add_argument("--version", action="store_true", help="show the version and exit")
    parser.set_defaults(parser=parser)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name, text in COMMANDS.items():
        subparser = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        if name == wanted:
            module = importlib.import_module(f"metal_prefill.commands.{name}")
            subparser.example = module.EXAMPLE
            module.add_arguments(subparser)
            subparser.set_defaults(execute=module.execute, parser=subparser)
    return parser


def with_mode(arguments: list[str], command: str | None) -> list[str]:
    """Add the default mode of a command that has modes, unless a word or a request for help follows."""
    if command not in COMMANDS:
        return arguments
    modes = getattr(importlib.import_module(f"metal_prefill.commands.{command}"), "MODES", ())
    at = arguments.index(command) + 1
    following = arguments[at] if at < len(arguments) else "-"
    if not modes or not following.startswith("-") or following in ("-h", "--help"):
        return arguments
    return [*arguments[:at], next(iter(modes)), *arguments[at:]]


def report(error: BaseException, options: Mapping[str, str]) -> int:
    """Print an error as a message for users, and return its exit code.

    `options` has the options of the command by the arguments that messages name.
    """
    if os.environ.get("METAL_PREFILL_TRACEBACK", "0") not in ("", "0"):
        traceback.print_exception(error)
    if isinstance(error, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    if isinstance(error, BrokenPipeError):  # the reader of the output has exited
        return EXIT_BROKEN_PIPE
    from metal_prefill.errors import ContextOverflowError, MetalPrefillError

    message, code = as_options(str(error), options) or type(error).__name__, EXIT_FAILED
    if isinstance(error, OSError) and error.strerror:
        # Without a name, for example, stdout is on a full disk.
        name = error.filename
        message = f"{name or repr(name)}: {error.strerror}" if name is not None else error.strerror
    elif isinstance(error, ContextOverflowError):
        message += (
            ": shorten the text, or use a model with a longer context; `metal-prefill info` shows a model's"
        )
    elif isinstance(error, ValueError) and not isinstance(error, MetalPrefillError):
        code = EXIT_USAGE
    elif not isinstance(error, (MetalPrefillError, OSError, MemoryError)):
        message = f"{type(error).__name__}: {error} (set METAL_PREFILL_TRACEBACK=1 to show the traceback)"
    print(f"error: {message}", file=sys.stderr)
    return code


def show_warning(options: Mapping[str, str], message: Warning | str, *_: object, **__: object) -> None:
    """Print a warning as a message for users; `options` is as for `report`."""
    print(f"warning: {as_options(str(message), options)}", file=sys.stderr)


def drop_unwritable_output() -> None:
    """Discard unwritable output, for which Python would report another error when flushing at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Parameters
    ----------
    argv
        Arguments without the program name; the default is the arguments of the process.
    """
    if sys.stderr is None:  # closed; print(file=None) would write to stdout
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if sys.stdout is None:
        print("error: standard output is closed", file=sys.stderr)
        return EXIT_FAILED
    # Escape characters that it cannot encode, as stderr does, unless the environment selects another handler.
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")
    arguments = list(sys.argv[1:] if argv is None else argv)
    with interruptions() as interrupted, warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        return _execute(arguments, interrupted)


def _execute(arguments: list[str], interrupted: list[int]) -> int:
    wanted = next((word for word in arguments if not word.startswith("-")), None)
    named: dict[str, str] = {}
    warnings.showwarning = partial(show_warning, named)
    try:
        options, unknown = make_parser(wanted).parse_known_args(with_mode(arguments, wanted))
        if unknown:
            options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        actions = options.parser._actions  # noqa: SLF001  # argparse has no other list
        named |= {action.dest: action.option_strings[-1] for action in actions if action.option_strings}
        if options.version:
            from metal_prefill import __version__

            print(f"metal-prefill {__version__}")
        elif options.command is None:
            options.parser.print_help(sys.stderr)
            return EXIT_USAGE
        else:
            options.execute(options)
        sys.stdout.flush()
    except SystemExit as stop:  # argparse: 0 after --help, 2 after a wrong option, message already printed
        return stop.code if isinstance(stop.code, int) else EXIT_FAILED
    except (Exception, KeyboardInterrupt) as error:
        code = report(KeyboardInterrupt() if interrupted and isinstance(error, ImportError) else error, named)
        drop_unwritable_output()
        return code
    return 0
