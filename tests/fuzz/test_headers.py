"""Headers of model files and saved states: many more inputs than `test_fuzz` has time for.

Headers are only read: no model is opened, no process started. Of each `EACH` inputs one has a changed
structure; the others are copies of it with changed bytes. Both parsers are Python: wrong exceptions, hangs
and growing memory are findings, and no sanitizers are needed.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random

import numpy as np
import pytest
from support.files.gguf_mutator import INTEGERS, Parts, mutate, take_apart
from support.files.state_mutator import mutate_state
from support.folders import task_folders
from support.fuzzing import fuzz
from support.small_models import write
from support.tiny_models import TINY_EXPERTS, TINY_MODELS

from metal_prefill import MetalPrefillError, Model
from metal_prefill.conversion import convert
from metal_prefill.files import GGUFFile
from metal_prefill.files._hyperparameters import read_config
from metal_prefill.files._model_tensors import collect_tensors
from metal_prefill.files._task_config import read_head
from metal_prefill.storage import _session_file
from metal_prefill.tasks._pooled_head import embedding_of, logits_of

EACH = 40  # inputs made of one whose structure was changed
COUNT = 5  # of those


def variants(path: Path, header: int, random: Random) -> Iterator[None]:
    """Write copies of a file with a few other bytes in its first `header` ones in its place."""
    yield
    content = path.read_bytes()
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
        path.write_bytes(changed)
        yield


def fuzz_headers(target: str, parts: Parts, read: Callable[[Path], object]) -> None:
    """Read the headers of files that differ from `parts`."""

    def use(path: Path, random: Random) -> None:
        for _ in variants(path, path.stat().st_size - len(parts.data), random):
            with suppress(MetalPrefillError), np.errstate(all="ignore"):
                read(path)

    fuzz(target, COUNT, partial(mutate, parts), use)


@pytest.fixture(params=[*TINY_MODELS, *TINY_EXPERTS])
def tiny(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write(tmp_path / "tiny.gguf", (TINY_MODELS | TINY_EXPERTS)[request.param])


def test_headers_of_model_files(tiny: Path) -> None:
    def read(path: Path) -> None:
        with GGUFFile(path) as opened:
            for key in opened.metadata:
                with suppress(MetalPrefillError):
                    opened.metadata[key]
            collect_tensors(opened, read_config(opened))

    fuzz_headers("header", take_apart(tiny), read)


@pytest.mark.parametrize("kind", ["pairs", "late"])
def test_headers_of_heads(tmp_path: Path, kind: str) -> None:
    """Classification heads and projections are rejected or can be applied."""
    make = task_folders.RANKERS["modernbert"] if kind == "pairs" else task_folders.late_interaction

    def read(path: Path) -> None:
        with GGUFFile(path) as opened:
            config = read_config(opened)
            head = read_head(opened, config.architecture, config.dim)
            if head.labels or head.steps:
                states = np.zeros((2, config.dim), np.float32)
                (logits_of if head.labels else embedding_of)(head, states)

    fuzz_headers("head", take_apart(convert(make(tmp_path / "m").write(), tmp_path / "m.gguf")), read)


def test_headers_of_saved_states(tiny: Path, tmp_path: Path) -> None:
    saved = tmp_path / "s.session"
    with Model(tiny, device="cpu", threads=1) as model:
        with model.session() as session:
            session.forward_prompt(range(3))
            session.save(saved)
        owner = model.engine.state_owner

    def use(path: Path, random: Random) -> None:
        for _ in variants(path, int.from_bytes(path.read_bytes()[:8], "little") + 8, random):
            with suppress(MetalPrefillError):
                _session_file.read(path, owner)

    fuzz("state-header", COUNT, partial(mutate_state, saved.read_bytes()), use)
