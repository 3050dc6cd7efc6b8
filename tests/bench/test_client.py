"""Engines in separate processes."""

import signal
import sys
from pathlib import Path

import pytest

from metal_prefill import bench
from metal_prefill.bench import _client, _engines
from metal_prefill.bench._cases import Case
from metal_prefill.bench._client import WorkerProcess
from metal_prefill.bench._engines import Options


def options_for(path: Path) -> Options:
    return Options(path=str(path), max_context=64, max_prompt=32, threads=1, device="cpu")


def test_a_worker_that_cannot_load_reports_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(b"nothing")
    with pytest.raises(bench.BenchError, match=r"metal_prefill: GGUFError: .*bad\.gguf.*loading the model"):
        WorkerProcess(_engines.OURS, options_for(path), 1024)


def test_a_worker_that_dies_is_named(demo_path: Path) -> None:
    worker = WorkerProcess(_engines.OURS, options_for(demo_path), 1024)
    try:
        assert worker.sample(Case(8, 0, 0))[0] > 0
        worker._process.kill()
        worker._process.wait()
        with pytest.raises(bench.BenchError, match=r"metal_prefill: its process died \(SIGKILL\) while pp8"):
            worker.sample(Case(8, 0, 0))
    finally:
        worker.close()


def test_peers_run_in_separate_processes(demo_path: Path) -> None:
    first = WorkerProcess(_engines.OURS, options_for(demo_path), 1024)
    second = WorkerProcess(_engines.OURS, options_for(demo_path), 1024)
    try:
        assert first._process.pid != second._process.pid
        assert first.peak_rss() > first.rss_before_load > 0
    finally:
        first.close()
        second.close()
    assert first._process.returncode == second._process.returncode == 0


@pytest.mark.parametrize("died", [signal.SIGILL, signal.SIGSEGV])
def test_a_crash_of_llama_cpp_on_amx_names_the_compiler(
    died: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = (sys.executable, "-c", f"import os; os.kill(os.getpid(), {int(died)})")
    for name, has_amx, named in [
        ("llama.cpp", True, True),
        ("llama.cpp", False, False),
        ("openvino", True, False),
    ]:
        monkeypatch.setattr(_client, "has_amx", lambda value=has_amx: value)
        with pytest.raises(bench.BenchError, match=f"its process died \\({died.name}") as error:
            _client.JsonProcess(name, command, "loading the model")
        assert ("GCC 12 miscompiles llama.cpp: build it with clang" in str(error.value)) == named
