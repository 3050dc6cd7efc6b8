"""Many more inputs than `test_fuzz` has time for: headers of model files and saved states, read and no more.

Inputs overwrite each other in one file, which remains after a crash. No process is started, no model opened,
nothing computed. Half of the changes affect the structure, the others single bytes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from support import task_folders
from support.fuzzing import TIMEOUT, place_of, rounds, watched
from support.gguf_mutator import INTEGERS, mutate, take_apart
from support.small_models import MODELS, write
from support.state_mutator import mutate_state

from metal_prefill import MetalPrefillError, Model
from metal_prefill.conversion import convert
from metal_prefill.files import _session_file
from metal_prefill.files._architecture import collect_tensors, read_config
from metal_prefill.files._gguf_file import GGUFFile
from metal_prefill.files._pooled_head import read_head

EACH = 40  # inputs made of one that was changed by its structure

pytestmark = pytest.mark.timeout(TIMEOUT)


@contextmanager
def overwritten(target: str) -> Iterator[tuple[Path, int]]:
    """Yield a file and its descriptor; it is removed unless the block fails or ends the process."""
    path = place_of(target)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        yield path, descriptor
    finally:
        os.close(descriptor)
    path.unlink()


def variants(content: bytes, header: int, random: Random) -> Iterator[bytes]:
    """Yield the content, and copies with a few other bytes in its first `header` ones."""
    yield content
    end = max(1, min(header, len(content)))
    for _ in range(EACH - 1):
        changed = bytearray(content)
        for _ in range(random.choice((1, 1, 2, 5))):
            at = random.randrange(end)
            if random.random() < 0.5:
                width = random.choice((4, 8))
                changed[at : at + width] = (random.choice(INTEGERS) % 2 ** (8 * width)).to_bytes(
                    width, "little"
                )
            elif at < len(changed):
                changed[at] = random.randrange(256)
        if random.random() < 0.05:
            del changed[random.randrange(end) :]
        yield bytes(changed)


def put(descriptor: int, content: bytes) -> None:
    """Make this the content of a file."""
    os.ftruncate(descriptor, len(content))
    os.pwrite(descriptor, content, 0)


def test_headers_of_model_files(tmp_path: Path) -> None:
    shape = replace(MODELS["gemma3"], layers=1, dim=32, key_dim=32, heads=1, kv_heads=1, ffn=32, vocab=270)
    parts = take_apart(write(tmp_path / "m.gguf", shape))
    with overwritten("header") as (path, descriptor), watched() as renew:
        for random in rounds(1000, EACH):
            renew()
            content = mutate(parts, random)
            for variant in variants(content, len(content) - len(parts.data), random):
                put(descriptor, variant)
                with suppress(MetalPrefillError), GGUFFile(path) as opened:
                    for key in opened.metadata:
                        with suppress(MetalPrefillError):
                            opened.metadata[key]
                    collect_tensors(opened, read_config(opened))


@pytest.mark.parametrize("kind", ["pairs", "late"])
def test_headers_of_heads(tmp_path: Path, kind: str) -> None:
    """Classification heads, projections and prompts either are refused or compute something."""
    make = task_folders.RANKERS["modernbert"] if kind == "pairs" else task_folders.late_interaction
    parts = take_apart(convert(make(tmp_path / "m").write(), tmp_path / "m.gguf"))
    with overwritten("head") as (path, descriptor), watched() as renew, np.errstate(all="ignore"):
        for random in rounds(300, EACH):
            renew()
            content = mutate(parts, random)
            for variant in variants(content, len(content) - len(parts.data), random):
                put(descriptor, variant)
                with suppress(MetalPrefillError), GGUFFile(path) as opened:
                    config = read_config(opened)
                    head = read_head(opened, config.architecture, config.dim)
                    if head.labels or head.dense:
                        states = np.zeros((2, config.dim), np.float32)
                        (head.logits_of if head.labels else head.embedding_of)(states)


def test_headers_of_saved_states(tmp_path: Path) -> None:
    shape = replace(MODELS["gemma3"], layers=1, dim=32, key_dim=32, heads=1, kv_heads=1, ffn=32, vocab=270)
    saved = tmp_path / "s.session"
    with Model(write(tmp_path / "m.gguf", shape), device="cpu", threads=1) as model:
        with model.session() as session:
            session.forward_prompt(range(3))
            session.save(saved)
        owner = model.engine.state_owner
    plain = saved.read_bytes()
    with overwritten("state-header") as (path, descriptor), watched() as renew:
        for random in rounds(1000, EACH):
            renew()
            content = mutate_state(plain, random)
            for variant in variants(content, int.from_bytes(content[:8], "little") + 8, random):
                put(descriptor, variant)
                with suppress(MetalPrefillError):
                    _session_file.read(path, owner)
