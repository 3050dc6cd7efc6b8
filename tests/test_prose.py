"""The check of phrases reports the right ones."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import check_prose  # noqa: E402


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("docs/page.md", "The device is not to be" + " had."),
        ("cpp/page.h", "// Nobody" + " else reads it."),
        ("python/page.py", '    """Of' + ' them."""'),
        ("python/page.py", '    """What' + ' a thread holds."""'),
    ],
)
def test_a_phrase_is_reported_with_its_line_and_a_replacement(path: str, line: str) -> None:
    findings = list(check_prose.find(path, f"fine\n{line}\n"))
    assert [(finding.path, finding.line) for finding in findings] == [(path, 2)]
    assert str(findings[0]).startswith(f"{path}:2: '{findings[0].phrase.strip()}': write {findings[0].hint}")


def test_quoted_phrases_and_native_sentences_are_not_reported() -> None:
    text = "`at" + " hand` is not written.\nThe handle is available, and who calls it is logged.\n"
    assert list(check_prose.find("page.md", text)) == []
