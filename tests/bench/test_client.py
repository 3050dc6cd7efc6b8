"""Engines in separate processes, peers on the same file, and the command `bench`."""

import json
import sys
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from support.bench_fakes import options_for
from support.programs import Run, finished

from metal_prefill import bench, default_model_path
from metal_prefill.bench import _engines
from metal_prefill.bench._cases import Case
from metal_prefill.bench._worker import WorkerProcess
from metal_prefill.synth import synthesize


def test_a_worker_that_cannot_load_reports_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(b"nothing")
    with pytest.raises(bench.BenchError, match=r"metal_prefill: GGUFError: .*bad\.gguf.*loading the model"):
        WorkerProcess(_engines.OURS, options_for(path), 1024)


def test_a_worker_that_dies_is_named(demo_path: Path) -> None:
    worker, other = (WorkerProcess(_engines.OURS, options_for(demo_path), 1024) for _ in range(2))
    try:
        before = worker.peak_rss
        assert worker.sample(Case(200, 0, 0))[0] > 0
        assert worker.peak_rss > before > demo_path.stat().st_size
        worker._process.kill()
        worker._process.wait()
        with pytest.raises(bench.BenchError, match=r"metal_prefill: its process died \(SIGKILL\) while pp8"):
            worker.sample(Case(8, 0, 0))
    finally:
        worker.close()
        other.close()
    assert other._process.returncode == 0  # each engine has a process of its own


def test_a_missing_peer_names_the_extra(errors: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    error = errors("bench", "--demo", "--compare", "llama.cpp", code=1)
    assert "llama-cpp-python" in error
    assert "metal_prefill[bench]" in error


@pytest.mark.parametrize("peer", ["llama.cpp", "openvino"])
def test_a_peer_generates_the_same_tokens(
    peer: str, demo_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("METAL_PREFILL_CACHE", str(tmp_path))
    for module in _engines.KINDS[peer].modules:
        pytest.importorskip(module)
    results = bench.run(
        demo_path, prompts=[8], n_gen=2, repetitions=1, threads=1, device="cpu", compare=[peer], patience=0
    )
    row = results.row(peer, "pp8")
    assert row.ratio is not None
    assert row.ratio.median > 0
    assert row.n_threads == 1


def test_the_command_prints_only_json() -> None:
    words = "metal_prefill.bench --demo -p 4 -n 2 -r 1 -t 1 --patience 0"
    command = [sys.executable, "-m", *words.split()]
    out = finished([*command, "--json", "-"], check=True).stdout
    assert [row["test"] for row in json.loads(out)] == ["pp4", "tg2"]


def test_options_of_other_functions_are_rejected_with_the_name_of_the_called_one() -> None:
    with pytest.raises(TypeError, match=r"run_embeddings\(\) got an unexpected keyword argument 'prompts'"):
        bench.run_embeddings("missing.gguf", prompts=[4])  # type: ignore[call-arg]


@pytest.mark.usefixtures("_quiet_machine")
def test_the_command_prints_a_table_of_the_named_model_and_writes_json(tmp_path: Path, output: Run) -> None:
    model, file = synthesize(tmp_path / "named.gguf", preset="tiny"), tmp_path / "rows.json"
    out = output(*("bench", "-m", model, "-p", 4, "-n", 2, "-r", 1, "-t", 1, "--json", file))
    rows = json.loads(file.read_text(encoding="utf-8"))
    assert [row["test"] for row in rows] == ["pp4", "tg2"]
    for row in rows:
        assert row["model_filename"] == str(model)
        assert row["test"] in out


@pytest.mark.parametrize(
    ("words", "function", "arguments"),
    [
        ("-p 4,8 --sampled", "run", {"prompts": [4, 8], "sampled": True, "patience": 60.0}),
        ("embed --text-tokens 16", "run_embeddings", {"text_tokens": [16], "repetitions": 5}),
        ("serve --clients 2 -r 3", "run_serving", {"clients": [2], "repetitions": 3, "compare": []}),
        ("agents --compare llama-server", "run_agents", {"compare": ["llama-server"], "threads": None}),
    ],
)
def test_each_mode_of_the_command_measures_what_it_names(
    words: str, function: str, arguments: dict[str, Any], output: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}
    original = getattr(bench, function)

    def measured(model: Path, **options: Any) -> bench.BenchResults:
        signature(original).bind(model, **options)
        given.update(options, model=model)
        return bench.BenchResults([])

    monkeypatch.setattr(bench, function, measured)
    output("bench", *words.split(), "--demo")
    assert given["model"] == default_model_path()
    assert {name: given.get(name) for name in arguments} == arguments
