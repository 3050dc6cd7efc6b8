"""Modules without an underscore are public, and their names exist; the version is stated once."""

import importlib
import pkgutil
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import pytest
import release
from support.places import ROOT

import metal_prefill
from metal_prefill import MissingExtraError

PUBLIC = {
    *("bench", "chat", "cli", "conversion", "engine", "errors", "files", "generation", "gpu", "hub"),
    *("integrations", "lm_eval", "model", "sentence_transformers", "sentence_transformers.cross_encoder"),
    *("sentence_transformers.quantization", "sentence_transformers.sparse_encoder"),
    *("sentence_transformers.util", "serve", "session", "storage", "synth", "tasks", "text"),
    *("__main__", "bench.__main__"),  # run by `python -m`
}


def test_all_other_modules_are_private() -> None:
    found = {module.name for module in pkgutil.walk_packages(metal_prefill.__path__, "metal_prefill.")}
    open_names = {name for name in found if "._" not in name.removesuffix(".__main__")}
    open_names -= {name for name in found if name.startswith("metal_prefill.commands")}  # of the command line
    assert {name.removeprefix("metal_prefill.") for name in open_names} == PUBLIC


@pytest.mark.parametrize("module", sorted(PUBLIC - {"__main__", "bench.__main__"}))
def test_public_names_exist(module: str) -> None:
    """Some are imported when they are first used, or need a package that is not a requirement."""
    with suppress(MissingExtraError):
        public = importlib.import_module(f"metal_prefill.{module}")
        for name in getattr(public, "__all__", ()):
            with suppress(MissingExtraError):
                getattr(public, name)


def test_the_package_contains_no_test_helpers() -> None:
    assert list(Path(metal_prefill.__file__).parent.glob("*_testing*")) == []


def test_the_package_has_the_version_of_pyproject() -> None:
    stated = release.stated_version((ROOT / "pyproject.toml").read_text())
    assert metal_prefill.__version__ == metadata.version("metal_prefill") == stated
