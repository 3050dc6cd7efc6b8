"""Servers of the OpenAI API that can be measured, each started as a process as by users."""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from metal_prefill.bench._engines import OURS, BenchError
from metal_prefill.bench._worker import LoggedProcess
from metal_prefill.errors import MissingExtraError

START_S = 120.0  # time limit for a server to load the model and answer
ANSWER_S = 600.0  # time limit for an answer


@dataclass(frozen=True)
class ServerOptions:
    path: str  # path of the GGUF file
    threads: int
    clients: int  # maximum number of concurrent clients
    context: int  # number of tokens of a prompt and its answer
    # Bytes of the prefix cache, which only this package's server limits; None selects the default.
    prefix_memory: int | None = None
    prefix_store: str | None = None  # folder in which this package's server keeps prefixes across restarts


Command = Callable[[ServerOptions, int], Sequence[str]]


def _ours(options: ServerOptions, port: int) -> list[str]:
    command = [sys.executable, "-m", "metal_prefill", "serve", "-m", options.path, "--port", str(port)]
    command += ["-t", str(options.threads), "--max-streams", str(options.clients)]
    if options.prefix_memory is not None:
        command += ["--prefix-memory", str(options.prefix_memory)]
    return [*command, *([] if options.prefix_store is None else ["--prefix-store", options.prefix_store])]


def _llama_cpp_python(options: ServerOptions, port: int) -> list[str]:
    settings = {
        "model": options.path,
        "host": "127.0.0.1",
        "port": port,
        "n_threads": options.threads,
        "n_threads_batch": options.threads,
        "n_ctx": options.context,
        "flash_attn": "true",
        # By default, a new request interrupts the answer to another client.
        "interrupt_requests": "false",
    }
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    return [sys.executable, "-m", "llama_cpp.server", *words]


def _llama_server(options: ServerOptions, port: int) -> list[str]:
    command = ["llama-server", "-m", options.path, "--host", "127.0.0.1", "--port", str(port)]
    command += ["-t", str(options.threads), "-tb", str(options.threads), "-fa", "on"]
    # One slot per client; the slots divide the context.
    return [*command, "-np", str(options.clients), "-c", str(options.context * options.clients)]


SERVERS: dict[str, Command] = {
    OURS: _ours,
    "llama-cpp-python": _llama_cpp_python,
    "llama-server": _llama_server,
}


def server_of(given: str) -> tuple[str, Command]:
    """Return name and command of a server, given its name or the path of a program that has the name.

    Raises an error that names the package to install if the server is missing.
    """
    name = os.path.basename(given)
    is_program = name == "llama-server"
    if given not in SERVERS and not is_program:
        peers = ", ".join(known for known in SERVERS if known != OURS)
        raise ValueError(f"unknown server {given!r} to compare with; known are {peers}")
    if is_program and shutil.which(given) is None:
        where = "on the PATH" if given in SERVERS else "a program"
        raise MissingExtraError(f"{given} of llama.cpp is not {where}")
    packages = {OURS: ("uvicorn", "metal_prefill[serve]")}
    packages["llama-cpp-python"] = ("llama_cpp.server", "llama-cpp-python[server]")
    if name in packages:
        module, package = packages[name]
        try:
            missing = importlib.util.find_spec(module) is None
        except ImportError:
            missing = True
        if missing:
            raise MissingExtraError(f"measuring {name} needs: pip install '{package}'")
    command = SERVERS[name]
    return name, command if given in SERVERS else lambda options, port: [given, *command(options, port)[1:]]


class ServerProcess(LoggedProcess):
    """Running server process."""

    def __init__(self, name: str, options: ServerOptions, command: Command) -> None:
        self.name = name
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        super().__init__(command(options, self.port))
        try:
            self.model = self._wait()
        except BaseException:
            self.close()
            raise

    def _wait(self) -> str:
        """Wait until the server answers, and return the name of its model."""
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            if (code := self._process.poll()) is not None:
                raise BenchError(f"{self.name}: its process ended with code {code}: {self.last_words()}")
            with suppress(BenchError), self.asked("GET", "/v1/models", timeout=START_S) as response:
                return str(json.load(response)["data"][0]["id"])
            time.sleep(0.1)
        raise BenchError(f"{self.name}: it did not answer within {START_S:g} s: {self.last_words()}")

    @contextmanager
    def asked(
        self, method: str, path: str, body: Any = None, timeout: float = ANSWER_S
    ) -> Iterator[http.client.HTTPResponse]:
        """Send a request, with a JSON body if there is one, and yield its answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        content = None if body is None else json.dumps(body)
        try:
            connection.request(method, path, content, {"content-type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise BenchError(f"{self.name}: status {response.status}: {response.read(500)!r}")
            yield response
        except (OSError, http.client.HTTPException) as error:
            raise BenchError(f"{self.name}: {error!r}; its last words: {self.last_words()}") from error
        finally:
            connection.close()

    def close(self) -> None:
        self._process.terminate()
        self.end(10)
