"""``metal-prefill serve``: an OpenAI-compatible HTTP server."""

import argparse
import errno
import importlib
import os
import signal
import socket
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType

from metal_prefill.commands import common
from metal_prefill.errors import MissingExtraError
from metal_prefill.files._task_config import TEXT_POOLINGS
from metal_prefill.serve._settings import Settings

EXAMPLE = "metal-prefill serve --port 8080"

_DEFAULTS = {"prefix_memory": 1 << 30, "shutdown_grace": 30}  # of options that are not in `Settings`


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_option(parser, "--host", "address to listen on", "127.0.0.1", type=_host, metavar="ADDRESS")
    common.add_number(parser, "--port", "port to listen on; 0 picks a free port", 8080, common.port)
    alias = "name of the model in requests; repeatable (default: the name of its file)"
    parser.add_argument("--alias", action="append", metavar="NAME", help=alias)
    parser.add_argument(
        "--no-page", dest="page", action="store_false", help="do not serve the page for browsers at /"
    )
    keys = "one accepted API key per line; # begins a comment line"
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help=keys)
    parser.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="name of the server in URLs, such as that of a proxy, besides IP addresses, localhost and the "
        "machine's name; repeatable; '*' allows all",
    )
    parser.add_argument(
        "--cors-origin",
        dest="cors_origins",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="origin whose pages may use the server from a browser, such as https://app.example.com; "
        "repeatable; '*' allows all",
    )
    limits = parser.add_argument_group("limits")
    positive, not_negative = common.positive, common.not_negative
    for option, kind, metavar, what in (
        ("max_streams", positive, "N", "maximum number of texts generated at a time"),
        ("max_queue", not_negative, "N", "maximum number of waiting texts; further requests get status 429"),
        ("max_seconds", float, "X", "time limit of an answer in seconds, including waiting"),
        (
            *("max_connections", positive, "N"),
            "maximum number of open connections; requests on further ones get status 503",
        ),
        ("header_seconds", float, "X", "time limit in seconds for receiving the headers of a request"),
        ("body_seconds", float, "X", "time limit in seconds for receiving the body of a request"),
        ("send_seconds", float, "X", "time limit in seconds for sending a piece of an answer"),
        ("max_body", positive, "BYTES", "maximum size of a request"),
        ("prefix_store_bytes", not_negative, "BYTES", "maximum size of the prefix store"),
        (
            *("kv_memory", positive, "BYTES"),
            "memory limit of the KV caches of all texts (default: half of the machine's memory)",
        ),
        (
            *("prefix_memory", not_negative, "BYTES"),
            "memory limit of the prefix cache, which gives way to texts",
        ),
        (
            *("shutdown_grace", positive, "N"),
            "seconds that answers in flight may take after SIGTERM or Ctrl-C",
        ),
    ):
        default = _DEFAULTS.get(option, getattr(Settings, option, None))
        common.add_number(limits, f"--{option.replace('_', '-')}", what, default, kind, metavar)
    store = "folder that keeps shared prefixes, such as system messages, and conversations across restarts"
    parser.add_argument("--prefix-store", type=Path, metavar="DIR", help=store)
    parser.add_argument(
        "--share-prefixes",
        action="store_true",
        help="share cached prefixes between API keys, which is faster, but lets each key infer what other "
        "keys have sent",
    )
    parser.add_argument(
        "--pooling", choices=TEXT_POOLINGS, help="pooling of embeddings (default: the model file's)"
    )
    common.add_model_arguments(parser)


def connections() -> ModuleType:
    """Return the module of the server, or raise MissingExtraError if a package is not installed."""
    try:
        return importlib.import_module("metal_prefill.serve._connections")
    except ImportError as error:
        raise MissingExtraError(
            f"the server requires an extra: pip install 'metal_prefill[serve]' ({error})"
        ) from error


def listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens, or raise an OSError that names the address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        hint = ""
        if error.errno == errno.EADDRINUSE:
            hint = "; another program listens there: choose another port with --port; 0 selects a free one"
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror or error}{hint}") from None


def execute(arguments: argparse.Namespace) -> None:
    """Serve until a signal arrives, then finish the answers in flight."""
    from metal_prefill import serve

    module = connections()
    options = {f.name: getattr(arguments, f.name) for f in fields(Settings) if hasattr(arguments, f.name)}
    hosts = [arguments.host, *arguments.allowed_host]
    settings = Settings(
        names=_names(arguments), api_keys=_keys(arguments.api_key_file), allowed_hosts=hosts, **options
    )
    module.allow_files(settings)
    with listening(arguments.host, arguments.port) as listener, common.open_model(arguments) as model:
        app = serve.app(model, settings)
        server = module.Server(app, arguments.shutdown_grace, log_level="warning")
        host = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
        url = f"http://{host}:{listener.getsockname()[1]}"
        page = f"page at {url}/, " if settings.page else ""
        print(f"{page}{', '.join(app.state.service.names)} at {url}/v1", file=sys.stderr, flush=True)
        # uvicorn raises the signal again after closing, which must not count as a failure.
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        server.run(sockets=[listener])


def _host(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("must not be empty; 0.0.0.0 listens on all addresses")
    return text


def _names(arguments: argparse.Namespace) -> list[str]:
    """Return the model's names: those given, or the name passed for the model and that of its file."""
    if arguments.alias:
        return list(arguments.alias)
    if arguments.model is None or os.path.exists(arguments.model) or ":" in arguments.model:
        return []
    return [arguments.model]


def _keys(path: Path | None) -> list[str]:
    if path is None:
        return []
    lines = map(str.strip, common.read_text(path).splitlines())
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise common.UsageError(f"{path} contains no API key")
    return keys
