"""Rows: their fields, contents and presentation."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.bench_fakes import SteadyCalibrator, compare, fakes

import metal_prefill
from metal_prefill.bench import BenchResults, _engines, _machine
from metal_prefill.bench._report import EMULATOR_NOTE

# Names that llama-bench uses.
FIELDS = {
    *("cpu_info", "model_filename", "model_type", "test_time", "model_size", "model_n_params", "n_threads"),
    *("n_prompt", "n_gen", "n_depth", "avg_ns", "stddev_ns", "avg_ts", "stddev_ts", "samples_ns"),
    "samples_ts",
}


@pytest.mark.usefixtures("_quiet_machine")
def test_a_slower_result_has_a_ratio_below_one(demo_path: Path) -> None:
    results = compare(fakes(ours=30, llama=10, openvino=60), demo_path)
    loss, win = results.row("llama.cpp", "pp8").ratio, results.row("openvino", "pp8").ratio
    assert loss is not None
    assert loss.median == pytest.approx(1 / 3)
    assert loss.high < 1
    assert win is not None
    assert win.median == pytest.approx(2.0)
    assert results.row(_engines.OURS, "pp8").ratio is None
    assert "0.33x (0.33-0.33)" in results._repr_html_()


def test_an_emulator_is_never_presented_as_metal(demo_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_machine, "Calibrator", lambda threads: SteadyCalibrator())
    workers = fakes(ours=10)
    workers[_engines.OURS].device = "Metal emulator (CPU, 2 threads)"
    results = compare(workers, demo_path)
    assert all(EMULATOR_NOTE in row.note for row in results.rows)
    assert EMULATOR_NOTE in results._repr_html_()


def test_rows_have_the_fields_of_llama_bench(measured: BenchResults) -> None:
    rows = json.loads(measured.to_json())
    assert [row["test"] for row in rows] == ["pp4", "pp16", "tg3"]
    for row in rows:
        assert row.keys() >= FIELDS
        assert len(row["samples_ns"]) == len(row["samples_ts"]) == 2
        tokens = row["n_prompt"] + row["n_gen"]
        assert row["samples_ts"] == pytest.approx([tokens * 1e9 / ns for ns in row["samples_ns"]])
        assert row["avg_ns"] == pytest.approx(sum(row["samples_ns"]) / 2)
        assert row["n_prompt"] == 0 or row["n_gen"] == 0  # prefill and decode are separate


def test_rows_describe_the_measurement(measured: BenchResults, demo_path: Path) -> None:
    row = measured.row(_engines.OURS, "pp16")
    assert row.build == f"metal_prefill {metal_prefill.__version__}"
    assert row.device.startswith("CPU")
    assert row.n_threads == 1
    assert row.compute == "int8"  # what "auto" selects
    assert row.model_type == "llama 4.7M Q4_0"
    assert row.model_n_params == 4_721_760
    assert 2_800_000 < row.model_size < demo_path.stat().st_size
    assert row.load_ns > 0
    assert row.peak_rss > row.model_size


def test_html_is_escaped(measured: BenchResults) -> None:
    rows = [replace(row, device="<b>CPU</b> & co") for row in measured.rows]
    html = BenchResults(rows)._repr_html_()
    assert "&lt;b&gt;CPU&lt;/b&gt; &amp; co" in html
    assert "<b>" not in html
    assert html.count("<pre>") == html.count("</pre>") == 1


def test_empty_results_are_shown_as_empty() -> None:
    assert "no results" in BenchResults()._repr_html_()


def test_an_unknown_row_is_named(measured: BenchResults) -> None:
    with pytest.raises(KeyError, match="pp99"):
        measured.row(_engines.OURS, "pp99")
