"""A thousand clients at the same time, each compared with the same request alone; part of ``make soak``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from support.running_server import running
from support.server_requests import alone, answers, request
from support.small_models import EMBEDDERS, write

from metal_prefill import Model

CLIENTS = 1000

Request = tuple[str, dict[str, Any]]


def check_each(path: Path, requests: list[Request], **options: Any) -> None:
    """Compare what clients get at the same time with each request alone, on a model with these options."""
    with Model(path, device="cpu", **options) as model:
        limits: dict[str, Any] = {"max_queue": len(requests), "max_connections": 2 * len(requests)}
        with running(model, max_streams=256, **limits) as server:
            found = answers(server, requests)
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
def test_each_of_a_thousand_clients_gets_what_it_gets_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "vectors.gguf", EMBEDDERS["qwen3, last"])
    check_each(path, [request(i) for i in range(CLIENTS)])


@pytest.mark.timeout(0)
@pytest.mark.skipif("SOAK_SECONDS" not in os.environ, reason="minutes: part of make soak")
def test_each_client_gets_its_text_where_memory_is_tiny(tmp_path: Path) -> None:
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
