"""Requests of pages of other sites, and forms of HTTP that few clients use."""

import json
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest
from support.servers.running_server import LOCAL, POST, Running, read_all, request_bytes, running, wait_until

from metal_prefill import Model
from metal_prefill.serve._connections import MAX_HEADERS

BODY = {"prompt": "ROMEO:\n", "max_tokens": 1}
APP = "https://app.example.com"


@pytest.fixture(scope="module")
def guarded(cpu_model: Model) -> Iterator[Running]:
    """Serve hosts and origins of which a few are named."""
    with running(cpu_model, allowed_hosts=["Models.example.com"], cors_origins=[APP.upper()]) as server:
        yield server


def statuses(server: Running, headers: dict[str, str]) -> set[int]:
    answers = [server.get(path, headers=headers) for path in ("/", "/health", "/activity")]
    return {a.status_code for a in [*answers, server.post("/v1/completions", BODY, headers=headers)]}


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:9", 200),
        ("192.0.2.7", 200),
        ("[::1]:80", 200),
        ("LocalHost:8080", 200),
        ("localhost.", 200),
        ("demo.localhost", 200),
        (socket.gethostname(), 200),
        ("models.example.com:443", 200),
        ("example.com", 403),
        ("127.0.0.1.example.com", 403),
        ("localhost.example.com", 403),
        ("notlocalhost", 403),
        ("[::1", 403),
        ("", 403),
    ],
)
def test_a_host_is_an_address_or_a_name_of_the_server(guarded: Running, host: str, status: int) -> None:
    assert statuses(guarded, {"host": host}) == {status}


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://{host}", 200),
        ("https://{host}", 200),  # a proxy has ended TLS
        (APP, 200),
        (APP.title(), 200),
        ("http://localhost", 403),
        ("http://127.0.0.1:1", 403),
        ("null", 403),
        ("http://app.example.com", 403),
        ("", 403),
    ],
)
def test_an_origin_is_that_of_the_server_or_allowed(guarded: Running, origin: str, status: int) -> None:
    assert statuses(guarded, {"origin": origin.format(host=f"127.0.0.1:{guarded.port}")}) == {status}


def test_all_hosts_and_origins_may_be_allowed(cpu_model: Model) -> None:
    with running(cpu_model, cors_origins=["*"], allowed_hosts=["*"]) as server:
        assert statuses(server, {"host": "example.com", "origin": "null"}) == {200}


def test_pages_of_allowed_origins_may_send_requests_with_a_key(cpu_model: Model) -> None:
    asked = {
        "origin": APP,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }

    def preflight(server: Running, **headers: str) -> httpx.Response:
        url = f"{server.url}/v1/completions"
        return httpx.options(url, headers={**asked, **headers}, timeout=60, **LOCAL)

    with running(cpu_model, cors_origins=[APP], api_keys=["key"]) as server:
        answer = preflight(server)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == APP
        assert "authorization" in answer.headers["access-control-allow-headers"]
        assert preflight(server, origin="https://other.example.com").status_code == 403
        key = {"authorization": "Bearer key", "origin": APP}
        answer = server.post("/v1/completions", BODY, headers=key)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, APP)
        refused = server.post("/v1/completions", BODY, headers={"origin": APP})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, APP)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": "application/json; charset=utf-8"}, 200),
        ({"content-type": "Application/JSON"}, 200),
        ({"content-type": "application/vnd.api+json"}, 200),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({"content-type": "text/plain;application/json"}, 415),
        ({"content-type": ""}, 415),
        ({"content-encoding": "gzip"}, 415),
        ({"content-encoding": "Identity"}, 200),
    ],
)
def test_a_body_is_plain_json(server: Running, headers: dict[str, str], status: int) -> None:
    answer = server.post("/v1/completions", BODY, headers=headers)
    assert answer.status_code == status
    if status == 415:
        error = answer.json()["error"]
        (name, value), *_ = headers.items()
        assert error["message"].lower().startswith(f"the {name} ")
        assert value.partition(";")[0] in error["message"]


FOUR_TOKENS = {"prompt": "ROMEO:\n", "max_tokens": 4, "temperature": 0}
JSON = json.dumps(FOUR_TOKENS).encode()
HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"


@pytest.fixture(scope="module")
def served(cpu_model: Model) -> Iterator[Running]:
    with running(cpu_model, header_seconds=5, max_streams=8) as server:
        yield server


def chunked(*chunks: bytes) -> bytes:
    head = POST + b"transfer-encoding: chunked\r\n\r\n"
    return head + b"".join(chunks)


def test_requests_in_a_row_are_answered_in_order(served: Running) -> None:
    """Also those that are left when the client closes its sending side."""
    bodies = [{**FOUR_TOKENS, "max_tokens": n + 1} for n in range(20)]
    with served.connect() as connection:
        connection.sendall(b"".join(map(request_bytes, bodies)))
        connection.shutdown(socket.SHUT_WR)
        answer = read_all(connection)
    counts = [int(part.split(b",")[0]) for part in answer.split(b'"completion_tokens":')[1:]]
    assert counts == list(range(1, 21))


def test_a_client_may_wait_until_its_body_is_wanted(served: Running) -> None:
    head = POST + b"expect: 100-continue\r\ncontent-length: "
    with served.connect() as connection:
        connection.sendall(head + b"%d\r\n\r\n" % len(JSON))
        assert connection.recv(4096) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(JSON)
        assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")
    with served.connect() as connection:
        connection.sendall(head + b"%d\r\n\r\n" % (1 << 30))
        assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (chunked(b'%x;a=b;c="d"\r\n' % len(JSON), JSON, b"\r\n0\r\n\r\n"), 200),
        (chunked(b"%x\r\n" % len(JSON), JSON, b"\r\n0\r\nx: y\r\n\r\n"), 200),
        (chunked(b"%x;" % len(JSON), b"a" * (1 << 20), b"\r\n", JSON, b"\r\n0\r\n\r\n"), 400),
        (chunked(b"%x\r\n" % len(JSON), JSON, b"\r\n0\r\n", b"x: y\r\n" * 180_000, b"\r\n"), 400),
        (chunked(b"f" * 40 + b"\r\n"), 400),
        (HEALTH + b"".join(b"a%d: b\r\n" % i for i in range(1000)) + b"\r\n", 200),
        (HEALTH + b"a:\r\n" * (MAX_HEADERS // 5) + b"\r\n", 200),
        (HEALTH + b"a:\r\n" * MAX_HEADERS + b"\r\n", 400),
        (HEALTH + b"content-length: 3\r\ncontent-length: 4\r\n\r\n{}  ", 400),
        (b"GET /health HTTP/1.1\r\n\r\n", 400),
    ],
    ids=lambda value: "" if isinstance(value, bytes) else None,
)
def test_unusual_requests_have_a_status(served: Running, request_: bytes, status: int) -> None:
    with served.connect() as connection:
        sender = threading.Thread(target=_send, args=(connection, request_))
        sender.start()
        assert connection.recv(4096).startswith(b"HTTP/1.1 %d " % status)
        sender.join(60)
    assert served.post("/v1/completions", FOUR_TOKENS).status_code == 200


def _send(connection: socket.socket, content: bytes) -> None:
    with suppress(OSError):  # refused before all of it was sent
        connection.sendall(content)


def test_connections_that_are_reset_leave_nothing(
    served: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In the request, before the answer, at its start, and in the middle of many events."""
    expected = served.post("/v1/completions", FOUR_TOKENS).json()["choices"]
    body = {"prompt": "a", "max_tokens": 900, "n": 16, "stream": True, "seed": 1}
    passes: list[Any] = []
    monkeypatch.setattr(served.service.loop, "_after_pass", passes.append)
    for i in range(60):
        with served.connect() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.sendall(request_bytes(body)[: 4 * i if i % 4 == 0 else None])
            if i % 2:
                connection.recv(100 * i)
        if i % 10 == 0:
            assert served.post("/v1/completions", FOUR_TOKENS).json()["choices"] == expected
    wait_until(lambda: served.service._texts == 0 and not served.service.loop._running)
    wait_until(lambda: served.connections == 0)
    assert len(passes) < 60 * 900 / 4, "texts are computed although their clients have left"
    assert [record.getMessage() for record in caplog.records] == []
