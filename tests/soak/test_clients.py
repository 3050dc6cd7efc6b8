"""Clients of a server and others that disturb them, each answer compared with that of the request alone.

Part of ``make soak``.
"""

import json
import random
import re
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.hostile_constraints import hostile_requests
from support.servers.running_server import Running, read_all, request_bytes, running
from support.servers.server_requests import alone, answers, request
from support.small_models import EMBEDDERS, page_bytes, write
from support.soak import MOST_STREAMS, SECONDS, SEED, rounds

from metal_prefill import Model

pytestmark = [
    pytest.mark.timeout(0),
    pytest.mark.skipif(not SECONDS, reason="minutes: part of make soak"),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

Request = tuple[str, dict[str, Any]]
Call = Callable[[], None]
Others = Callable[[Running, int, Counter[str]], list[Call]]

GREEDY: dict[str, Any] = {"stream": True, "temperature": 0}
# Clients that share a loaded machine are slow themselves. Other tests hold the limits on time.
PATIENT = dict.fromkeys(("header_seconds", "body_seconds", "send_seconds", "max_seconds"), 3600.0)
# 500: the constraint exceeded a limit while it was matched. 503: on a busy machine, its worker ran too late.
ANSWERED = (200, 400, 500, 503)


@dataclass(frozen=True)
class Kind:
    """One kind of round."""

    requests: Callable[[int], list[Request]]  # requests of round `n` whose answers are compared
    # Clients that repeat a call in a thread meanwhile, and count what they sent.
    others: tuple[Others, ...] = ()
    embeds: bool = False  # whether the model makes vectors; otherwise it is the bundled one
    pages: int | None = None  # limit of the KV cache in pages


def texts(n: int, first: int = 0) -> list[Request]:
    return [r for r in map(request, range(first, first + n)) if r[0] != "/v1/embeddings"]


def _stop_bombs(n: int) -> list[Request]:
    stops = ["#" * (1000 - i) + "x" * i for i in range(1, 17)]
    bomb = {"prompt": f"a{n}", "max_tokens": 900, "stop": stops, "regex": "[#]{800}y", **GREEDY}
    return [("/v1/completions", bomb)] * 20 + texts(100, 100 * n)


def _long_next_to_short(n: int) -> list[Request]:
    long = [{"prompt": f"{n}.{i} is long. " * 55, "max_tokens": 8, **GREEDY} for i in range(32)]
    return [("/v1/completions", body) for body in long] + texts(100, 100 * n)


def _constrained(n: int) -> list[Request]:
    body = {"max_tokens": 12, "regex": "[A-Z]{4} [a-z]{6}", **GREEDY}
    return [("/v1/completions", {"prompt": f"{n}.{i}. ROMEO:", **body}) for i in range(40)]


def grammar_bombs(server: Running, n: int, sent: Counter[str]) -> list[Call]:
    """Return clients of slow or refused constraints, each with a new source whenever it is sent."""

    def send(body: dict[str, Any]) -> None:
        sent["grammar bombs"] += 1
        new = f"{n}{sent['grammar bombs']:06d}"
        kind = "grammar" if "grammar" in body else "regex"
        source = body[kind] + (f"\n// {new}" if kind == "grammar" else f"z{new}")
        answer = httpx.post(f"{server.url}/v1/completions", json={**body, kind: source}, timeout=3600)
        assert answer.status_code in ANSWERED, answer.text

    return [partial(send, body) for body in hostile_requests(server.service.model)]


def half_closing(server: Running, n: int, sent: Counter[str]) -> list[Call]:
    """Return clients that close their sending side, and still get what the others get."""
    body = {"prompt": f"{n} ROMEO:", "max_tokens": 9, "temperature": 0}
    expected = alone(server.service.model, "/v1/completions", body)

    def send() -> None:
        with server.connect() as connection:
            connection.settimeout(None)
            connection.sendall(request_bytes(body))
            connection.shutdown(socket.SHUT_WR)
            answer = read_all(connection)
        (text,) = re.findall(rb'"text":("(?:[^"\\]|\\.)*")', answer)
        assert json.loads(text) == expected
        sent["half-closing"] += 1

    return [send] * 16


def vanishing(server: Running, n: int, sent: Counter[str]) -> list[Call]:
    """Return clients that reset the connection: in their request, at once after it, or in the answer."""

    def send(seed: int) -> None:
        dice = random.Random(f"{n}.{seed}.{sent['vanishing']}")
        body = {"prompt": f"{dice.random()} " * dice.choice((1, 60)), "max_tokens": 200, **GREEDY}
        message = request_bytes(body)
        leaves = dice.choice(("in the request", "after the request", "in the answer"))
        cut = dice.randrange(len(message)) if leaves == "in the request" else len(message)
        with suppress(ConnectionError), server.connect() as connection:
            connection.settimeout(None)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.sendall(message[:cut])
            if leaves == "in the answer":
                connection.recv(dice.randrange(1, 2000))
        sent["vanishing"] += 1
        time.sleep(0.01)

    return [partial(send, i) for i in range(8)]


KINDS: dict[str, Kind] = {
    "a thousand at once": Kind(lambda n: [request(i) for i in range(1000 * n, 1000 * (n + 1))], embeds=True),
    "tiny memory": Kind(lambda n: texts(200, 200 * n), embeds=True, pages=16),
    "stop-string bombs": Kind(_stop_bombs),
    "long next to short": Kind(_long_next_to_short),
    "grammar bombs": Kind(lambda n: texts(200, 200 * n) + _constrained(n), (grammar_bombs,)),
    "vanishing": Kind(lambda n: texts(300, 300 * n), (vanishing,)),
    "half-closing": Kind(lambda n: texts(300, 300 * n), (half_closing,)),
    "all of them": Kind(
        lambda n: _stop_bombs(n) + _long_next_to_short(n) + _constrained(n),
        (grammar_bombs, vanishing, half_closing),
        pages=512,
    ),
}


def run_round(kind: Kind, path: Path, n: int, sent: Counter[str]) -> int:
    """Serve a model to the clients of a round, compare each answer, and return their number.

    The answers to compare with come from sessions of a second model, which shares no pages with the server's.
    """
    requests = kind.requests(n)
    memory = None if kind.pages is None else kind.pages * page_bytes(path, "cpu")
    limits: dict[str, Any] = {"max_queue": 2 * len(requests), "max_connections": 2 * len(requests), **PATIENT}
    with (
        Model(path, device="cpu", kv_memory=memory) as model,
        running(model, max_streams=MOST_STREAMS, **limits) as server,
    ):
        done = threading.Event()

        def repeat(call: Call) -> None:
            while not done.is_set():
                call()

        calls = [call for other in kind.others for call in other(server, n, sent)]
        with ThreadPoolExecutor(max(len(calls), 1)) as threads:
            repeated = [threads.submit(repeat, call) for call in calls]
            try:
                found = answers(server, requests)
            finally:
                done.set()
        for future in repeated:
            future.result()
    with Model(path, device="cpu", threads=1, prefix_memory=0) as model:
        expected = cache(lambda r: alone(model, *json.loads(r)))
        for r, answer in zip(requests, found, strict=True):
            assert answer == expected(json.dumps(r)), r
    return len(requests)


def test_each_client_gets_what_it_gets_alone_whatever_others_send(tmp_path: Path, demo_path: Path) -> None:
    """All kinds of clients take turns until the time is over."""
    pytest.importorskip("llguidance", reason="needs the extra guide")
    embedder = write(tmp_path / "vectors.gguf", EMBEDDERS["qwen3, last"])
    counts: Counter[str] = Counter()
    for n, _ in rounds(counts):
        for name, kind in KINDS.items():
            path = embedder if kind.embeds else demo_path
            counts[f"{name}: answers"] += run_round(kind, path, int(SEED) % 100_000 + n, counts)
    sent = {"grammar bombs", "vanishing", "half-closing"}
    assert counts.keys() == {*(f"{name}: answers" for name in KINDS), *sent}
