"""``metal-prefill models``: what opens without a download, and deleting from the Hub's cache."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support import model_folders
from support.programs import finished
from support.small_models import CLASSIFIERS, write


@pytest.fixture
def home(tmp_path: Path, demo_path: Path) -> Path:
    """Return a home of the Hub's client with a folder, and GGUF files one of which is damaged."""
    for repo, files in {"tiny/folder": ("llama",), "tiny/files": ("demo", "labels", "damaged")}.items():
        cached = tmp_path / "hub" / f"models--{repo.replace('/', '--')}"
        snapshot = cached / "snapshots" / ("a" * 40)
        snapshot.mkdir(parents=True)
        (cached / "refs").mkdir()
        (cached / "refs" / "main").write_text("a" * 40)
        (cached / "blobs").mkdir()
        if "llama" in files:
            shutil.copytree(model_folders.llama(tmp_path / "m").write(), snapshot, dirs_exist_ok=True)
        else:
            shutil.copy(demo_path, snapshot / "demo.gguf")
            write(snapshot / "labels.gguf", CLASSIFIERS["qwen3, yes and no"])
            (snapshot / "damaged.gguf").write_bytes(b"GGUF")
            (snapshot / "README.md").write_text("# Files")
    return tmp_path


def models(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return finished(
        [sys.executable, "-m", "metal_prefill", "models", *arguments],
        env={**os.environ, "HF_HOME": str(home)},
    )


def test_models_are_listed_by_what_they_do_and_deleted(home: Path) -> None:
    listed = models(home)
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in listed.stdout.splitlines()]
    found = {row[0]: row[1] for row in rows if len(row) == 3}
    assert found["(without -m)"] == found["tiny/files:demo.gguf"] == found["tiny/folder"] == "text"
    assert found["tiny/files:labels.gguf"] == "labels, ranks"
    assert found["tiny/files:damaged.gguf"].startswith("does not open: ")
    assert models(home, "--delete", "tiny/files").stdout.startswith("tiny/files: deleted, ")
    left = models(home).stdout
    assert "tiny/folder" in left
    assert "tiny/files" not in left


def test_a_repository_that_is_not_cached_is_named(home: Path) -> None:
    done = models(home, "--delete", "tiny/other")
    assert done.returncode == 1
    assert "tiny/other is not in the cache, which has tiny/files, tiny/folder" in done.stderr
