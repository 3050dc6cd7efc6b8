"""The bundled model, for tests of constraints."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from metal_prefill import Model
from metal_prefill.generation import _constraint


@pytest.fixture(scope="module")
def opened(demo_path: Path) -> Iterator[Model]:
    """Open the bundled model once: each model with constraints starts a fork server."""
    with Model(demo_path, device="cpu", threads=1) as model:
        yield model


@pytest.fixture
def model(opened: Model) -> Model:
    """Return the bundled model, whose vocabulary has 1,024 tokens. It has no constraint yet."""
    _constraint._vocabulary(opened.tokenizer)._known.clear()
    return opened
