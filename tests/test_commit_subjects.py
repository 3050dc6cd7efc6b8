"""The check of commit subjects, in a repository with an upstream branch."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import check_commits  # noqa: E402

LONGEST = "x" * 72


def git(folder: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=n", "-c", "user.email=e@example.com", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_commits_that_the_upstream_branch_lacks_are_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub, clone = tmp_path / "hub", tmp_path / "clone"
    git(tmp_path, "init", "-q", "-b", "main", str(hub))
    git(hub, "commit", "-q", "--allow-empty", "-m", f"{LONGEST}, but published")
    git(tmp_path, "clone", "-q", str(hub), str(clone))
    monkeypatch.setattr(check_commits, "ROOT", clone)
    assert check_commits.main() == 0
    git(clone, "commit", "-q", "--allow-empty", "-m", LONGEST)
    assert check_commits.main() == 0
    git(clone, "commit", "-q", "--allow-empty", "-m", f"{LONGEST}y")
    git(clone, "commit", "-q", "--allow-empty", "-m", "Add a period.")
    assert check_commits.main() == 1
    error = capsys.readouterr().err
    assert f"73 characters, at most 72 are allowed: {LONGEST}y" in error
    assert "a final period: Add a period." in error
    assert "published" not in error


def test_a_folder_without_history_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_commits, "ROOT", tmp_path)
    assert check_commits.main() == 0
