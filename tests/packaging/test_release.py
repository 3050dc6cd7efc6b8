"""The version is defined once, and a release whose tag, version and changelog differ is rejected."""

from __future__ import annotations

from importlib import metadata

import pytest
import release
from support.places import ROOT

import metal_prefill

PYPROJECT = """\
[build-system]
version = "9.9.9"

[project]
name = "metal_prefill"
version = "1.2.3"
"""
CHANGELOG = "# Changelog\n\n## Unreleased\n\n## 1.2.3 - 2027-01-31\n\n* All.\n\n## 1.2.2 - 2026-12-01\n"


def test_the_package_has_the_version_of_pyproject() -> None:
    stated = release.stated_version((ROOT / "pyproject.toml").read_text())
    assert metal_prefill.__version__ == metadata.version("metal_prefill") == stated


def test_the_version_is_in_no_other_source() -> None:
    version = release.stated_version((ROOT / "pyproject.toml").read_text())
    folders = [*(ROOT / "python").rglob("*.py"), *(ROOT / "cpp").rglob("*.*")]
    sources = [ROOT / "CMakeLists.txt", ROOT / "Makefile", *folders]
    assert len(sources) > 50
    assert [path for path in sources if f'"{version}"' in path.read_text(encoding="utf-8")] == []


def test_a_consistent_release_passes() -> None:
    assert release.problems("v1.2.3", PYPROJECT, CHANGELOG) == []


@pytest.mark.parametrize(
    ("tag", "changelog", "problem"),
    [
        ("v1.2.4", CHANGELOG, "the tag is v1.2.4, but pyproject.toml states version 1.2.3"),
        ("1.2.3", CHANGELOG, "the tag is 1.2.3, but"),
        ("v1.2.3", "## Unreleased\n\n* All of 1.2.3.\n", "CHANGELOG.md has no heading '## 1.2.3 - "),
        ("v1.2.3", CHANGELOG.replace("1.2.3 - 2027-01-31", "1.2.3"), "CHANGELOG.md has no heading"),
    ],
)
def test_an_inconsistent_release_is_rejected(tag: str, changelog: str, problem: str) -> None:
    (found,) = release.problems(tag, PYPROJECT, changelog)
    assert problem in found
