"""Recipes of other package managers name the version and the requirements of this one."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECIPE = (ROOT / "packaging/conda/recipe.yaml").read_text(encoding="utf-8")
FORMULA = (ROOT / "packaging/homebrew/metal-prefill.rb").read_text(encoding="utf-8")
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
CONDA_NAMES = {"xxhash": "python-xxhash"}


def requirements(text: str) -> set[tuple[str, str]]:
    return set(re.findall(r"([\w-]+) ?>=([\d.]+)", text))


def listed(name: str) -> str:
    """Return the text of a list of strings in pyproject.toml."""
    found = re.search(rf"^{name} = \[(.*?)\]", PROJECT, flags=re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def test_recipes_match_the_package_version() -> None:
    (version,) = re.findall(r'^version = "(.*)"$', PROJECT, flags=re.MULTILINE)
    assert re.findall(r'^  version: "(.*)"$', RECIPE, flags=re.MULTILINE) == [version]
    assert f"metal_prefill-{version}.tar.gz" in FORMULA


def test_the_conda_recipe_matches_the_requirements() -> None:
    run = RECIPE[RECIPE.index("  run:\n") : RECIPE.index("\ntests:")]
    expected = {(CONDA_NAMES.get(name, name), least) for name, least in requirements(listed("dependencies"))}
    (python,) = re.findall(r'^requires-python = ">=(.*)"$', PROJECT, flags=re.MULTILINE)
    assert requirements(run) == expected | {("python", python)}


def test_the_conda_recipe_matches_the_build_tools() -> None:
    build = RECIPE[RECIPE.index("  build:\n", RECIPE.index("requirements:")) : RECIPE.index("  run:\n")]
    assert requirements(build) == requirements(listed("build"))
