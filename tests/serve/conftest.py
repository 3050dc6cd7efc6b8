"""Servers that tests share, of the bundled model or a small one for text and vectors, and a browser."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.servers.page import Pages, browser_path
from support.servers.running_server import Running, running, running_with_template, serving
from support.small_models import CLASSIFIERS, EMBEDDERS, write
from support.tools import HERMES, ITERATES

from metal_prefill import Model


@pytest.fixture(scope="session")
def cpu_model(demo_path: Path) -> Iterator[Model]:
    with Model(demo_path, device="cpu") as model:
        yield model


@pytest.fixture(scope="session")
def server(cpu_model: Model) -> Iterator[Running]:
    """Serve the bundled model, as ``metal-prefill serve`` does."""
    with running(cpu_model, names=["demo", "other-name"], max_streams=64) as server:
        yield server


@pytest.fixture(scope="session")
def hermes() -> Iterator[Running]:
    """Serve the bundled model with a template that writes tools, calls and their results."""
    with running_with_template(HERMES) as server:
        yield server


@pytest.fixture(scope="session")
def iterating() -> Iterator[Running]:
    """Serve the bundled model with a template that iterates over arguments, and restricts ids of calls."""
    with running_with_template(ITERATES) as server:
        yield server


@pytest.fixture(scope="session")
def vector_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path = write(tmp_path_factory.mktemp("vectors") / "vectors.gguf", EMBEDDERS["qwen3, last"])
    with Model(path, device="cpu") as model:
        yield model


@pytest.fixture(scope="session")
def vector_server(vector_model: Model) -> Iterator[Running]:
    """Serve a model that writes text and makes vectors."""
    with running(vector_model, max_streams=64) as server:
        yield server


@pytest.fixture(scope="session")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Serve a model that ranks by yes and no."""
    path = write(tmp_path_factory.mktemp("ranks") / "ranks.gguf", CLASSIFIERS["qwen3, yes and no"])
    with serving(path) as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="the page's tests need playwright: make test-page"
    )
    path = browser_path()
    # Chromium's sandbox does not start for root.
    flags = ["--no-sandbox"] if os.geteuid() == 0 else []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=flags)
        yield browser
        browser.close()


@pytest.fixture
def pages(browser: Any) -> Iterator[Pages]:
    pages = Pages(browser)
    yield pages
    pages.close()
    assert pages.problems == []
