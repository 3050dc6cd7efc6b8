"""Clients of a server at the same time, each compared with the same request alone; part of ``make soak``."""

import os
import sys
from collections import Counter
from pathlib import Path

import pytest
from support.servers.soak_clients import KINDS, run_round
from support.small_models import EMBEDDERS, write
from support.soak import rounds

SEED = int(os.environ.get("SOAK_SEED", "1")) % 100_000
SECONDS = float(os.environ.get("SOAK_SECONDS", "0"))

pytestmark = [
    pytest.mark.timeout(0),
    pytest.mark.skipif(not SECONDS, reason="minutes: part of make soak"),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]


def test_each_client_gets_what_it_gets_alone_whatever_others_send(tmp_path: Path, demo_path: Path) -> None:
    """All kinds of clients in turn, until the time is over."""
    pytest.importorskip("llguidance", reason="needs the extra guide")
    embedder = write(tmp_path / "vectors.gguf", EMBEDDERS["qwen3, last"])
    counts: Counter[str] = Counter()
    for n, _ in rounds(SECONDS, counts):
        for name, kind in KINDS.items():
            path = embedder if kind.embeds else demo_path
            counts[f"{name}: answers"] += run_round(kind, path, SEED + n, counts)
    sent = {"grammar bombs", "vanishing", "half-closing"}
    assert counts.keys() == {*(f"{name}: answers" for name in KINDS), *sent}
