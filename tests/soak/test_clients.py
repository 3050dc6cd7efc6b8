"""A thousand clients at the same time, each compared with the same request alone; part of ``make soak``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.running_server import running
from support.server_requests import alone, answers, request
from support.small_models import EMBEDDERS, write

from metal_prefill import Model

CLIENTS = 1000


@pytest.mark.timeout(0)
@pytest.mark.skipif("SOAK_SECONDS" not in os.environ, reason="minutes: part of make soak")
def test_each_of_a_thousand_clients_gets_what_it_gets_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "vectors.gguf", EMBEDDERS["qwen3, last"])
    requests = [request(i) for i in range(CLIENTS)]
    with Model(path, device="cpu") as model:
        with running(model, max_streams=256, max_queue=CLIENTS, max_connections=2 * CLIENTS) as server:
            found = answers(server, requests)
        assert found == [alone(model, *r) for r in requests]
