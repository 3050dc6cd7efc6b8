"""The site of the documentation: each page is in its navigation, and links lead to pages."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CONFIG = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
NAVIGATION = re.findall(r": (\S+\.md)$", CONFIG[CONFIG.index("\nnav:") :], flags=re.MULTILINE)
REFERENCE = {"generation", "text", "tasks", "files", "conversion", "serve", "integrations", "bench", "synth"}


def test_each_page_is_in_the_navigation_once() -> None:
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    made = {page for page in NAVIGATION if page.startswith(("examples/", "project/", "reference/"))}
    assert sorted(NAVIGATION) == sorted(pages | made)
    examples = {f"examples/{path.stem}.md" for path in (ROOT / "examples").glob("*.py")}
    assert {page for page in made if page.startswith("examples/")} == examples | {"examples/index.md"}


def test_each_public_package_has_a_page_of_reference() -> None:
    public = set()
    for path in (ROOT / "python/metal_prefill").glob("[!_]*/__init__.py"):
        names = [s for s in ast.parse(path.read_text()).body if ast.unparse(s).startswith("__all__ = [")]
        public |= {path.parent.name} if names else set()
    assert public == REFERENCE
    pages = {f"reference/{name}.md" for name in REFERENCE | {"index", "errors"}}
    assert {page for page in NAVIGATION if page.startswith("reference/")} == pages


def test_only_the_job_that_publishes_may_write() -> None:
    workflow = (ROOT / ".github/workflows/docs.yml").read_text(encoding="utf-8")
    everywhere, publishing = workflow.split("\n  publish:\n")
    assert re.findall(r"^ *([\w-]+: (?:read|write))$", everywhere, flags=re.MULTILINE) == ["contents: read"]
    granted = re.findall(r"^ *([\w-]+): write$", publishing, flags=re.MULTILINE)
    assert granted == ["pages", "id-token"]
    assert "if: github.event_name == 'push'" in publishing


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="needs the group docs (make docs)")
def test_each_broken_link_is_an_error(tmp_path: Path) -> None:
    planted = {
        "[a](nowhere.md)": "nowhere.md",
        "[a](install.md#nothing)": "nothing",
        "[a](../Makefile)": "Makefile, which has no page",
    }
    for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "emulator", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name in ("python", "tools"):
        (tmp_path / name).symlink_to(ROOT / name)
    docs = tmp_path / "docs"
    docs.mkdir()
    for path in (ROOT / "docs").iterdir():
        if path.name != "index.md":
            (docs / path.name).symlink_to(path)
    (docs / "index.md").write_text((ROOT / "docs/index.md").read_text() + "\n\n" + "\n\n".join(planted))
    (tmp_path / "mkdocs.yml").write_text(CONFIG)
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    for link, message in planted.items():
        assert re.search(rf"(WARNING|ERROR).*{re.escape(message)}", done.stderr), f"{link}\n{done.stderr}"
