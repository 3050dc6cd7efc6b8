"""Benchmarks: what is counted, what is dropped, what is printed. No test depends on how fast anything is."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pytest
from support import small_models

import metal_prefill
from metal_prefill import _core, bench, cli
from metal_prefill.bench import engines, kernels, limit, machine, model_file, runner, samples, summary
from metal_prefill.bench.cases import Case, make_cases, token_ids
from metal_prefill.bench.client import WorkerProcess
from metal_prefill.bench.engines import Identity, Options
from metal_prefill.bench.results import EMULATOR_NOTE, BenchResults
from metal_prefill.bench.samples import Sample, select
from metal_prefill.bench.summary import Spread

# The names that llama-bench gives to what we report too.
LLAMA_BENCH_FIELDS = {
    "cpu_info": str,
    "model_filename": str,
    "model_type": str,
    "model_size": int,
    "model_n_params": int,
    "n_threads": int,
    "n_prompt": int,
    "n_gen": int,
    "n_depth": int,
    "test_time": str,
    "avg_ns": float,
    "stddev_ns": float,
    "avg_ts": float,
    "stddev_ts": float,
    "samples_ns": list,
    "samples_ts": list,
}
OUR_FIELDS = {
    "engine": str,
    "test": str,
    "build": str,
    "device": str,
    "median_ns": float,
    "median_ts": float,
    "load_ns": int,
    "peak_rss": int,
    "n_dropped": int,
    "n_degraded": int,
    "note": str,
}


@dataclass
class FakeWorker:
    """An engine whose every token takes `ns_per_token`, and that remembers what it was asked."""

    name: str
    ns_per_token: int
    device: str = "CPU (fake)"
    switches: Iterator[int] | None = None
    log: list[str] = field(default_factory=list)
    load_ns: int = 5_000_000
    closed: bool = False

    @property
    def identity(self) -> Identity:
        return Identity(f"{self.name} 1.0", self.device, 2, "none")

    def sample(self, case: Case) -> tuple[int, int]:
        self.log.append(self.name)
        switches = next(self.switches) if self.switches is not None else 0
        return case.timed_tokens * self.ns_per_token, switches

    def peak_rss(self) -> int:
        return 100 << 20

    def close(self) -> None:
        self.closed = True


class SteadyCalibrator(machine.Calibrator):
    """A machine whose calibration takes the given times, then its best one for ever."""

    def __init__(self, *times_ns: int, best_ns: int = 1000) -> None:
        self.times = list(times_ns)
        self.best_ns = best_ns
        self.reference_ns = best_ns

    def measure(self) -> int:
        elapsed = self.times.pop(0) if self.times else self.best_ns
        self.reference_ns = min(self.reference_ns, elapsed)
        return elapsed

    def close(self) -> None:
        pass


@pytest.fixture
def _quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "Calibrator", lambda threads: SteadyCalibrator())
    monkeypatch.setattr(machine, "stolen_ns", lambda: 0)
    monkeypatch.setattr(runner, "REST_S", 0.0)
    monkeypatch.setattr(engines, "check_installed", lambda name: None)


def compare(workers: dict[str, FakeWorker], demo_path: Path, **arguments: object) -> BenchResults:
    options = {"prompts": [8], "n_gen": 4, "repetitions": 3} | arguments
    return bench.run(
        demo_path,
        compare=[name for name in workers if name != engines.OURS],
        make_worker=lambda name, options, vocab: workers[name],
        **options,  # type: ignore[arg-type]  # a test's arguments, passed on
    )


def fakes(**ns_per_token: int) -> dict[str, FakeWorker]:
    names = {"ours": engines.OURS, "llama": "llama.cpp", "openvino": "openvino"}
    return {names[key]: FakeWorker(names[key], ns) for key, ns in ns_per_token.items()}


def test_cases_are_named_as_llama_bench_names_them() -> None:
    cases = make_cases([32, 512], 64, depth=32)
    assert [case.name for case in cases] == ["pp32", "pp512", "tg64"]
    assert [case.timed_tokens for case in cases] == [32, 512, 64]
    assert [case.context for case in cases] == [32, 512, 96]


def test_decoding_can_be_left_out() -> None:
    assert [case.name for case in make_cases([7], 0)] == ["pp7"]


@pytest.mark.parametrize(("prompts", "n_gen"), [([0], 1), ([-3], 1), ([4, 4], 1), ([], 0), ([4], -1)])
def test_impossible_cases_are_refused(prompts: list[int], n_gen: int) -> None:
    with pytest.raises(ValueError, match=r"prompt|decod|measure"):
        make_cases(prompts, n_gen)


def test_every_engine_gets_the_same_tokens() -> None:
    ids = token_ids(100, vocab_size=50)
    assert ids.min() >= 0
    assert ids.max() < 50
    assert (token_ids(100, 50) == ids).all()
    assert (token_ids(30, 50) == ids[:30]).all()


def test_spread_is_median_and_range() -> None:
    assert summary.spread([5.0, 1.0, 2.0]) == Spread(2.0, 1.0, 5.0)
    assert summary.spread([4.0, 1.0]) == Spread(2.5, 1.0, 4.0)
    with pytest.raises(ValueError, match="no samples"):
        summary.spread([])


def test_standard_deviation_is_that_of_a_sample() -> None:
    assert summary.stddev([2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0]) == pytest.approx((32 / 7) ** 0.5)
    assert summary.stddev([3.0]) == 0.0


def test_ratios_pair_neighbours_in_time() -> None:
    # Both slow down together to a tenth: the ratio stays 2, which that of the extremes would not show.
    assert summary.ratios([200.0, 20.0, 200.0], [100.0, 10.0, 100.0]) == Spread(2.0, 2.0, 2.0)
    assert summary.ratios([50.0, 80.0, 90.0], [100.0, 100.0]) == Spread(0.65, 0.5, 0.8)


def test_clean_samples_come_first_and_degraded_ones_are_counted() -> None:
    good, slow = Sample(10, calibration_ns=100), Sample(10, calibration_ns=200)
    selection = select([slow, good, slow, good, good], 3, calibration_limit_ns=125)
    assert selection.kept == [good, good, good]
    assert (selection.n_dropped, selection.n_degraded) == (2, 0)


def test_the_least_degraded_samples_fill_up_in_the_order_taken() -> None:
    good, slow, slower = Sample(1, 100), Sample(2, 200), Sample(3, 300)
    selection = select([slow, slower, good], 2, calibration_limit_ns=125)
    assert selection.kept == [slow, good]
    assert (selection.n_dropped, selection.n_degraded) == (1, 1)


def test_the_choice_of_samples_ignores_how_long_they_took() -> None:
    chosen = [select([Sample(ns, 100), Sample(5, 100), Sample(6, 500)], 2, 125).kept for ns in (1, 10**9)]
    assert [[sample.calibration_ns for sample in kept] for kept in chosen] == [[100, 100], [100, 100]]


@pytest.mark.parametrize(
    ("sample", "disturbed"),
    [
        (Sample(10_000_000, 100, switches=samples.SWITCHES_ALLOWED), False),
        (Sample(10_000_000, 100, switches=samples.SWITCHES_ALLOWED + 1), True),
        (Sample(1_000_000_000, 100, switches=samples.SWITCHES_ALLOWED + 20), False),
        (Sample(10_000_000, 100, stolen_ns=10_000_000), True),
        (Sample(10_000_000_000, 100, stolen_ns=10_000_000), False),
    ],
)
def test_a_sample_is_disturbed_by_whoever_takes_the_core(sample: Sample, disturbed: bool) -> None:
    assert sample.disturbed() is disturbed


@pytest.mark.usefixtures("_quiet_machine")
def test_engines_take_turns(demo_path: Path) -> None:
    log: list[str] = []
    workers = fakes(ours=10, llama=20, openvino=30)
    for worker in workers.values():
        worker.log = log
    compare(workers, demo_path, n_gen=0)
    names = list(workers)
    assert log[:3] == names  # warm-up
    for turn in range(1, 4):
        assert sorted(log[3 * turn : 3 * turn + 3]) == sorted(names)
    assert log[3] != log[6]  # the order rotates
    assert len(log) == 12
    assert all(worker.closed for worker in workers.values())


@pytest.mark.usefixtures("_quiet_machine")
def test_a_loss_shows_as_a_loss(demo_path: Path) -> None:
    results = compare(fakes(ours=30, llama=10, openvino=60), demo_path)
    loss, win = results.row("llama.cpp", "pp8").ratio, results.row("openvino", "pp8").ratio
    assert loss is not None
    assert loss.median == pytest.approx(1 / 3)
    assert loss.high < 1
    assert win is not None
    assert win.median == pytest.approx(2.0)
    assert results.row(engines.OURS, "pp8").ratio is None
    assert "0.33x (0.33-0.33)" in results._repr_html_()


@pytest.mark.usefixtures("_quiet_machine")
def test_speeds_are_tokens_over_seconds(demo_path: Path) -> None:
    row = compare(fakes(ours=1_000_000), demo_path).row(engines.OURS, "tg4")
    assert row.samples_ns == [4_000_000] * 3
    assert row.median_ts == pytest.approx(1000.0)
    assert row.avg_ts == pytest.approx(1000.0)
    assert row.stddev_ts == 0.0
    assert (row.n_prompt, row.n_gen, row.n_depth) == (0, 4, 32)


@pytest.mark.usefixtures("_quiet_machine")
def test_disturbed_samples_are_repeated_and_counted(demo_path: Path) -> None:
    workers = fakes(ours=10)
    workers[engines.OURS].switches = iter([0, 99, 0, 99, 0, 0])  # the first is the warm-up
    row = compare(workers, demo_path, n_gen=0).row(engines.OURS, "pp8")
    assert len(row.samples_ns) == 3
    assert (row.n_dropped, row.n_degraded) == (2, 0)
    assert row.note == ""


@pytest.mark.usefixtures("_quiet_machine")
def test_repetition_is_bounded_and_says_so(demo_path: Path) -> None:
    workers = fakes(ours=10)
    workers[engines.OURS].switches = iter([99] * 1000)
    results = compare(workers, demo_path, n_gen=0)
    row = results.row(engines.OURS, "pp8")
    assert len(row.samples_ns) == 3
    assert row.n_degraded == 3
    assert row.n_dropped == 3 * runner.ATTEMPTS - 3
    assert "3 of 3 samples from a degraded machine" in row.note
    assert any("9 samples" in note for note in results.notes())


@pytest.mark.usefixtures("_quiet_machine")
def test_without_patience_nothing_is_repeated(demo_path: Path) -> None:
    workers = fakes(ours=10)
    workers[engines.OURS].switches = iter([99] * 1000)
    row = compare(workers, demo_path, n_gen=0, patience=0.0).row(engines.OURS, "pp8")
    assert (len(row.samples_ns), row.n_dropped, row.n_degraded) == (3, 0, 3)


@pytest.mark.usefixtures("_quiet_machine")
def test_repeated_samples_use_up_the_patience(demo_path: Path) -> None:
    workers = fakes(ours=10**9)  # a sample of 8 tokens says that it took 8 s
    workers[engines.OURS].switches = iter([999] * 1000)
    row = compare(workers, demo_path, n_gen=0, patience=30.0).row(engines.OURS, "pp8")
    assert (len(row.samples_ns), row.n_dropped, row.n_degraded) == (3, 1, 3)


def test_a_machine_that_gets_faster_casts_doubt_on_what_came_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "stolen_ns", lambda: 0)
    worker = FakeWorker("ours", 10)
    # The first two samples are calibrated at 2000 ns, which seems the best until 1000 ns shows.
    calibrator = SteadyCalibrator(2000, 2000, 2000, 2000, best_ns=1000)
    calibrator.reference_ns = 2000
    case = Case(8, 0, 0)
    measured = runner.Runner([worker], calibrator, repetitions=3)
    measured.run([case])
    selection = measured.selection(worker, case)
    assert [sample.calibration_ns for sample in selection.kept] == [1000] * 3
    assert selection.n_dropped == 2


def test_a_degraded_machine_is_waited_for() -> None:
    calibrator = SteadyCalibrator(5000, 4000, 1100)
    assert calibrator.settle(patience_s=60) == 1100
    calibrator = SteadyCalibrator(*[5000] * 1000)
    assert calibrator.settle(patience_s=0) == 5000


def test_the_calibrator_keeps_its_best_time() -> None:
    calibrator = machine.Calibrator(threads=2)
    try:
        times = [calibrator.measure() for _ in range(5)]
    finally:
        calibrator.close()
    assert 0 < calibrator.reference_ns <= min(times)
    assert calibrator.is_degraded(2 * calibrator.reference_ns)
    assert not calibrator.is_degraded(calibrator.reference_ns)


def test_an_emulator_is_never_presented_as_metal(demo_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "Calibrator", lambda threads: SteadyCalibrator())
    workers = fakes(ours=10)
    workers[engines.OURS].device = "Metal emulator (CPU, 2 threads)"
    results = compare(workers, demo_path)
    assert all(EMULATOR_NOTE in row.note for row in results.rows)
    assert EMULATOR_NOTE in results._repr_html_()


@pytest.fixture(scope="module")
def measured(demo_path: Path) -> BenchResults:
    """Measure the model in the box, in a real process."""
    return bench.run(demo_path, prompts=[4, 16], n_gen=3, repetitions=2, threads=1, device="cpu")


def test_rows_have_the_fields_of_llama_bench(measured: BenchResults) -> None:
    rows = json.loads(measured.to_json())
    assert [row["test"] for row in rows] == ["pp4", "pp16", "tg3"]
    for row in rows:
        for name, kind in (LLAMA_BENCH_FIELDS | OUR_FIELDS).items():
            assert isinstance(row[name], (int, float) if kind is float else kind), name
        assert len(row["samples_ns"]) == len(row["samples_ts"]) == 2
        tokens = row["n_prompt"] + row["n_gen"]
        assert row["samples_ts"] == pytest.approx([tokens * 1e9 / ns for ns in row["samples_ns"]])
        assert row["avg_ns"] == pytest.approx(sum(row["samples_ns"]) / 2)
        assert row["n_prompt"] == 0 or row["n_gen"] == 0  # prefill and decode are apart


def test_rows_say_what_was_measured(measured: BenchResults, demo_path: Path) -> None:
    row = measured.row(engines.OURS, "pp16")
    assert row.build == f"metal_prefill {metal_prefill.__version__}"
    assert row.device.startswith("CPU")
    assert row.n_threads == 1
    assert row.model_type == "llama 4.7M Q4_0"
    assert row.model_n_params == 4_721_760
    assert 2_800_000 < row.model_size < demo_path.stat().st_size
    assert row.load_ns > 0
    assert row.peak_rss > row.model_size


def test_results_survive_json(measured: BenchResults) -> None:
    again = BenchResults.from_dicts(json.loads(measured.to_json()))
    assert again == measured


def test_html_escapes_what_it_shows(measured: BenchResults) -> None:
    rows = [replace(row, device="<b>CPU</b> & co") for row in measured.rows]
    html = BenchResults(rows)._repr_html_()
    assert "&lt;b&gt;CPU&lt;/b&gt; &amp; co" in html
    assert "<b>" not in html
    assert html.count("<table>") == html.count("</table>") == 1


def test_no_results_are_shown_as_such() -> None:
    assert "no results" in BenchResults()._repr_html_()


def test_an_unknown_row_is_named(measured: BenchResults) -> None:
    with pytest.raises(KeyError, match="pp99"):
        measured.row(engines.OURS, "pp99")


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
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")  # text stays text
    for limit_ts, shown in ((None, False), (5000.0, True)):
        rows = [replace(row, limit_ts=limit_ts) for row in measured.rows]
        BenchResults(rows).plot(str(tmp_path / "chart.svg"))
        assert ("limit of 8-bit products" in (tmp_path / "chart.svg").read_text()) is shown


def test_the_limit_is_said_beside_the_table(measured: BenchResults) -> None:
    rows = [replace(row, limit_ts=12345.0 if row.n_prompt else None) for row in measured.rows]
    assert "allows: pp4 12,345, pp16 12,345 tok/s" in BenchResults(rows)._repr_html_()


@pytest.mark.parametrize("name", ["gqa 3", "values wider than keys", "separate output", "gemma3"])
@pytest.mark.parametrize("n", [1, 15, 40])
def test_the_work_of_a_prompt_is_that_of_its_parts(name: str, n: int, tmp_path: Path) -> None:
    model = small_models.MODELS[name]
    q, kv = model.heads * model.key_dim, model.kv_heads * (model.key_dim + model.v_dim)
    expected = model.vocab * model.dim
    for layer in range(model.layers):
        window = model.window if model.window and (layer + 1) % 6 else n
        for token in range(n):
            expected += kv * model.dim
            if layer < model.layers - 1 or token == n - 1:
                expected += q * model.dim + model.heads * model.v_dim * model.dim + 3 * model.ffn * model.dim
                expected += min(token + 1, window) * model.heads * (model.key_dim + model.v_dim)
    work = limit.read_work(small_models.write(tmp_path / "model.gguf", model))
    assert work is not None
    assert work.products(n) == expected


def test_products_of_floats_have_no_limit_of_8_bit_products(tmp_path: Path) -> None:
    path = small_models.write(tmp_path / "model.gguf", small_models.SmallModel(types={"*": "F16"}))
    assert limit.prompt_limits(path, [32], 1) == {}


def test_longer_prompts_have_a_lower_limit(demo_path: Path) -> None:
    limits = limit.prompt_limits(demo_path, [128, 512, 1024], 1)
    assert limits[128] > limits[512] > limits[1024] > 0


def test_plots_without_matplotlib_name_the_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["bench", "--demo", "--plot", "out.png"]) == 1
    assert "metal_prefill[plot]" in capsys.readouterr().err


def test_a_missing_peer_names_the_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["bench", "--demo", "--compare", "llama.cpp"]) == 1
    error = capsys.readouterr().err
    assert "llama-cpp-python" in error
    assert "metal_prefill[bench]" in error


def test_the_command_prints_json_alone() -> None:
    command = [
        sys.executable,
        "-m",
        "metal_prefill.bench",
        "--demo",
        "-p",
        "4",
        "-n",
        "2",
        "-r",
        "1",
        "-t",
        "1",
    ]
    out = subprocess.run([*command, "--json", "-"], capture_output=True, text=True, check=True).stdout
    assert [row["test"] for row in json.loads(out)] == ["pp4", "tg2"]


def test_the_command_prints_a_table_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.json"
    assert cli.main(["bench", "--demo", "-p", "4", "-n", "2", "-r", "1", "--json", str(file)]) == 0
    out = capsys.readouterr().out
    for row in json.loads(file.read_text(encoding="utf-8")):
        assert row["test"] in out


def test_the_smollm_shape_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METAL_PREFILL_CACHE", str(tmp_path / "cache"))
    path = model_file.smollm_shape()
    assert path.parent == tmp_path / "cache"
    facts = model_file.read_facts(path)
    assert facts.model_type == "llama 135M Q4_0"
    assert facts.vocab_size == 49152
    written = path.stat().st_mtime_ns
    assert model_file.smollm_shape() == path
    assert path.stat().st_mtime_ns == written


def options_for(path: Path) -> Options:
    return Options(path=str(path), max_context=64, max_prompt=32, threads=1, device="cpu")


def test_a_worker_that_cannot_load_says_why(tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(b"nothing")
    with pytest.raises(bench.BenchError, match=r"metal_prefill: GGUFError: .*bad\.gguf.*loading the model"):
        WorkerProcess(engines.OURS, options_for(path), 1024)


def test_a_worker_that_dies_is_named(demo_path: Path) -> None:
    worker = WorkerProcess(engines.OURS, options_for(demo_path), 1024)
    try:
        assert worker.sample(Case(8, 0, 0))[0] > 0
        worker._process.kill()
        worker._process.wait()
        with pytest.raises(bench.BenchError, match=r"metal_prefill: its process died \(SIGKILL\) while pp8"):
            worker.sample(Case(8, 0, 0))
    finally:
        worker.close()


def test_the_workers_of_peers_are_processes_of_their_own(demo_path: Path) -> None:
    first = WorkerProcess(engines.OURS, options_for(demo_path), 1024)
    second = WorkerProcess(engines.OURS, options_for(demo_path), 1024)
    try:
        assert first._process.pid != second._process.pid
        assert first.peak_rss() > first.rss_before_load > 0
    finally:
        first.close()
        second.close()
    assert first._process.returncode == second._process.returncode == 0


@pytest.mark.parametrize("peer", ["llama.cpp", "openvino"])
def test_a_peer_answers_as_we_do(
    peer: str, demo_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("METAL_PREFILL_CACHE", str(tmp_path))
    for module in engines.KINDS[peer].modules:
        pytest.importorskip(module)
    results = bench.run(
        demo_path, prompts=[8], n_gen=2, repetitions=1, threads=1, device="cpu", compare=[peer]
    )
    row = results.row(peer, "pp8")
    assert row.ratio is not None
    assert row.ratio.median > 0
    assert row.n_threads == 1


class FakeWorkload:
    """Does a given number of products a second, which the test may change."""

    multiply_adds = 1000.0
    bytes = 50.0

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def run(self, repetitions: int) -> float:
        return repetitions * self.multiply_adds / self.rate


def test_kernels_are_measured_against_the_limits_beside_them() -> None:
    limits = {name: kernels.Limit(FakeWorkload(rate)) for name, rate in (("int8", 8e9), ("memory", 4e9))}
    row = kernels.measure("matrix", FakeWorkload(2e9), 8, 1, "isa", "int8", limits, repetitions=3)
    assert row.of_products == Spread(0.25, 0.25, 0.25)
    assert row.gmacs == Spread(2.0, 2.0, 2.0)
    # 50 bytes for each 1000 products; a limit without products would count its bytes.
    assert row.of_memory.median == pytest.approx(2e9 * 50 / 1000 / 4e9)


def test_kernel_benchmark_measures_all_cases_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "SAMPLE_S", 1e-5)
    monkeypatch.setattr(kernels, "LIMIT_S", 1e-5)
    small = partial(kernels.run, shapes=((33, 64), (576, 1536)), attention_tokens=(20,))
    monkeypatch.setattr(kernels, "run", small)
    out = tmp_path / "rows.json"
    options = ["--types", "Q4_0,Q4_K,F16", "--tokens", "1,17", "-t", "1,2", "-r", "1", "--json"]
    assert kernels.main([*options, str(out)]) == 0
    rows = json.loads(out.read_text())
    names = {(row["kernel"], row["tokens"], row["threads"]) for row in rows}
    products = {
        (f"{kind} {shape}", n, threads)
        for kind in ("Q4_0", "Q4_K", "F16")
        for shape in ("33x64", "576x1536")
        for n in (1, 17)
        for threads in (1, 2)
        if (kind, shape) != ("Q4_K", "33x64")
    }
    assert names == products | {("attention 9/3 heads of 64", 20, threads) for threads in (1, 2)}
    for row in rows:
        assert row["gmacs"]["median"] > 0
        assert 0 < row["of_products"]["low"] <= row["of_products"]["median"]
        assert (row["of_memory"]["median"] > 0) == ("attention" not in row["kernel"])
        expected = {"Q": ["int8"], "F": ["float32"], "a": ["float32", "bfloat16"]}[row["kernel"][0]]
        assert row["limit"] in expected
    assert "Q4_K 576x1536" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nonsense", 2, 32, 32, 1, 1), "no kernel set 'nonsense'"),
        (("scalar", 2, 32, 33, 1, 1), "multiple of 32"),
        (("scalar", 2, 0, 32, 1, 1), "must be positive"),
        (("scalar", 2, 49152, 576, 1 << 20, 1), "more than 1 GiB"),
    ],
)
def test_impossible_workloads_are_refused(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _core.cpu.product_workload(*arguments)
