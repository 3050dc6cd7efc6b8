"""``metal-prefill doctor`` and the quick check of first contact, with faults planted in the device."""

import json
import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.kernels.emulated_gpu import open_metal, require_emulator, set_matrix_layout
from support.small_models import ENCODERS, MODELS, write

from metal_prefill import DeviceError, Model, _core, cli, synth
from metal_prefill.commands import doctor as doctor_command
from metal_prefill.commands import doctor_report
from metal_prefill.gpu import _self_test

pytestmark = [pytest.mark.emulator, pytest.mark.usefixtures("own_cache", "own_device")]

gpu = require_emulator()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("doctor")
    # Q, K and V have more tiles than an M1 has cores, so that columns are split in some products alone.
    return synth.synthesize(
        folder / "m.gguf", preset="tiny", heads=6, kv_heads=2, head_dim=32, vocab=320, context=640
    )


SHORT = {"BENCH_SECONDS": 0.0, "BENCH_PROMPT": 16, "BENCH_TOKENS": 4, "LONG_PROMPT": 40}


class Doctor:
    """Runs the command on a device with given limits, and its stages in this process or in their own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, in_processes: bool = False) -> None:
        self.folder = folder
        self.patch = monkeypatch
        self.in_processes = in_processes
        if in_processes:
            monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
            # Compiled code of a file with the same size and second of its last change would be taken for it.
            monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
        else:
            monkeypatch.setattr(doctor_command, "_run", run_here)

    def only(self, *stages: str) -> None:
        """Run some of the stages."""
        self.patch.setattr(doctor_command, "LIMITS", dict.fromkeys(stages, 600))
        self.patch.setattr(doctor_command, "QUICK", stages)

    def __call__(self, path: Path, *options: str, **limits: Any) -> tuple[int, dict[str, Any]]:
        """Return the exit code and the report."""
        if self.in_processes:  # Python runs it as it starts
            (self.folder / "sitecustomize.py").write_text(START.format(limits=limits))
        else:
            gpu.set_limits(gpu.Limits(**limits))
        report = self.folder / "doctor.json"
        code = cli.main(["doctor", "-m", str(path), "--device", "metal", "--json", str(report), *options])
        return code, json.loads(report.read_text())


def run_here(stage: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Run a stage in this process."""
    path, quick, device = arguments
    return doctor_report.run_stage(stage, Path(path), bool(quick), device) | {"ended": "done"}


START = """
from metal_prefill._core import emulator
emulator.set_limits(emulator.Limits(**{limits}))
"""


@pytest.fixture
def doctor(tmp_path: Path, short_run: None, monkeypatch: pytest.MonkeyPatch) -> Doctor:
    return Doctor(tmp_path, monkeypatch)


@pytest.fixture
def doctor_in_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Doctor:
    return Doctor(tmp_path, monkeypatch, in_processes=True)


@pytest.fixture
def short_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SHORT.items():
        monkeypatch.setattr(doctor_report, name, value)


@pytest.mark.usefixtures("short_run")
def test_the_prediction_is_for_the_kernels_of_the_engine(path: Path) -> None:
    gpu.set_limits(gpu.Limits(name="Apple M4", apple_family=9))
    predicted = []
    for fused_norm in (False, True):
        with open_metal(path, fused_norm=fused_norm) as model:
            predicted.append([b["predicted_range"] for b in doctor_report.benchmark(model)])
    (_, separate), (_, fused) = predicted
    assert fused > separate  # by the model


def test_an_encoder_on_a_working_device_passes(
    doctor: Doctor, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "m.gguf", ENCODERS["bert"])
    doctor.only("results", "speed")
    code, report = doctor(file, name="Apple M4", apple_family=9)
    assert (code, report["passed"]) == (0, True)
    assert [c["name"] for c in report["hidden_states"]] == ["text of 9", "text of 40"]
    assert [b["name"] for b in report["benchmark"]] == ["pp16"]
    assert report["benchmark"][0]["predicted_range"]
    assert "agrees: text of 9: error" in capfd.readouterr().out
    doctor.only("results")
    code, report = doctor(file, "--quick", wrong_kernels={"layernorm_stream"})
    assert (code, report["passed"]) == (1, False)
    assert not report["hidden_states"][0]["passed"]


@pytest.mark.usefixtures("short_run")
@pytest.mark.parametrize("name", ["type IQ4_NL", "dimensions that fit no block"])
def test_a_model_without_a_prediction_passes(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    gpu.set_limits(gpu.Limits(name="Apple M4", apple_family=9))
    file = write(tmp_path / "m.gguf", MODELS[name])
    stages = [doctor_report.run_stage(stage, file, False, "metal") for stage in ("results", "speed")]
    assert [stage["passed"] for stage in stages] == [True, True]
    benchmark = stages[1]["report"]["benchmark"]
    assert [b["tokens_per_second"] > 0 for b in benchmark] == [True, True]
    assert f"no prediction: {benchmark[0]['no_prediction']}" in capfd.readouterr().out


def test_a_working_device_passes(path: Path, doctor: Doctor, capfd: pytest.CaptureFixture[str]) -> None:
    code, report = doctor(path)
    assert code == 0
    assert report["passed"]
    assert report["kernels"]["differences"] == []
    # Scoring alone needs these: the head for many rows, and log probabilities. All others were compared.
    scoring = {"log_prob", "matmul_q8_0_narrow", "matmul_q8_0_split", "multi_token_matvec_q8_0"}
    assert set(report["kernels"]["not_checked"]) == scoring
    assert len(report["kernels"]["checked"]) == 21
    assert [c["name"].split(",")[0] for c in report["logits"]] == [
        *("prompt of 9", "9 tokens one by one", "prompt of 40", "40 tokens one by one"),
        "20 greedy tokens",
    ]
    assert {b["name"] for b in report["benchmark"]} == {"pp16", "tg4"}
    assert {name: stage["ended"] for name, stage in report["stages"].items()} == dict.fromkeys(
        ("machine", "shaders", "kernels", "results", "speed"), "done"
    )
    assert not any(source["problem"] for source in report["sources"])
    lines = capfd.readouterr().out.splitlines()
    assert re.fullmatch(
        r"all results agree; pp16 \d+ tokens/s; tg4 \d+ tokens/s; please attach .*doctor.json to an issue",
        lines[-1],
    )
    assert f"gpu name: {report['machine']['gpu']['name']}" in lines
    assert not [line for line in lines if line.endswith(": ") or "{" in line]


def test_a_bidirectional_model_passes(tmp_path: Path) -> None:
    path = synth.synthesize(
        tmp_path / "m.gguf",
        preset="tiny",
        vocab=320,
        architecture="gemma-embedding",
        window=4,
        pooling="mean",
    )
    stages = [doctor_report.run_stage(stage, path, True, "metal") for stage in ("kernels", "results")]
    assert [stage["passed"] for stage in stages] == [True, True]
    assert "attention_prefill_f16_64" in stages[0]["report"]["kernels"]["checked"]
    assert [c["name"] for c in stages[1]["report"]["logits"]] == ["prompt of 9"]


WRONG = {
    "": (
        "embed_q8_0",
        "rmsnorm_f16",
        "matmul_q4_0_split",  # which nine tokens take; longer prompts take matmul_q4_0_narrow
        *("rope_append_f16", "attention_prefill_f16_64", "matmul_swiglu_q4_0_narrow", "matvec_q4_0"),
        *("rope_attention_decode_f16_32", "matvec_swiglu_q4_0", "multi_token_matvec_q4_0", "argmax_stage1"),
        "argmax_stage2",
    ),
    # Kernels that few layers need.
    "gemma4, wide heads": ("attention_decode_f16_512", "rope_attention_decode_f16_512"),
    "lfm2moe": ("add_experts",),
    "granitehybrid": ("attention_prefill_f16_64",),
    "olmo2": ("rmsnorm_in_place",),  # in rows that also contain other values
    "jina-bert-v2, code": ("layernorm_in_place", "layernorm_twice"),
}


@pytest.mark.parametrize(("name", "kernel"), [(name, kernel) for name in WRONG for kernel in WRONG[name]])
def test_only_the_wrong_kernel_is_named(path: Path, tmp_path: Path, name: str, kernel: str) -> None:
    gpu.set_limits(gpu.Limits(wrong_kernels={kernel}))
    with open_metal(write(tmp_path / "m.gguf", (MODELS | ENCODERS)[name]) if name else path) as model:
        found = doctor_report.check_kernels(model, quick=True)
    assert kernel in {p["kernel"] for p in found["pipelines"]}
    assert {d["kernel"] for d in found["differences"]} == {kernel}
    (wrong,) = found["differences"]
    assert wrong["got"] != pytest.approx(wrong["expected"], abs=1e-3)


def test_the_report_locates_differences(
    path: Path, doctor: Doctor, capfd: pytest.CaptureFixture[str]
) -> None:
    code, report = doctor(path, "--quick", wrong_kernels={"matmul_q4_0_split"})
    assert code == 1
    assert not report["passed"]
    (wrong,) = report["kernels"]["differences"]
    assert (wrong["kernel"], wrong["index"]) == ("matmul_q4_0_split", 0)
    assert wrong["got"] == pytest.approx(195.26, abs=0.01)
    out = capfd.readouterr().out
    assert "DIFFERS: matmul_q4_0_split: value 0 is 195.26" in out
    assert out.splitlines()[-1].startswith("FAILED: kernels, results; passed: machine; ")


def test_results_that_are_not_finite_are_reported(
    path: Path, doctor: Doctor, capfd: pytest.CaptureFixture[str]
) -> None:
    """Kernels agree one by one; passes, whose dispatches are reordered, compute NaN."""
    doctor.only("kernels", "results", "speed")
    code, report = doctor(path, barriers=False)
    assert code == 1
    stages = report["stages"]
    assert [name for name, stage in stages.items() if not stage["passed"]] == ["results", "speed"]
    assert {stage["ended"] for stage in stages.values()} == {"done"}
    assert len(report["logits"]) == 5
    assert "is NaN" in report["logits"][0]["problem"]
    assert "is NaN" in stages["speed"]["problem"]
    assert any("forward_prompt" in line for line in stages["speed"]["detail"])
    printed = capfd.readouterr()
    assert "Traceback" not in printed.out + printed.err
    assert f"DIFFERS: prompt of 9: {report['logits'][0]['problem']}" in printed.out
    assert f"FAILED: speed: {stages['speed']['problem']}" in printed.out


def test_a_file_that_is_no_model_is_reported_in_a_line(
    tmp_path: Path, doctor: Doctor, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.gguf").touch()
    doctor.only("kernels")
    code, report = doctor(tmp_path / "empty.gguf", "--quick")
    assert code == 1
    assert "Traceback" not in capfd.readouterr().out
    assert "empty.gguf" in report["problem"]
    assert report["stages"]["kernels"]["detail"][0].startswith("Traceback")


@pytest.mark.parametrize(
    ("limits", "found"),
    [
        ({"endless_kernels": {"argmax_stage1"}}, "the GPU did not finish argmax_stage1 within 1 s"),
        ({"compiler": False}, "Metal's compiler has not answered for 5 s"),
    ],
    ids=["command buffer", "compiler"],
)
def test_a_device_that_fails_leaves_a_report(
    path: Path,
    doctor_in_processes: Doctor,
    limits: dict[str, Any],
    found: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("METAL_PREFILL_PATIENCE", "1")
    doctor_in_processes.only("kernels")
    code, report = doctor_in_processes(path, "--quick", **limits)
    assert code == 1
    assert re.search(found, report["problem"])
    assert f"FAILED: kernels: {report['problem']}" in capfd.readouterr().out


def test_every_source_that_does_not_compile_is_reported(path: Path, doctor: Doctor) -> None:
    """The report has sources that the model does not need; those too new for the system are not failures."""
    doctor.only("shaders")
    code, report = doctor(path, broken_sources={"scan.metal", "log_prob.metal"}, metal_tensor=False)
    assert code == 1
    assert {source["name"] for source in report["sources"] if source["problem"]} == {
        "scan.metal",
        "log_prob.metal",
        "matmul_tensor.metal",
        "attention_tensor.metal",
    }
    assert not report["stages"]["shaders"]["passed"]
    code, report = doctor(path, metal_tensor=False)
    assert code == 0


def test_a_driver_that_aborts_leaves_a_report(path: Path, doctor_in_processes: Doctor) -> None:
    doctor_in_processes.only("machine", "kernels")
    code, report = doctor_in_processes(path, "--quick", aborting_kernels={"matvec_q4_0"})
    assert code == 1
    assert report["machine"]["gpu"]["name"]
    stage = report["stages"]["kernels"]
    assert (stage["ended"], stage["passed"]) == ("ended by SIGABRT", False)
    assert "AGX: compiling 'matvec_q4_0' failed: the driver aborts" in stage["last_lines"]
    assert any("build_checked" in line for line in stage["last_lines"])


def test_a_stage_that_does_not_end_leaves_a_report(
    path: Path, doctor_in_processes: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    doctor_in_processes.only("machine", "kernels")
    monkeypatch.setitem(doctor_command.LIMITS, "kernels", 8)
    code, report = doctor_in_processes(path, "--quick", compiler=False)
    assert code == 1
    stage = report["stages"]["kernels"]
    assert stage["ended"] == "no answer within 8 s"
    assert report["stages"]["machine"]["passed"]
    assert any("build_checked" in line for line in stage["last_lines"])


def cached(cache: Path) -> list[list[str]]:
    return list(json.loads((cache / "first_contact.json").read_text()).values())


@pytest.mark.usefixtures("checking")
def test_the_quick_check_runs_once(path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_metal(path):
        assert cached(own_cache) == [[]]
    monkeypatch.setattr(_self_test, "kernel_differences", None)
    with open_metal(path):
        pass
    monkeypatch.setattr("metal_prefill.storage._cache_folder.version", lambda: "another")
    with pytest.raises(TypeError, match="not callable"):
        open_metal(path)


@pytest.mark.usefixtures("checking")
def test_a_result_applies_to_files_of_the_same_size(
    path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first layer of a small file may be read correctly, and a large file not."""
    with open_metal(path):
        assert cached(own_cache) == [[]]
    monkeypatch.setattr(_self_test, "_SIZE_CLASS", path.stat().st_size // 2)
    with open_metal(path):
        assert cached(own_cache) == [[], []]


@pytest.mark.usefixtures("checking")
def test_a_damaged_cache_is_rebuilt(path: Path, own_cache: Path) -> None:
    own_cache.mkdir()
    (own_cache / "first_contact.json").write_text("[")
    with open_metal(path):
        assert cached(own_cache) == [[]]


@pytest.mark.usefixtures("checking")
def test_a_wrong_gpu_is_rejected_by_name_also_from_the_cache(path: Path) -> None:
    gpu.set_limits(gpu.Limits(wrong_kernels={"matvec_q4_0"}))
    for _ in range(2):
        with pytest.raises(DeviceError, match="wrong results: matvec_q4_0: value 0 is 195"):
            open_metal(path)
        gpu.set_limits(gpu.Limits())


@pytest.mark.usefixtures("checking")
@pytest.mark.parametrize("layout", ["COLUMNS", "SHIFTED"])
def test_a_wrong_gpu_falls_back_to_the_cpu_with_a_warning(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, layout: str
) -> None:
    """Lanes hold other elements of a matrix than attention relies on."""
    monkeypatch.setattr(_core, "has_emulator", False)  # as on a Mac
    monkeypatch.delenv("METAL_PREFILL_DEVICE", raising=False)
    with Model(path, kv_memory=1 << 18) as model:
        assert "emulator" in model.device.lower()
    set_matrix_layout(layout)
    gpu.set_limits(gpu.Limits(name="Another GPU"))
    with caplog.at_level(logging.WARNING, "metal_prefill"), Model(path, kv_memory=1 << 18) as model:
        assert "emulator" not in model.device.lower()
    assert "using the CPU engine: the GPU 'Another GPU" in caplog.text
    assert "attention_prefill_f16" in caplog.text
    assert caplog.text.count("expected") == 1  # later kernels got what the faulty one computed


def test_the_emulator_is_checked_only_on_request(path: Path, own_cache: Path) -> None:
    gpu.set_limits(gpu.Limits(wrong_kernels={"matvec_q4_0"}))
    with open_metal(path):
        assert not (own_cache / "first_contact.json").exists()
