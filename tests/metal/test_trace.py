"""Timelines of single dispatches: kernels in execution order, and the bytes that they moved."""

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.small_models import ENCODERS, write

from metal_prefill import ContextOverflowError, DeviceError, Model, _core, cli, synth
from metal_prefill.commands.trace import trace_session
from metal_prefill.gpu._cost_model import COUNTED, work_of
from metal_prefill.gpu._trace import HOST_CLOCK, chrome_trace, read_trace, runs_on_host

PROMPT, DECODED = 40, 2


@pytest.fixture
def model(metal: None, path: Path) -> Iterator[Model]:
    with Model(path, device="metal", chunk_tokens=24) as opened:
        yield opened


BYTES = ("bytes_read", "bytes_written", "unique_bytes_read", "unique_bytes_written")


def counted(
    model: Model, decode: int = 0, prompt: int = PROMPT
) -> list[tuple[Any, dict[str, dict[str, int]]]]:
    """Trace tokens, and pair each dispatch with what the emulator counts of its bindings, by name."""
    if not runs_on_host(model.device) or _core.emulator.sanitizer:
        pytest.skip("only the emulator's CPU executor counts, and only without a sanitizer")
    gpu = _core.emulator
    found = []
    gpu.set_options(gpu.Options(checked=True))
    try:
        with model.session() as session:
            tokens = list(range(1, prompt + 1))
            for _ in range(1 + decode):
                gpu.set_history_depth(0)
                gpu.set_history_depth(len(session.plan(len(tokens))))  # each command buffer has one dispatch
                token, dispatches = session.trace(tokens)
                records = [dispatch for buffer in gpu.history() for dispatch in buffer.dispatches]
                assert [record.kernel for record in records] == [d.kernel for d in dispatches]
                assert all(record.threads > 0 for record in records)
                for d, record in zip(dispatches, records, strict=True):
                    bindings = {b.name: {name: getattr(b, name) for name in BYTES} for b in record.bindings}
                    assert bindings.keys() > {"args"}
                    found.append((d, bindings))
                tokens = [token]
    finally:
        gpu.set_options(gpu.Options())
        gpu.set_history_depth(0)
    return found


def test_a_traced_prompt_has_the_same_results(model: Model) -> None:
    expected = model.forward_prompt(range(1, PROMPT + 1))
    logits = model.forward_token(expected)
    with model.session() as session:
        token, _ = session.trace(range(1, PROMPT + 1))
        assert token == expected
        assert session.position == PROMPT
        np.testing.assert_array_equal(session.forward_token(token), logits)


def test_a_trace_lists_the_dispatches_of_the_call_in_order(model: Model) -> None:
    with model.session() as session, model.session() as untraced:
        untraced.forward_prompt(range(1, PROMPT + 1))
        planned = session.plan(PROMPT)
        assert len(planned) == untraced.stats()["dispatches"]
        _, dispatches = session.trace(range(1, PROMPT + 1))
        assert len(dispatches) == session.stats()["dispatches"] == session.stats()["command_buffers"]
        assert [d.kernel for d in dispatches] == [d.kernel for d in planned]
        assert [(d.layer, d.grid, d.args) for d in dispatches] == [(d.layer, d.grid, d.args) for d in planned]
    layers = model.config.n_layers
    assert [d.layer for d in dispatches if d.kernel.startswith("rope")] == [*range(layers), *range(layers)]
    assert dispatches[0].kernel.startswith("embed")
    assert dispatches[0].layer == dispatches[-1].layer == -1
    assert not dispatches[0].after_barrier
    assert dispatches[1].after_barrier
    assert dispatches[-1].buffers == ("candidates", "result")


def test_traced_dispatches_run_one_after_another(model: Model) -> None:
    _, dispatches = model.session().trace(range(1, 5))
    assert all(d.start < d.end for d in dispatches)
    assert all(a.end <= b.start for a, b in pairwise(dispatches))


@pytest.mark.emulator
def test_counted_work_matches_the_shapes(model: Model, path: Path) -> None:
    checked = set()
    with Model(path, device="metal") as unsplit:
        longer = counted(unsplit, prompt=70)  # too many tokens for columns to be split
    for d, bindings in [*counted(model, DECODED), *longer]:
        if d.kernel == "matvec_q4_0":
            rows, cols = d.args["out_dim"], d.args["in_dim"]
            # 18 bytes for 32 weights, each row once; each of the lanes that share a scale loads it.
            assert bindings["w"]["unique_bytes_read"] == rows * cols // 32 * 18
            lanes, group = d.args["lanes_per_row"], d.threads
            covered = d.groups * (group // lanes)  # rows, those repeated at the end among them
            # A lane loads items in threes; those beyond the row's end are its last one.
            asked = sum(3 * -(-(cols // 8 - lane) // (3 * lanes)) for lane in range(min(lanes, cols // 8)))
            assert bindings["w"]["bytes_read"] == covered * asked * 6
            assert bindings["x"]["unique_bytes_read"] == cols * 4
            assert bindings["x"]["bytes_read"] == covered * asked * 8 * 4
            assert bindings["y"]["unique_bytes_written"] == bindings["y"]["bytes_written"] == rows * 4
        elif d.kernel.startswith("matmul_q4_0"):
            rows, cols, tokens = d.args["out_dim"], d.args["in_dim"], d.args["tokens"]
            assert bindings["w"]["unique_bytes_read"] == rows * cols // 32 * 18
            assert bindings["x"]["unique_bytes_read"] == tokens * cols * 2
            assert bindings["y"]["unique_bytes_written"] == tokens * rows * 4
        else:
            continue
        checked.add(d.kernel)
    assert checked == {"matvec_q4_0", "matmul_q4_0_narrow", "matmul_q4_0_split"}


@pytest.mark.emulator
@pytest.mark.parametrize(
    "options", [{}, {"kv_dtype": "f32"}, {"fused_norm": True}, {"chunk_tokens": 6}, {"chunk_tokens": 512}]
)
def test_the_cost_model_predicts_the_counted_bytes(path: Path, metal: None, options: Any) -> None:
    """Products and attention count each byte of weights, activations and cache once."""
    with Model(path, device="metal", **options) as model:
        found = [(d, b) for d, b in counted(model, DECODED) if d.kernel.startswith(tuple(COUNTED))]
    assert {"matvec", "attention", "rope"} <= {d.kernel.split("_")[0] for d, _ in found}
    for d, bindings in found:
        del bindings["args"]
        moved = sum(b["unique_bytes_read"] + b["unique_bytes_written"] for b in bindings.values())
        work = work_of(d)
        assert work.dram_bytes + work.cached_bytes == pytest.approx(moved, rel=0.02, abs=64), d


@pytest.mark.emulator
def test_the_cost_model_counts_the_biases_of_experts(metal: None, tmp_path: Path) -> None:
    """Every expert has rows."""
    with Model(write(tmp_path / "m.gguf", ENCODERS["privacy-filter, all experts"]), device="metal") as model:
        found = [(d, b) for d, b in counted(model) if "matmul_experts" in d.kernel]
    assert {"swiglu" in d.kernel for d, _ in found} == {False, True}
    for d, bindings in found:
        without = work_of(replace(d, args={**d.args, "has_bias": 0}))
        assert work_of(d).dram_bytes - without.dram_bytes == bindings["bias"]["unique_bytes_read"] > 0
        assert work_of(d).ops.memory > without.ops.memory


def test_the_command_writes_a_chrome_trace(
    metal: None, path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "trace.json"
    arguments = ["trace", "-m", str(path), "--device", "metal", "-p", "10", "-n", "2", "-o", str(out)]
    assert cli.main(arguments) == 0
    written = json.loads(out.read_text())
    events = [event for event in written["traceEvents"] if event["ph"] == "X"]
    assert set(written) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert written["otherData"]["n_prompt"] == 10
    assert "ran in a separate command buffer" in written["otherData"]["dispatches"]
    assert str(len(events)) in capsys.readouterr().err
    for event in written["traceEvents"]:
        assert event["ph"] in "XM"
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
    for event in events:
        assert event["ts"] >= 0
        assert event["dur"] > 0
    assert events[0]["ts"] == 0
    assert [e["ts"] for e in events] == sorted(e["ts"] for e in events)
    categories = [e["cat"] for e in events]
    layers = (categories.count("prompt") - 5) // 8
    of_step = 7 * layers + 5  # a step of decoding has rope in its attention
    assert categories == ["prompt"] * (8 * layers + 5) + ["decode"] * 2 * of_step
    assert (written["otherData"]["clock"] == HOST_CLOCK) == runs_on_host(written["otherData"]["device"])
    assert not [left for left in tmp_path.iterdir() if left.suffix in (".part", ".tmp")]


def test_a_trace_can_be_read_again(model: Model, tmp_path: Path) -> None:
    with model.session() as session:
        steps = trace_session(session, range(1, PROMPT + 1), DECODED)
    (tmp_path / "t.json").write_text(json.dumps(chrome_trace(steps, {"device": "some GPU"})))
    read, metadata = read_trace(tmp_path / "t.json")
    assert metadata == {"device": "some GPU"}
    assert [step.tokens for step in read] == [PROMPT, 1, 1]
    assert [[(d.kernel, d.args) for d in s.dispatches] for s in read] == [
        [(d.kernel, d.args) for d in s.dispatches] for s in steps
    ]
    assert sum(d.end - d.start for s in read for d in s.dispatches) == pytest.approx(
        sum(d.end - d.start for s in steps for d in s.dispatches), rel=1e-6
    )


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"traceEvents": [{"ph": "X"}], "otherData": {}}'])
def test_other_files_are_rejected_as_traces(tmp_path: Path, text: str) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(ValueError, match=r"t\.json is not a metal-prefill trace"):
        read_trace(tmp_path / "t.json")


def test_the_cpu_engine_has_no_dispatches(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Model(path, device="cpu") as model, model.session() as session:
        for call in (lambda: session.plan(1), lambda: session.trace([1, 2])):
            with pytest.raises(DeviceError, match=r"the engine 'cpu' makes no dispatches .* device='metal'"):
                call()
        assert session.position == 0
    out = tmp_path / "trace.json"
    assert cli.main(["trace", "-m", str(path), "--device", "cpu", "-p", "4", "-o", str(out)]) == 1
    assert "makes no dispatches" in capsys.readouterr().err
    assert not list(tmp_path.glob("trace*"))


def test_decoding_of_an_encoder_is_not_traced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = synth.synthesize(tmp_path / "m.gguf", preset="minilm-l6", layers=1, vocab=320)
    out = tmp_path / "t.json"
    command = ["trace", "-m", str(file), "--device", "metal", "-p", "4", "-o", str(out)]
    assert cli.main([*command, "-n", "1"]) == 2
    assert "is an encoder, which does not generate" in capsys.readouterr().err
    assert not out.exists()
    assert cli.main(command) == 0


def test_calls_that_do_not_fit_are_rejected_before_they_run(
    model: Model, path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limit = model.config.context_length
    with model.session() as session:
        with pytest.raises(ContextOverflowError, match=f"exceeds the context of {limit}"):
            session.plan(limit + 1)
        with pytest.raises(ContextOverflowError, match=f"exceeds the context of {limit}"):
            trace_session(session, [1] * limit, 1)
        with pytest.raises(ValueError, match="tokens must be at least 1, got 0"):
            session.plan(0)
        with pytest.raises(ValueError, match="empty"):
            session.trace([])
        assert session.position == 0
    missing = tmp_path / "no" / "trace.json"
    assert cli.main(["trace", "-m", str(path), "--device", "metal", "-o", str(missing)]) == 1
    assert "No such file or directory" in capsys.readouterr().err


@pytest.mark.emulator
def test_a_failed_dispatch_leaves_the_session_unchanged(model: Model) -> None:
    if not _core.has_emulator:
        pytest.skip("faults are the emulator's")
    with model.session() as session:
        session.forward_prompt([1, 2, 3])
        _core.emulator.fail_command_buffer(5, message="lost")
        with pytest.raises(DeviceError, match=r"the GPU failed in attention_.*: lost"):
            session.trace(range(1, 20))
        assert session.position == 3
        assert session.tokens == [1, 2, 3]
    assert _core.emulator.take_violations() == []
