"""Charts of results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from metal_prefill import cli
from metal_prefill.bench import BenchResults


def test_a_chart_is_drawn(measured: BenchResults, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    peers = [replace(row, engine="llama.cpp") for row in measured.rows]
    picture = tmp_path / "chart.png"
    BenchResults([*measured.rows, *peers]).plot(str(picture))
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_chart_shows_the_limit(
    measured: BenchResults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")  # text is stored as text
    for limit_ts, shown in ((None, False), (5000.0, True)):
        rows = [replace(row, limit_ts=limit_ts) for row in measured.rows]
        BenchResults(rows).plot(str(tmp_path / "chart.svg"))
        assert ("limit of 8-bit products" in (tmp_path / "chart.svg").read_text()) is shown


def test_plots_without_matplotlib_name_the_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["bench", "--demo", "--plot", "out.png"]) == 1
    assert "metal_prefill[plot]" in capsys.readouterr().err
