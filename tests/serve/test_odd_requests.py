"""Forms of HTTP that few clients use: answered or refused as the standard requires, next to other clients."""

import json
import re
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest
from support.running_server import POST, Running, request_bytes, running, wait_until

from metal_prefill import Model
from metal_prefill.serve._connections import MAX_HEADERS

BODY = {"prompt": "ROMEO:\n", "max_tokens": 4, "temperature": 0}
JSON = json.dumps(BODY).encode()
HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"


@pytest.fixture(scope="module")
def served(cpu_model: Model) -> Iterator[Running]:
    with running(cpu_model, header_seconds=5, max_streams=8) as server:
        yield server


def chunked(*chunks: bytes) -> bytes:
    head = POST + b"transfer-encoding: chunked\r\n\r\n"
    return head + b"".join(chunks)


def test_requests_in_a_row_are_answered_in_order(served: Running) -> None:
    bodies = [{**BODY, "max_tokens": n + 1} for n in range(20)]
    with served.connect() as connection:
        connection.sendall(b"".join(map(request_bytes, bodies)))
        answer = b""
        while answer.count(b'"completion_tokens":') < 20:
            answer += connection.recv(65536)
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
    assert served.post("/v1/completions", BODY).status_code == 200


def _send(connection: socket.socket, content: bytes) -> None:
    with suppress(OSError):  # refused before all of it was sent
        connection.sendall(content)


def passes(served: Running) -> float:
    found = re.search(r"^metal_prefill_passes_total (\S+)", served.get("/metrics").text, re.MULTILINE)
    assert found is not None
    return float(found[1])


def test_requests_that_are_cancelled_at_once_leave_nothing(served: Running) -> None:
    expected = served.post("/v1/completions", BODY).json()["choices"]
    before = passes(served)
    long = request_bytes({"prompt": "a", "max_tokens": 900, "n": 4, "stream": True})
    for i in range(60):
        with served.connect() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.sendall(long)
            if i % 2:
                connection.recv(100)
        if i % 10 == 0:
            assert served.post("/v1/completions", BODY).json()["choices"] == expected
    wait_until(lambda: served.service._texts == 0)
    wait_until(lambda: not served.service.loop._running)
    made = passes(served) - before
    assert made < 60 * 900 / 4, "texts are computed although their clients have left"
    wait_until(lambda: served.connections == 0)
