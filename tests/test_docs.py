"""The documentation names things that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    ROOT / "emulator/README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_named_tests_exist(page: Path) -> None:
    home = page.parent if page.parent.name == "emulator" else ROOT  # the emulator is a house of its own
    for path, name in re.findall(r"((?:emulator/)?tests/[\w/]+\.py)(?:::(\w+))?", page.read_text()):
        assert (home / path).is_file(), f"{page.name} names {path}"
        if name:
            assert f"def {name}(" in (home / path).read_text(), f"{page.name} names {path}::{name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_linked_files_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_named_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for target in re.findall(r"(?:^|`)make ([\w-]+)", page.read_text(), flags=re.MULTILINE):
        assert target in targets, f"{page.name} names make {target}"


def test_the_page_on_performance_stays_short() -> None:
    """What was tried on the way belongs into the dated records that it links."""
    assert len((ROOT / "docs/performance.md").read_text(encoding="utf-8").splitlines()) <= 150
