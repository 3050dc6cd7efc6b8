"""A saved session of the bundled model."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.files.saved_sessions import PROMPT

from metal_prefill import Model


@pytest.fixture(scope="module")
def states() -> dict[str, bytes]:
    """Contents of a saved session for each requested device."""
    return {}


@pytest.fixture
def demo(device: str, demo_path: Path) -> Iterator[Model]:
    """Open the model whose fingerprint is in the stored file, on each device."""
    with Model(demo_path, device=device) as model:
        yield model


@pytest.fixture
def saved(demo: Model, device: str, states: dict[str, bytes], tmp_path: Path) -> Path:
    """State of the demo model after PROMPT."""
    path = tmp_path / "prompt.session"
    if device in states:
        path.write_bytes(states[device])
    else:
        with demo.session() as session:
            session.forward_prompt(PROMPT)
            session.save(path)
        states[device] = path.read_bytes()
    return path
