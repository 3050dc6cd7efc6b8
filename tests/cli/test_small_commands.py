"""The example of each command's help works as printed; ``metal-prefill models``."""

import importlib
import io
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.folders import model_folders
from support.programs import finished, serving
from support.small_models import CLASSIFIERS, write

from metal_prefill import cli
from metal_prefill.commands import demo


@pytest.fixture
def home(tmp_path: Path, demo_path: Path) -> Path:
    """Return a home of the Hub's client with a folder, and GGUF files one of which is damaged."""
    snapshots = []
    for name in ("folder", "files"):
        cached = tmp_path / "hub" / f"models--tiny--{name}"
        snapshots.append(cached / "snapshots" / ("a" * 40))
        for made in (snapshots[-1], cached / "refs", cached / "blobs"):
            made.mkdir(parents=True)
        (cached / "refs" / "main").write_text("a" * 40)
    folder, files = snapshots
    shutil.copytree(model_folders.llama(tmp_path / "m").write(), folder, dirs_exist_ok=True)
    shutil.copy(demo_path, files / "demo.gguf")
    write(files / "labels.gguf", CLASSIFIERS["qwen3, yes and no"])
    (files / "damaged.gguf").write_bytes(b"GGUF")
    (files / "README.md").write_text("# Files")
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
    done = models(home, "--delete", "tiny/files")
    assert done.returncode == 1
    assert "tiny/files is not in the cache, which has tiny/folder" in done.stderr


CALLS = [name for name in cli.COMMANDS if name not in ("serve", "doctor", "trace")]  # the last need a GPU
MODELS = {"smollm2": "smollm2_path", "minilm": "minilm_folder"}  # fixtures that skip if one is missing


def example(name: str) -> str:
    found: str = importlib.import_module(f"metal_prefill.commands.{name}").EXAMPLE
    assert f"metal-prefill {name}" in found
    return found


def test_help_begins_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    for name in cli.COMMANDS:
        assert cli.main([name, "--help"]) == 0, name
        assert capsys.readouterr().out.startswith(f"example: {example(name)}\n\nusage: ")


@pytest.mark.parametrize("name", CALLS)
def test_the_example_of_a_command_works(
    name: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for model, fixture in MODELS.items():
        if model in example(name):
            request.getfixturevalue(fixture)
    piped, _, line = example(name).rpartition(" | ")
    program, *arguments = shlex.split(line)
    assert program == "metal-prefill"
    if name == "demo":  # test_demo.py runs it, with a shorter benchmark
        cli.make_parser("demo").parse_args(arguments)
        assert cli.make_parser("bench").parse_args(["bench", "tokens", *demo.BENCH]).prompts
        return
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("METAL_PREFILL_DEVICE", "cpu")
    if piped:
        command, text = shlex.split(piped)
        assert command == "echo"
        monkeypatch.setattr(sys, "stdin", io.StringIO(text + "\n"))
    assert cli.main(arguments) == 0
    assert any(capfd.readouterr())


def test_the_example_of_the_server_serves(tmp_path: Path) -> None:
    """The shell finds the command of this installation first."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    with serving(
        ["sh", "-c", f"exec {example('serve').replace('8080', '0')}"],
        cwd=tmp_path,
        env={**os.environ, "PATH": path, "METAL_PREFILL_DEVICE": "cpu"},
    ) as (process, _):
        process.send_signal(signal.SIGINT)
        assert process.wait(60) in (0, 130)
