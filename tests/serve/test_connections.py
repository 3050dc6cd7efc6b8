"""Clients that leave, stall or send too much: each has a limit, and their resources are released."""

import json
import re
import resource
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from support.scheduled_texts import alone
from support.servers.running_server import (
    POST,
    Gate,
    Running,
    events,
    read_all,
    request_bytes,
    running,
    wait_until,
)

from metal_prefill import Model, serve
from metal_prefill.serve import _connections, _service

BODY: dict[str, Any] = {"prompt": "ROMEO:\n", "max_tokens": 2, "temperature": 0}
LARGE = request_bytes({"prompt": "a" * 900, "max_tokens": 9, "temperature": 0})
LARGEST = len(LARGE) - LARGE.index(b"{")  # bytes of its body
BUFFER = 4096  # bytes that the system keeps of an answer, or a little more


@pytest.fixture(scope="module")
def patient(cpu_model: Model) -> Iterator[Running]:
    """Serve clients that take no longer than a second: a busy machine does not make them slower than that."""
    with running(cpu_model, header_seconds=1, body_seconds=1, send_seconds=1, send_buffer=BUFFER) as server:
        yield server


def wait_until_closed(connection: socket.socket, piece: bytes) -> None:
    """Send a piece again and again until the server has closed the connection."""
    for _ in range(3000):
        try:
            connection.sendall(piece)
        except (ConnectionResetError, BrokenPipeError):
            return
        time.sleep(0.01)
    raise AssertionError("it is open after half a minute")


@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnected_client_releases_its_pages_within_a_pass(cpu_model: Model, stream: bool) -> None:
    body = {**BODY, "max_tokens": 1000, "temperature": 1, "seed": 1, "stream": stream}
    with running(cpu_model) as server:
        gate = Gate(server.service)
        client = server.connect()
        client.sendall(request_bytes(body))
        assert gate.reached.wait(60)
        assert gate.scheduler.streams == 1
        client.close()
        wait_until(lambda: server.service._texts == 0)  # the server has noticed; the pass is not over
        passes = gate.scheduler.passes
        gate.open()
        wait_until(lambda: not server.service.loop._running)
        assert gate.scheduler.streams == 0
        assert gate.scheduler.passes <= passes + 1
        stats = cpu_model.stats()
        assert stats["kv_pool_bytes"] == stats["prefix_bytes"]


def test_half_a_body_ends_with_408(patient: Running) -> None:
    assert patient.exchange(request_bytes(BODY, length=5000)).startswith(b"HTTP/1.1 408 ")


def test_an_oversized_body_is_rejected_before_it_is_read(cpu_model: Model) -> None:
    with running(cpu_model, max_body=20_000) as server:
        answer = server.exchange(request_bytes(BODY, length=1 << 30))
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert b"more than 20000 bytes" in answer
        with server.connect() as connection:  # one without a declared length
            connection.sendall(POST + b"transfer-encoding: chunked\r\n\r\n")
            for _ in range(3):
                connection.sendall(b"2000\r\n" + b" " * 0x2000 + b"\r\n")
            assert read_all(connection).startswith(b"HTTP/1.1 413 ")


HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"


@pytest.mark.parametrize("sent", [b"", b"POST /v1/compl", HEALTH, HEALTH + b"\r\nGET /hea"])
def test_a_client_that_sends_half_a_header_is_closed(patient: Running, sent: bytes) -> None:
    with patient.connect() as connection, patient.connect() as slow:
        connection.sendall(sent)
        assert read_all(connection).count(b"HTTP/1.1 200 ") == sent.count(b"\r\n\r\n")
        wait_until_closed(slow, b"G")  # a header byte by byte


def test_a_client_that_sends_its_next_request_in_time_stays_connected(patient: Running) -> None:
    with patient.connect() as connection:
        for i in range(6):
            connection.sendall(HEALTH + b"\r\n")
            answer = b""
            while not answer.endswith(b'{"status":"ok"}'):
                answer += connection.recv(4096)
                assert answer, f"it was closed before answer {i}"
            time.sleep(0.2)  # longer than a second in all


def test_an_answer_may_take_longer_than_a_header(cpu_model: Model) -> None:
    with running(cpu_model, header_seconds=0.1) as server, server.connect() as connection:
        gate = Gate(server.service)
        connection.sendall(request_bytes(BODY))
        assert gate.reached.wait(60)
        time.sleep(0.2)
        gate.open()
        assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")


def test_a_client_that_never_reads_its_stream_loses_pages_and_connection(
    cpu_model: Model, patient: Running
) -> None:
    with patient.connect(BUFFER) as connection:
        body = {**BODY, "max_tokens": 900, "temperature": 1, "seed": 1, "stream": True, "n": 4}
        connection.sendall(request_bytes(body))
        wait_until(lambda: patient.service._texts > 0)
        other = patient.answer("/v1/completions", BODY)
        assert other["choices"][0]["text"] == alone(cpu_model, "ROMEO:\n", 2)
        wait_until(lambda: patient.service._texts == 0 and not patient.service.loop._running)
        wait_until(lambda: patient.connections == 0)
    stats = cpu_model.stats()
    assert stats["kv_pool_bytes"] == stats["prefix_bytes"]


def test_a_client_that_never_reads_its_answer_loses_its_connection(patient: Running) -> None:
    request = request_bytes({"tokens": [70] * 250_000}, "/detokenize")
    with patient.connect(BUFFER) as connection:
        connection.sendall(request)
        wait_until(lambda: patient.connections == 1)
        wait_until(lambda: patient.connections == 0)
        assert len(read_all(connection)) < 500_000


def test_a_slow_reader_gets_its_whole_answer(patient: Running) -> None:
    with patient.connect(BUFFER) as connection:
        connection.sendall(request_bytes({"tokens": [70] * 50_000}, "/detokenize"))
        answer, begin = b"", time.monotonic()
        while not answer.endswith(b'"}'):
            piece = connection.recv(2048)
            assert piece, f"it was closed after {len(answer)} bytes"
            answer += piece
            time.sleep(0.02)
        assert time.monotonic() - begin > 1
        assert len(answer) > 100_000


def test_connections_beyond_the_limit_are_refused_until_one_is_closed(cpu_model: Model) -> None:
    with running(cpu_model, max_connections=3) as server, ExitStack() as stack:
        silent = [stack.enter_context(server.connect()) for _ in range(3)]
        wait_until(lambda: server.connections == 3)
        refused = server.post("/v1/completions", BODY)
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.headers["connection"] == "close"
        error = refused.json()["error"]
        assert (error["code"], error["message"][:22]) == ("too_many_connections", "3 connections are open")
        silent[0].close()
        wait_until(lambda: server.connections == 2)
        server.answer("/v1/completions", BODY)

        for i in range(_connections.REFUSED + 1):
            silent.append(stack.enter_context(server.connect()))
            wait_until(lambda expected=3 + i: server.connections >= expected)
        with server.connect() as beyond:
            wait_until_closed(beyond, HEALTH + b"\r\n")
        assert server.connections == 3 + _connections.REFUSED


def test_concurrent_bodies_have_a_total_limit(cpu_model: Model) -> None:
    with running(cpu_model, max_body=LARGEST) as server, ExitStack() as stack:
        clients: list[socket.socket] = []
        for _ in range(_service.HELD + 1):
            clients.append(stack.enter_context(server.connect()))
            clients[-1].sendall(LARGE[:-2])
        (refused,) = select.select(clients, [], [], 60)[0]
        answer = read_all(refused)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert f"exceed {32 * LARGEST} bytes in total".encode() in answer
        patient = next(client for client in clients if client is not refused)
        patient.sendall(LARGE[-2:])
        assert patient.recv(4096).startswith(b"HTTP/1.1 200 ")


def test_bodies_of_requests_being_answered_count_towards_the_limit(cpu_model: Model) -> None:
    with running(cpu_model, max_body=LARGEST, max_streams=_service.HELD) as server, ExitStack() as stack:
        gate = Gate(server.service)
        for i in range(_service.HELD):
            stack.enter_context(server.connect()).sendall(LARGE)
            wait_until(lambda count=i + 1: server.service._texts == count)
        assert server.post("/v1/completions", BODY).status_code == 503
        gate.open()
        wait_until(lambda: server.service._texts == 0)
        server.answer("/v1/completions", BODY)


def test_answers_that_are_not_read_have_a_total_limit(
    cpu_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_service, "MOST_UNSENT", 6000)
    with running(cpu_model, send_buffer=BUFFER) as server:
        with server.connect(BUFFER) as connection:
            connection.sendall(request_bytes({**BODY, "n": 64, "logprobs": 20, "max_tokens": 16}))
            wait_until(lambda: server.service.answers.size > 6000)
            assert server.service._texts == 0
            refused = server.refused("/v1/completions", BODY, 503)
            assert "have not received exceed 6000 bytes" in refused["message"]
        wait_until(lambda: server.service.answers.size == 0)
        server.answer("/v1/completions", BODY)


def test_the_server_buffers_only_a_part_of_an_answer(cpu_model: Model) -> None:
    with running(cpu_model, send_buffer=BUFFER) as server, server.connect(BUFFER) as connection:
        connection.sendall(request_bytes({"tokens": [70] * 1_000_000}, "/detokenize"))
        wait_until(lambda: server.service.answers.size > 2_000_000)
        (protocol,) = server.protocols
        wait_until(lambda: protocol.transport.get_write_buffer_size() > 0)
        assert protocol.transport.get_write_buffer_size() < 1_000_000


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_client_that_half_closes_gets_its_answer(cpu_model: Model, stream: bool, version: str) -> None:
    with running(cpu_model) as server, server.connect() as connection:
        gate = Gate(server.service)
        sent = request_bytes({**BODY, "stream": stream}).replace(b"HTTP/1.1", f"HTTP/{version}".encode())
        connection.sendall(sent)
        assert gate.reached.wait(60)
        connection.shutdown(socket.SHUT_WR)
        time.sleep(0.1)  # until the server notices
        gate.open()
        answer = read_all(connection).removeprefix(b"HTTP/1.1 102 \r\n\r\n")  # that it may send meanwhile
    expected = alone(cpu_model, BODY["prompt"], 2)
    assert answer.startswith(b"HTTP/1.1 200 ")
    lines = re.findall(rb'\{"id".*\}', answer)
    assert "".join(json.loads(line)["choices"][0]["text"] for line in lines) == expected
    assert answer.count(b"[DONE]") == stream


@pytest.mark.parametrize("stream", [False, True])
def test_answers_that_exceed_the_shutdown_time_end_with_an_error(
    cpu_model: Model, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    body = {**BODY, "max_tokens": 900, "stream": stream, "n": 8}
    with (
        running(cpu_model, shutdown_grace=1) as server,
        ThreadPoolExecutor(1) as threads,
        server.connect() as half,
    ):
        gate = Gate(server.service)
        client = threads.submit(server.post, "/v1/completions", body)
        half.sendall(request_bytes(BODY)[:-3])  # half of a request is in flight, too
        assert gate.reached.wait(60)
        server.close()
        answer = client.result(60)
        rest = read_all(half)
        gate.open()
    assert answer.status_code == (200 if stream else 503)
    last = events(answer)[-1] if stream else answer.json()
    assert last["error"]["code"] == "closing"
    assert last["error"]["message"] == "the server is closing"
    assert rest.startswith(b"HTTP/1.1 503 ")
    assert caplog.records == []


def test_the_limit_of_open_files_is_raised_or_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, 1024))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: raised.append(limits))
    _connections.allow_files(serve.Settings(max_connections=100))
    assert raised == []
    _connections.allow_files(serve.Settings(max_connections=512))
    assert raised == [(640, 1024)]
    with pytest.raises(ValueError, match=r"may have 1024 .*, which is enough for 896"):
        _connections.allow_files(serve.Settings(max_connections=1000))


CONTENT = json.dumps(BODY).encode()


@pytest.fixture(scope="module")
def served(cpu_model: Model) -> Iterator[Running]:
    with running(cpu_model, header_seconds=5, max_streams=8) as server:
        yield server


def chunked(*chunks: bytes) -> bytes:
    head = POST + b"transfer-encoding: chunked\r\n\r\n"
    return head + b"".join(chunks)


def test_requests_in_a_row_are_answered_in_order(served: Running) -> None:
    """Those that are left when the client closes its sending side are answered, too."""
    bodies = [{**BODY, "max_tokens": n + 1} for n in range(20)]
    with served.connect() as connection:
        connection.sendall(b"".join(map(request_bytes, bodies)))
        connection.shutdown(socket.SHUT_WR)
        answer = read_all(connection)
    counts = [int(part.split(b",")[0]) for part in answer.split(b'"completion_tokens":')[1:]]
    assert counts == list(range(1, 21))


def test_a_client_may_wait_until_its_body_is_wanted(served: Running) -> None:
    head = POST + b"expect: 100-continue\r\ncontent-length: "
    with served.connect() as connection:
        connection.sendall(head + b"%d\r\n\r\n" % len(CONTENT))
        assert connection.recv(4096) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(CONTENT)
        assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")
    with served.connect() as connection:
        connection.sendall(head + b"%d\r\n\r\n" % (1 << 30))
        assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (chunked(b'%x;a=b;c="d"\r\n' % len(CONTENT), CONTENT, b"\r\n0\r\n\r\n"), 200),
        (chunked(b"%x\r\n" % len(CONTENT), CONTENT, b"\r\n0\r\nx: y\r\n\r\n"), 200),
        (chunked(b"%x;" % len(CONTENT), b"a" * (1 << 20), b"\r\n", CONTENT, b"\r\n0\r\n\r\n"), 400),
        (chunked(b"%x\r\n" % len(CONTENT), CONTENT, b"\r\n0\r\n", b"x: y\r\n" * 180_000, b"\r\n"), 400),
        (chunked(b"f" * 40 + b"\r\n"), 400),
        (HEALTH + b"".join(b"a%d: b\r\n" % i for i in range(1000)) + b"\r\n", 200),
        (HEALTH + b"a:\r\n" * (_connections.MAX_HEADERS // 5) + b"\r\n", 200),
        (HEALTH + b"a:\r\n" * _connections.MAX_HEADERS + b"\r\n", 400),
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
    served.answer("/v1/completions", BODY)


def _send(connection: socket.socket, content: bytes) -> None:
    with suppress(OSError):  # refused before all of it was sent
        connection.sendall(content)


def test_connections_that_are_reset_leave_nothing(
    served: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = served.answer("/v1/completions", BODY)["choices"]
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
            assert served.answer("/v1/completions", BODY)["choices"] == expected
    wait_until(lambda: served.service._texts == 0 and not served.service.loop._running)
    wait_until(lambda: served.connections == 0)
    assert len(passes) < 60 * 900 / 4, "texts are computed although their clients have left"
    assert [record.getMessage() for record in caplog.records] == []
