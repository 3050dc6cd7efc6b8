"""Peers on the same file."""

from pathlib import Path

import pytest

from metal_prefill import bench, cli
from metal_prefill.bench import _engines


def test_a_missing_peer_names_the_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["bench", "--demo", "--compare", "llama.cpp"]) == 1
    error = capsys.readouterr().err
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
