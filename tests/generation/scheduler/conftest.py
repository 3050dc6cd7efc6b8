"""A tiny model for most tests: scheduling does not depend on the texts that a model writes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from metal_prefill import Model


@pytest.fixture
def cpu(tiny_demo_path: Path) -> Iterator[Model]:
    """Open a tiny model with the tokenizer of the bundled one."""
    with Model(tiny_demo_path, device="cpu") as model:
        yield model
