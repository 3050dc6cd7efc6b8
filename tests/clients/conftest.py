"""Models for vectors and ranks."""

from pathlib import Path

import pytest
from support.task_folders import RANKERS

from metal_prefill import synth
from metal_prefill.conversion import convert


@pytest.fixture(scope="session")
def embedding(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Path of a small embedding model."""
    return synth.synthesize(tmp_path_factory.mktemp("m") / "small.gguf", preset="tiny-embedding")


@pytest.fixture(scope="session")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Path of a small cross-encoder."""
    folder = tmp_path_factory.mktemp("reranker")
    return convert(RANKERS["bert"](folder / "folder").write(), folder / "model.gguf")
