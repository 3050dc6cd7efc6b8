"""A server of the package on loopback, in a thread, for other clients."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import openai
import uvicorn
from starlette.applications import Starlette

from metal_prefill import Model, serve
from metal_prefill.serve._connections import Server
from metal_prefill.serve._service import Service

JSON = {"content-type": "application/json"}
# HTTP needs no certificates, and reading them takes 20 ms for each client of httpx.
LOCAL: dict[str, Any] = {"trust_env": False, "verify": False}
POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


class _Closing(openai.DefaultHttpxClient):  # type: ignore[misc]  # whichever httpx it uses
    """A client of httpx that is closed with the client of OpenAI, as the default is."""

    def __del__(self) -> None:
        self.close()


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


class Running:
    """A server that answers at `url`."""

    def __init__(self, app: Starlette, port: int, server: uvicorn.Server) -> None:
        self.service: Service = app.state.service
        self.model: Model = self.service.model
        self.port = port
        self._server = server
        self.url = f"http://127.0.0.1:{port}"

    def client(self, **options: Any) -> openai.OpenAI:
        """Return OpenAI's client, without retries."""
        given = {"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0, "timeout": 60}
        return openai.OpenAI(**{**given, "http_client": _Closing(**LOCAL), **options})

    def post(self, path: str, body: Any, key: str = "", **options: Any) -> httpx.Response:
        """Send JSON, or bytes unchanged."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {**JSON, **bearer(key), **options.pop("headers", {})}
        return httpx.post(self.url + path, content=content, headers=headers, timeout=60, **LOCAL, **options)

    def answer(self, path: str, body: Any, key: str = "") -> Any:
        """Send a request that the server must answer; return the JSON of its answer."""
        answer = self.post(path, body, key)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def refused(self, path: str, body: Any, status: int = 400, **options: Any) -> Any:
        """Send a request that the server must refuse; return its error."""
        answer = self.post(path, body, **options)
        assert answer.status_code == status, answer.text
        return answer.json()["error"]

    def get(self, path: str, key: str = "", **options: Any) -> httpx.Response:
        headers = {**bearer(key), **options.pop("headers", {})}
        return httpx.get(self.url + path, headers=headers, timeout=60, **LOCAL, **options)

    def connect(self, receive_buffer: int | None = None) -> socket.socket:
        """Return a plain connection, for clients that send invalid HTTP."""
        connection = socket.socket()
        connection.settimeout(60)
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.connect(("127.0.0.1", self.port))
        return connection

    def exchange(self, sent: bytes) -> bytes:
        """Send bytes, and read until the server closes the connection."""
        with self.connect() as connection:
            connection.sendall(sent)
            return read_all(connection)

    def close(self) -> None:
        """Begin to close, as on a signal; answers in flight may end."""
        self._server.should_exit = True

    @property
    def connections(self) -> int:
        return len(self.protocols)

    @property
    def protocols(self) -> set[Any]:
        return self._server.server_state.connections


@contextmanager
def running(
    model: Model, *, send_buffer: int | None = None, shutdown_grace: int = 5, **limits: Any
) -> Iterator[Running]:
    """Serve a model until the block ends.

    `send_buffer` limits how much of an unread answer the system buffers; the default is megabytes.
    """
    app = serve.app(model, serve.Settings(**limits))
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listener:
        if send_buffer is not None:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        server = Server(app, shutdown_grace, log_level="error")
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            yield Running(app, listener.getsockname()[1], server)
        finally:
            server.should_exit = True
            thread.join(30)
            assert not thread.is_alive()


@contextmanager
def serving(path: Path, **limits: Any) -> Iterator[Running]:
    """Serve a file with a fresh model, as after a restart, until the block ends."""
    with Model(path, device="cpu") as model, running(model, **limits) as server:
        yield server


@contextmanager
def running_with_template(template: str) -> Iterator[Running]:
    """Serve the bundled model as `demo`, with another chat template, until the block ends."""
    source = {"tokenizer.chat_template": template}.get
    with (
        Model(device="cpu") as model,
        patch.object(model.tokenizer, "_template_source", source),
        running(model, names=["demo"]) as server,
    ):
        yield server


class Gate:
    """Blocks the engine loop of a server after one pass, until the gate is opened."""

    def __init__(self, service: Service) -> None:
        wait_until(lambda: not service.loop._running)  # clients may return before the last pass ends
        self._counted = service.loop._after_pass
        self.reached = threading.Event()
        self._open = threading.Event()
        service.loop._after_pass = self._wait

    def _wait(self, scheduler: Any) -> None:
        if self._counted is not None:
            self._counted(scheduler)
        self.scheduler = scheduler
        self.reached.set()
        assert self._open.wait(60)

    def open(self) -> None:
        self._open.set()


def events(response: httpx.Response) -> list[Any]:
    """Read server-sent events; the last one must be the end."""
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def request_bytes(body: Any, path: str = "/v1/completions", length: int | None = None) -> bytes:
    """Return the bytes of a request; `length` replaces its declared length."""
    content = json.dumps(body).encode()
    length = len(content) if length is None else length
    head = POST.replace(b"/v1/completions", path.encode())
    return head + f"content-length: {length}\r\n\r\n".encode() + content


def read_all(connection: socket.socket) -> bytes:
    """Read until the server closes the connection."""
    answer = b""
    while piece := connection.recv(4096):
        answer += piece
    return answer


def wait_until(condition: Any) -> None:
    """Wait until a condition holds, which another thread will soon satisfy."""
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.005)
    raise AssertionError("it did not happen within half a minute")
