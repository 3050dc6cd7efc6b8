"""The cost model compared with results computed by hand, and the command that prints its predictions."""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.kernels.cost_tables import RECURRENT, smollm, smollm_shape, uniform_shape, with_table
from support.places import ROOT
from support.programs import Run

from metal_prefill import UnsupportedModelError, cli
from metal_prefill.commands import predict as command
from metal_prefill.files import GGUFFile
from metal_prefill.gpu._cost_model import (
    CHIPS,
    SPREAD,
    Ops,
    UnknownKernelError,
    Work,
    plan,
    predict,
    time_of,
    work_of,
)
from metal_prefill.gpu._cost_model.shapes import shape_of
from metal_prefill.gpu._trace import HOST_CLOCK, Dispatch, Step, chrome_trace
from metal_prefill.synth import synthesize

SHAPE = smollm_shape()


def attention_products(dispatches: list[Dispatch]) -> float:
    """Return the multiply-adds of attention over a prompt."""
    works = [work_of(d) for d in dispatches if d.kernel.startswith("attention_prefill")]
    return sum(w.groups * w.simdgroups * w.ops.mma for w in works) * 512


def test_ranges_combine_the_errors_with_the_time_between_dispatches() -> None:
    m4 = CHIPS["m4"]
    for tokens, kind in ((512, "prompt"), (1, "token")):
        prediction = predict(m4, plan(SHAPE, tokens), tokens, waits=1)
        low, high = prediction.tokens_per_second_range
        ends = [
            tokens / (prediction.seconds + len(prediction.times) * (us - m4.dispatch_us) / 1e6)
            for us in m4.dispatch_us_range
        ]
        assert (low, high) == pytest.approx((ends[1] * SPREAD[kind][0], ends[0] * SPREAD[kind][1]))
        assert low < prediction.tokens_per_second < high


# A threadgroup of four simdgroups without instructions and bytes.
IDLE = Work(1, 4, Ops(), trips=0, dram_bytes=0, cached_bytes=0, fetched_bytes=0, core_bytes=0)


def test_a_dispatch_takes_the_largest_of_its_bounds() -> None:
    chip = replace(
        CHIPS["m4"],
        cores=1,
        ghz=1.0,
        dram_gbs=100,
        dram_efficiency=0.5,
        l2_gbs=200,
        slc_gbs=150,
        core_bytes=64,
        dispatch_us=3,
    )
    assert time_of(chip, IDLE).total == 3
    # 50,000 bytes at 50 GB/s are a microsecond.
    memory = time_of(chip, replace(IDLE, dram_bytes=50_000))
    assert memory.bounds["memory"] == pytest.approx(1)
    assert memory.bound == "memory"
    assert memory.total == pytest.approx(4)
    assert time_of(chip, replace(IDLE, fetched_bytes=200_000)).bounds["cache"] == pytest.approx(1)
    assert time_of(chip, replace(IDLE, core_bytes=64_000)).bounds["core"] == pytest.approx(1)
    # Four simdgroups on four schedulers: 1,000 FMA each are 1,000 cycles.
    assert time_of(chip, replace(IDLE, ops=Ops(alu=1000))).bounds["issue"] == pytest.approx(1)
    # Conversions have a pipeline that yields one in four cycles; two other instructions fit in that time.
    assert time_of(chip, replace(IDLE, ops=Ops(slow=250, alu=500))).bounds["issue"] == pytest.approx(1)
    assert time_of(chip, replace(IDLE, ops=Ops(slow=250, alu=600))).bounds["issue"] == pytest.approx(1.1)
    # Ten accesses, each waiting for the previous one, at 342 ns.
    assert time_of(chip, replace(IDLE, trips=10, dram_bytes=1)).bounds["latency"] == pytest.approx(3.42)
    # Activations that the last cache cannot hold go to memory.
    large = replace(IDLE, cached_bytes=50e6)
    assert time_of(chip, large).bounds["memory"] == pytest.approx(1000)
    assert time_of(replace(chip, slc_bytes=100e6), large).bounds["memory"] == 0


def test_threadgroups_queue_on_full_cores() -> None:
    chip = replace(CHIPS["m4"], cores=2, threads=256)
    work = replace(IDLE, groups=4, trips=1, dram_bytes=1)
    once = time_of(chip, work).bounds["latency"]
    for queued in (replace(work, groups=8), replace(work, threadgroup_bytes=60 << 10)):
        assert time_of(chip, queued).bounds["latency"] == pytest.approx(2 * once)


def test_bytes_and_products_of_a_prompt() -> None:
    """106.2 million weights in Q4_0 are read once, in 8x8x8 products of 512 FMA each."""
    dispatches = plan(SHAPE, 512)
    matmuls = [(d, work_of(d)) for d in dispatches if d.kernel.startswith("matmul")]
    weights = 29 * (960 * 576 + 576 * 576 + 3 * 1536 * 576) + 960 * 576  # the last layer: Q, K, V alone
    assert sum(work.dram_bytes for _, work in matmuls) == weights / 32 * 18
    products = sum(w.groups * w.simdgroups * w.ops.mma for _, w in matmuls)
    assert products * 512 == weights * 512
    # Scores and weighted sums of half of 512 x 512 pairs in each of 9 heads, and what is masked or rescaled.
    least = 29 * 9 * 2 * 64 * (512 * 513 / 2)
    assert least < attention_products(dispatches) < 1.4 * least


@pytest.mark.parametrize(("window", "seen"), [(0, 512 * 512), (512, 512 * 513 - 256 * 257)])
def test_bidirectional_attention_counts_all_visible_positions(window: int, seen: int) -> None:
    """Without a window 512 tokens see 512 each; with one of 512, 256 on either side, but at the ends."""
    config = smollm(causal=False, layer_window=(window,) * 30)
    dispatches = plan(uniform_shape(config, "q4_0", "q8_0"), 512)
    assert 1 < attention_products(dispatches) / (29 * 9 * 2 * 64 * seen) < 1.2  # including those of rescaling


@pytest.mark.parametrize("preset", ["tiny", "tiny-embedding"])
def test_the_shape_of_a_preset_is_that_of_its_file(tmp_path: Path, preset: str) -> None:
    with GGUFFile(synthesize(tmp_path / "m.gguf", preset=preset)) as gguf:
        assert command._shape(argparse.Namespace(model=None, preset=preset)) == shape_of(gguf)


def test_an_m5_multiplies_on_its_matrix_units() -> None:
    """Users of llama.cpp report 2 to 3 times; docs/cost_model.md explains the basis of the rate."""
    m5 = CHIPS["m5"]
    plans = [plan(SHAPE, 512, family=m5.family, matmul_tensor=units) for units in (True, False)]
    on_units, plain = (
        [work_of(d) for d in dispatches if d.kernel.startswith("matmul")] for dispatches in plans
    )
    assert [w.groups * w.ops.matrix_unit for w in on_units] == [w.groups * w.ops.mma for w in plain]
    assert not any(w.ops.mma for w in on_units)
    assert [w.dram_bytes for w in on_units] == [w.dram_bytes for w in plain]
    attention = [d for d in plans[1] if d.kernel.startswith("attention")]  # without units in both
    fast, slow = (
        predict(m5, [d for d in p if not d.kernel.startswith("attention")] + attention, 512).seconds
        for p in plans
    )
    assert 2 < slow / fast < 3
    # 1,024 FLOP a core and cycle: 16 TFLOP/s. No other chip has units that kernels reach.
    rate = 4 * 2 * 512 / m5.cycles.matrix_unit * m5.cores * m5.ghz * 1e9
    assert rate == pytest.approx(16.2e12, rel=0.01)
    work = replace(on_units[0], ops=Ops(matrix_unit=1000), groups=1)
    assert time_of(CHIPS["m4"], work).bounds["issue"] == float("inf")


@pytest.mark.parametrize(("fused", "kernel"), [(False, "rmsnorm_f32"), (True, "rmsnorm_matvec_q4_0")])
def test_the_command_predicts_each_way_to_decode(output: Run, fused: bool, kernel: str) -> None:
    arguments = ["--chip", "m4-max", "-p", "0", "-n", "1", "--json", *["--fused-norm"] * fused]
    (row,) = json.loads(output("predict", *arguments))
    chip = CHIPS["m4-max"]
    expected = predict(chip, plan(SHAPE, 1, family=chip.family, gpu=chip.gpu, fused_norm=fused), 1)
    assert row["predicted_seconds"] == pytest.approx(expected.seconds)
    assert kernel in {d.kernel for d in expected.dispatches}


def test_larger_workloads_take_longer() -> None:
    m4 = CHIPS["m4"]
    for lengths in ((1, 2, 8), (9, 32, 128, 512, 1024)):  # with another kernel for the products each
        times = [predict(m4, plan(SHAPE, n), n).seconds for n in lengths]
        assert times == sorted(times)
    decode = [predict(m4, plan(SHAPE, 1, position=p), 1).seconds for p in (0, 127, 500, 2000)]
    assert decode == sorted(decode)
    by_chip = [
        predict(CHIPS[c], plan(SHAPE, 512), 512).seconds for c in ("m1", "m2", "m4", "m4-pro", "m4-max")
    ]
    assert by_chip == sorted(by_chip, reverse=True)


def test_the_goals_on_an_m4() -> None:
    """The lowest values reach two goals of the design, the middle that of decode."""
    m4 = CHIPS["m4"]
    assert predict(m4, plan(SHAPE, 512), 512, waits=1).tokens_per_second_range[0] > 10_000
    assert predict(m4, plan(SHAPE, 32), 32, waits=1).tokens_per_second_range[0] > 5_000
    assert predict(m4, plan(SHAPE, 1, position=128), 1).tokens_per_second > 600


def test_the_page_shows_the_predictions_of_the_model() -> None:
    """After a change of the kernels or the model, run tools/build/write_cost_tables.py."""
    text = (ROOT / "docs" / "cost_model.md").read_text()
    assert with_table(text) == text


def test_plans_reject_invalid_arguments() -> None:
    with pytest.raises(ValueError, match="cannot plan 0 tokens at position 0"):
        plan(SHAPE, 0)
    with pytest.raises(ValueError, match="unknown GPU family 6; known are 10, 9, 8, 7"):
        plan(SHAPE, 1, family=6)
    odd = uniform_shape(smollm(dim=572), "f16", "f16")
    with pytest.raises(
        UnsupportedModelError, match="a plan needs dimensions that are multiples of 8, got dim 572"
    ):
        plan(odd, 1)


def test_a_tensor_type_without_counts_is_named() -> None:
    shape = uniform_shape(smollm(), "iq4_nl", "q8_0")
    (product, *_) = (d for d in plan(shape, 32) if "iq4_nl" in d.kernel)
    with pytest.raises(UnknownKernelError, match=r"no counts for the tensor type of matmul_iq4_nl_.* q8_0"):
        predict(CHIPS["m4"], [product], 32)


def test_recurrent_layers_take_the_tokens_in_order() -> None:
    shape = uniform_shape(smollm(**RECURRENT), "f32", "f32")
    short, long = (
        sum(
            time_of(CHIPS["m4"], work_of(d)).total
            for d in plan(shape, n)
            if d.kernel.startswith("gated_delta")
        )
        for n in (128, 256)
    )
    assert long / short == pytest.approx(2, rel=0.1)


def test_the_command_labels_its_figures_as_predicted(output: Run) -> None:
    printed = output("predict", "--chip", "m4", "-p", "512", "-n", "2")
    assert "pp512 on m4, predicted" in printed
    assert "tg2 on m4, predicted" in printed
    assert "predicted µs" in printed
    assert command.NOTE in printed
    rows = json.loads(output("predict", "--chip", "m1", "-p", "32", "--json"))
    assert [(row["test"], row["chip"], row["predicted"]) for row in rows] == [("pp32", "m1", True)]
    assert not {key for row in rows for key in row if key.endswith(("_ts", "seconds"))} - {
        "predicted_ts",
        "predicted_seconds",
    }
    low, high = rows[0]["predicted_ts_range"]
    assert f"predicted: {low:,.0f} to {high:,.0f} tok/s" in output("predict", "--chip", "m1", "-p", "32")
    gpu_us = sum(kernel["predicted_us"] for kernel in rows[0]["kernels"])
    assert gpu_us + CHIPS["m1"].wait_us == pytest.approx(rows[0]["predicted_seconds"] * 1e6)


def test_the_command_reads_a_model(output: Run, demo_path: Path) -> None:
    rows = json.loads(output("predict", "-m", str(demo_path), "-p", "100", "-n", "1", "--json"))
    assert [row["test"] for row in rows] == ["pp100", "tg1"]
    layers = (rows[0]["dispatches"] - 5) // 8
    assert rows[1]["dispatches"] == 7 * layers + 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-p", "0"], "nothing to predict: set -p or -n"),
        (["-p", "2048", "-n", "1"], "2049 tokens exceed the model's context of 2048"),
        (["--trace", "t.json", "-p", "3"], "--trace sets the tokens"),
        (["--trace", "t.json", "--fused-norm"], "--trace sets the kernels"),
        (["--trace", "t.json", "--kv-dtype", "f32"], "--trace sets the kernels"),
        (["--trace", "t.json", "-m", "model.gguf"], "-m/--model: not allowed with argument --trace"),
        (["--preset", "minilm-l6", "-n", "4"], "-n predicts decoding, which the model, an encoder, does not"),
    ],
)
def test_usage_errors_are_reported(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert cli.main(["predict", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_the_command_compares_with_a_trace(output: Run, tmp_path: Path) -> None:
    def timed(dispatches: list[Dispatch]) -> list[Dispatch]:
        return [replace(d, start=i * 1e-3, end=i * 1e-3 + 5e-6) for i, d in enumerate(dispatches)]

    steps = [Step(32, timed(plan(SHAPE, 32))), Step(1, timed(plan(SHAPE, 1, position=32)))]
    file = tmp_path / "trace.json"
    file.write_text(json.dumps(chrome_trace(steps, {"device": "a GPU"})))
    rows = json.loads(output("predict", "--trace", str(file), "--chip", "m4", "--json"))
    assert [row["test"] for row in rows] == ["pp32", "tg1"]
    expected = predict(CHIPS["m4"], steps[0].dispatches, 32)
    assert rows[0]["predicted_seconds"] == pytest.approx(expected.seconds)
    assert rows[0]["trace_seconds"] == pytest.approx(245 * 5e-6, rel=1e-3)
    norms = next(kernel for kernel in rows[0]["kernels"] if kernel["kernel"] == "rmsnorm_f16")
    assert norms["trace_us"] == pytest.approx(59 * 5, rel=1e-3)
    assert "in the trace µs" in output("predict", "--trace", str(file))
    # Times of the emulator on a CPU are not compared with it.
    file.write_text(json.dumps(chrome_trace(steps, {"device": "an emulator", "clock": HOST_CLOCK})))
    assert "in the trace µs" not in output("predict", "--trace", str(file))
