"""Answers of a hub that are almost right: listings, statuses and headers of a server on this machine.

For any answer, a call returns a file of the cache or raises `HubError`, and writes nothing elsewhere.
"""

import itertools
import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
from support.files.hub_server import Repo, serve, use_hub
from support.files.json_mutator import changed
from support.fuzzing import fuzz

from metal_prefill import HubError
from metal_prefill.hub import _download

ODD: list[Any] = [None, 0, -1, 1.5, True, "", "x", "a.gguf", "../a.gguf", "/a.gguf", "a/../../b.gguf", [], {}]
ODD += ["\0.gguf", "a\\b.gguf", "a" * 300 + ".gguf", "\ud800.gguf", 10**30, [[]], {"rfilename": 1}, "*.gguf"]
HEADERS: list[str | None] = [
    None, "", '""', '".."', '"../../x"', 'W/"../x"', '"/tmp/x"', '"a\\..\\b"', '"abc"',
]  # fmt: skip
HEADERS += ['"' + "a" * 300 + '"', "0" * 40, "\t", '"a b"', '"%2e%2e%2fx"', "-1", "99999999999999999999"]
NAMES = ("ETag", "X-Linked-ETag", "X-Repo-Commit", "X-Linked-Size", "Content-Type", "X-Error-Code")


def odd_listing(random: Random) -> bytes:
    """Make a listing with odd values in odd places, or one that is not JSON."""
    listing: Any = {"siblings": [{"rfilename": "a.gguf"}, {"rfilename": "b.gguf"}], "sha": "0" * 40}
    for _ in range(random.choice((0, 1, 2))):
        listing = changed(listing, random, ODD)
    raw = bytearray(json.dumps(listing).encode())
    for _ in range(random.choice((0, 0, 0, 1, 8))):
        raw[random.randrange(len(raw))] = random.randrange(256)
    if random.random() < 0.1:
        del raw[random.randrange(len(raw)) :]
    return bytes(raw) if random.random() > 0.02 else b"[" * 100_000


def test_answers_of_a_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    home.mkdir()
    numbers = itertools.count()
    with serve({}) as server:
        use_hub(monkeypatch, server.url, home)

        def ask(listing: Path, random: Random) -> None:
            n = next(numbers)
            cache, name = home / f"cache-{n}", f"tiny/m{n}"
            server.repos[name] = Repo(
                {"a.gguf": b"four bits"},
                listing=listing.read_bytes() if random.random() < 0.8 else None,
                headers={header: random.choice(HEADERS) for header in NAMES if random.random() < 0.3},
                status=random.choice((0, 0, 0, 0, 0, 204, 301, 400, 403, 404, 418)),
            )
            try:
                path = _download.fetch(name, random.choice(("*.gguf", "a.gguf", "b*")), cache_dir=cache)
            except HubError:
                pass
            else:
                assert path.resolve().is_relative_to(cache.resolve())
                assert path.read_bytes() == b"four bits"
            del server.repos[name]
            assert [p.name for p in home.iterdir() if p != cache] == []
            assert [p.name for p in tmp_path.iterdir()] == ["home"]
            for written in sorted(home.rglob("*"), reverse=True):
                written.rmdir() if written.is_dir() and not written.is_symlink() else written.unlink()

        fuzz("hub", 40, odd_listing, ask)
