"""A model for ranks."""

from pathlib import Path

import pytest
from support.folders.task_folders import RANKERS

from metal_prefill.conversion import convert


@pytest.fixture(scope="session")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Path of a small cross-encoder."""
    folder = tmp_path_factory.mktemp("reranker")
    return convert(RANKERS["bert"](folder / "folder").write(), folder / "model.gguf")
