"""A tiny model file with any changes."""

from pathlib import Path
from typing import Any

import pytest
from support.files.llama_file import Open, model_file

from metal_prefill.files import GGUFFile


@pytest.fixture
def open_model(tmp_path: Path) -> Open:
    """Return a function that writes a file with changes, and opens it."""

    def open_model(*args: Any, **kwargs: Any) -> GGUFFile:
        path = tmp_path / "model.gguf"
        path.write_bytes(model_file(*args, **kwargs))
        return GGUFFile(path)

    return open_model
