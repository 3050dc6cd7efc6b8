"""Files of encoders with heads, each converted once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import task_folders
from support.encoder_tasks import FileOf
from support.model_folders import Folder

from metal_prefill.conversion import convert


@pytest.fixture(scope="session")
def record() -> dict[str, Any]:
    """Results of transformers and sentence-transformers."""
    return task_folders.recorded()


@pytest.fixture(scope="session")
def file_of(tmp_path_factory: pytest.TempPathFactory) -> FileOf:
    """Return a function that converts a folder; each is converted once for each type of tensors."""
    files: dict[tuple[Callable[[Path], Folder], str], Path] = {}

    def file_of(make: Callable[[Path], Folder], tensor_type: str = "auto") -> Path:
        if (make, tensor_type) not in files:
            path = tmp_path_factory.mktemp("encoder")
            folder = make(path / "folder").write()
            files[make, tensor_type] = convert(folder, path / "model.gguf", tensor_type=tensor_type)
        return files[make, tensor_type]

    return file_of
