"""Clients of a server at the same time, each compared with the same request alone; part of ``make soak``."""

import os
import sys
import time
from collections import Counter
from itertools import count
from pathlib import Path

import pytest
from support.small_models import EMBEDDERS, write
from support.soak import Footprint, assert_steady
from support.soak_clients import KINDS, run_round

SEED = int(os.environ.get("SOAK_SEED", "1")) % 100_000
SECONDS = float(os.environ.get("SOAK_SECONDS", "0"))

pytestmark = [
    pytest.mark.timeout(0),
    pytest.mark.skipif(not SECONDS, reason="minutes: part of make soak"),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]


def test_each_client_gets_what_it_gets_alone_whatever_others_send(tmp_path: Path, demo_path: Path) -> None:
    """Each kind of clients in turn, at least once, until the time is over."""
    pytest.importorskip("llguidance", reason="needs the extra guide")
    embedder = write(tmp_path / "vectors.gguf", EMBEDDERS["qwen3, last"])
    compared: Counter[str] = Counter()
    rounds: Counter[str] = Counter()
    sent: Counter[str] = Counter()
    footprints: list[Footprint] = []
    begin = time.monotonic()
    for n in count(SEED):
        for name, kind in KINDS.items():
            if footprints and time.monotonic() - begin > SECONDS:
                break
            start = time.monotonic()
            compared[name] += run_round(kind, embedder if kind.embeds else demo_path, n, sent)
            rounds[name] += 1
            print(f"{n}: {name}, {time.monotonic() - start:.0f} s, {Footprint.now()}", flush=True)
        footprints.append(Footprint.now())
        if time.monotonic() - begin > SECONDS:
            break
    print(f"seed {SEED}, {(time.monotonic() - begin) / 60:.0f} minutes, sent by others: {dict(sent)}")
    for name in KINDS:
        print(f"{name}: {rounds[name]} rounds, {compared[name]} answers, each as alone")
    print(f"in all {sum(rounds.values())} rounds, {sum(compared.values())} answers")
    print(f"at the start {footprints[0]}, at the end {footprints[-1]}")
    assert set(rounds) == set(KINDS)
    assert set(sent) == {"grammar bombs", "vanishing", "half-closing"}
    assert_steady(footprints)
