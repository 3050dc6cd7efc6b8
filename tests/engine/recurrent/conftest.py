"""Models with each kind of recurrent layer."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from support.recurrent import ARCHITECTURES, LARGE
from support.small_models import write
from support.tiny_models import TINY_RECURRENT

from metal_prefill import Model


@pytest.fixture(params=ARCHITECTURES)
def name(request: pytest.FixtureRequest) -> str:
    """Run a test with each architecture."""
    return str(request.param)


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Write the tiny model of each architecture once."""
    folder = tmp_path_factory.mktemp("tiny")
    return cache(lambda name: write(folder / f"{name}.gguf", TINY_RECURRENT[name]))


@pytest.fixture
def model(device: str, name: str, tiny_path: Callable[[str], Path]) -> Iterator[Model]:
    with Model(tiny_path(name), device=device, threads=2) as model:
        yield model


@pytest.fixture(scope="module", params=LARGE)
def large_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model whose states are larger than its pages."""
    return write(tmp_path_factory.mktemp("large") / "large.gguf", LARGE[request.param])
