"""A thousand clients at the same time, each compared with the same request alone; part of ``make soak``."""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.hostile_constraints import hostile_requests
from support.running_server import Running, read_all, request_bytes, running
from support.server_requests import alone, answers, request
from support.small_models import EMBEDDERS, write

from metal_prefill import Model

CLIENTS = 1000

Request = tuple[str, dict[str, Any]]


def check_each(
    path: Path,
    requests: list[Request],
    others: Callable[[Running], Iterable[Callable[[], object]]] = lambda server: (),
    **options: Any,
) -> None:
    """Compare the results of concurrent clients with each request alone, on a model with these options.

    `others` returns functions that further clients call meanwhile, each in a thread, again and again.
    """
    with Model(path, device="cpu", **options) as model:
        limits: dict[str, Any] = {"max_queue": len(requests), "max_connections": 2 * len(requests)}
        with running(model, max_streams=256, **limits) as server:
            done = threading.Event()

            def repeat(call: Callable[[], object]) -> None:
                while not done.is_set():
                    call()

            with ThreadPoolExecutor(64) as threads:
                repeated = [threads.submit(repeat, call) for call in others(server)]
                try:
                    found = answers(server, requests)
                finally:
                    done.set()
            for future in repeated:
                future.result()
        assert found == [alone(model, *r) for r in requests]


def texts(n: int) -> list[Request]:
    """Return requests for texts only."""
    return [r for r in map(request, range(n)) if r[0] != "/v1/embeddings"]


def page_bytes(path: Path) -> int:
    with Model(path, device="cpu") as model, model.session() as session:
        session.forward_prompt([1])
        return int(session.stats()["kv_cache_bytes"])


@pytest.mark.timeout(0)
@pytest.mark.skipif("SOAK_SECONDS" not in os.environ, reason="minutes: part of make soak")
def test_each_of_a_thousand_clients_gets_the_same_text_as_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "vectors.gguf", EMBEDDERS["qwen3, last"])
    check_each(path, [request(i) for i in range(CLIENTS)])


@pytest.mark.timeout(0)
@pytest.mark.skipif("SOAK_SECONDS" not in os.environ, reason="minutes: part of make soak")
def test_each_client_gets_its_text_with_little_memory(tmp_path: Path) -> None:
    path = write(tmp_path / "vectors.gguf", EMBEDDERS["qwen3, last"])
    check_each(path, texts(CLIENTS // 5), kv_memory=16 * page_bytes(path))


@pytest.mark.timeout(0)
@pytest.mark.skipif("SOAK_SECONDS" not in os.environ, reason="minutes: part of make soak")
def test_stop_string_bombs_change_no_other_text(demo_path: Path) -> None:
    stops = ["#" * (1000 - i) + "x" * i for i in range(1, 17)]
    bomb = {"prompt": "a", "max_tokens": 900, "stream": True, "stop": stops, "regex": "[#]{800}y"}
    bombs = [("/v1/completions", {**bomb, "temperature": 0}) for _ in range(20)]
    check_each(demo_path, bombs + texts(100))


@pytest.mark.timeout(0)
@pytest.mark.skipif("SOAK_SECONDS" not in os.environ, reason="minutes: part of make soak")
def test_long_prompts_change_no_short_text(demo_path: Path) -> None:
    how = {"max_tokens": 8, "stream": True, "temperature": 0}
    long: list[Request] = [("/v1/completions", {"prompt": f"{i} is long. " * 60, **how}) for i in range(32)]
    check_each(demo_path, long + texts(100))


@pytest.mark.timeout(0)
@pytest.mark.skipif("SOAK_SECONDS" not in os.environ, reason="minutes: part of make soak")
def test_grammar_bombs_change_no_other_text(demo_path: Path) -> None:
    """Each is a new source whenever it is sent: spaces at its end make it another one."""
    pytest.importorskip("llguidance", reason="needs the extra guide")
    sent = 0

    def bombs(server: Running) -> Iterable[Callable[[], object]]:
        def send(body: dict[str, Any]) -> None:
            nonlocal sent
            sent += 1
            kind = "grammar" if "grammar" in body else "regex"
            source = body[kind] + (" " * sent if kind == "grammar" else f"z{sent}")
            answer = httpx.post(f"{server.url}/v1/completions", json={**body, kind: source}, timeout=300)
            assert answer.status_code in (200, 400, 500), answer.text

        return [partial(send, body) for body in hostile_requests(server.service.model)]

    constrained = {"max_tokens": 12, "stream": True, "temperature": 0, "regex": "[A-Z]{4} [a-z]{6}"}
    requests = [("/v1/completions", {"prompt": f"{i}. ROMEO:", **constrained}) for i in range(40)]
    check_each(demo_path, texts(200) + requests, bombs)
    assert sent > 10


@pytest.mark.timeout(0)
@pytest.mark.skipif("SOAK_SECONDS" not in os.environ, reason="minutes: part of make soak")
def test_clients_that_close_one_direction_get_their_texts(demo_path: Path) -> None:
    body = {"prompt": "ROMEO:", "max_tokens": 9, "temperature": 0}
    found: list[str] = []

    def half_closing(server: Running) -> Iterable[Callable[[], object]]:
        def send() -> None:
            with server.connect() as connection:
                connection.sendall(request_bytes(body))
                connection.shutdown(socket.SHUT_WR)
                (text,) = re.findall(rb'"text":"((?:[^"\\]|\\.)*)"', read_all(connection))
                found.append(text.decode())

        return [send] * 16

    check_each(demo_path, texts(400), half_closing)
    assert len(found) >= 16
    assert len(set(found)) == 1
