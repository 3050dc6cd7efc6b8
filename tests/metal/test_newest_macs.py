"""Products on the matrix units of an M5, on an emulated one: used where everything passes, else done without.

On a Mac these tests are skipped.
"""

import logging
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.kernels.emulated_gpu import open_metal, require_emulator
from support.programs import finished

from metal_prefill import DeviceError, _core, synth
from metal_prefill.commands import doctor_report

pytestmark = [pytest.mark.emulator, pytest.mark.usefixtures("own_device")]

gpu = require_emulator()
M5 = 10  # its family
PROMPT = [5 + i % 300 for i in range(130)]  # which has tall tiles
Floats = np.ndarray[Any, Any]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model in which some products have enough tiles for matrix units, even for a few tokens."""
    folder = tmp_path_factory.mktemp("newest")
    return synth.synthesize(folder / "m.gguf", preset="smollm-135m", layers=2, vocab=320)


def be_m5(**limits: Any) -> None:
    """Make the device an M5 of its own name, since the trial of a GPU is made once per process."""
    gpu.set_limits(gpu.Limits(apple_family=M5, name=f"M5 {limits}", **limits))


def logits_of(path: Path) -> tuple[Floats, tuple[int, int, int]]:
    """Return the logits after the prompt, and whether matmuls, tall ones and attention ran on tensors."""
    with open_metal(path, kv_memory=1 << 20, max_context=256) as model:
        gpu.set_history_depth(0)
        gpu.set_history_depth(16)  # from here on
        logits = model.session().forward_prompt_logits(PROMPT)
        kernels = [d.kernel for buffer in gpu.history() for d in buffer.dispatches]
        stats = model.stats()
    used = (
        int(any(kernel.startswith("matmul_tensor") for kernel in kernels)),
        int(any(kernel.endswith("tall") for kernel in kernels)),
        int(any(kernel.startswith("attention_tensor") for kernel in kernels)),
    )
    assert used == tuple(stats[name] for name in ("matmul_tensor", "matmul_tall", "attention_tensor"))
    return logits, used


@pytest.fixture(scope="module")
def plain(path: Path) -> Floats:
    """Return the logits without tensors."""
    gpu.set_limits(gpu.Limits(apple_family=9))
    logits, used = logits_of(path)
    assert used == (0, 0, 0)
    assert _core.metal_device()["matmul_tensor"] == "not for this GPU"
    return logits


TALL, ATTENTION = "matmul_tensor_f16_tall", "attention_tensor_f16_64"
NARROW, WIDE = "matmul_tensor_f16_narrow", "matmul_tensor_f16_wide"


@pytest.mark.parametrize(
    ("limits", "expected", "reason"),
    [
        ({}, (1, 1, 1), ""),
        ({"wrong_kernels": {TALL}}, (1, 0, 1), ""),
        ({"broken_kernels": {TALL}}, (1, 0, 1), ""),
        ({"wrong_kernels": {ATTENTION}}, (1, 1, 0), ""),
        ({"wrong_kernels": {"attention_tensor_f16_128"}}, (1, 1, 0), ""),
        ({"broken_kernels": {ATTENTION}}, (1, 1, 0), ""),
        (
            {"metal_tensor": False},
            (0, 0, 0),
            "matmul_tensor.metal do not compile: .*'metal_tensor' file not found",
        ),
        ({"wrong_kernels": {NARROW}}, (0, 0, 0), r"_f16_narrow' is wrong: result 0 is 195\.26"),
        ({"wrong_kernels": {WIDE}}, (0, 0, 0), r"_f16_wide' is wrong: result 0 is 195\.26"),
        ({"broken_kernels": {WIDE}}, (0, 0, 0), "_f16_wide' cannot be built: .*compiler service"),
        (
            {"broken_kernels": {"matmul_tensor_q4_0_narrow"}},
            (0, 0, 0),
            "_q4_0_narrow' cannot be built: .*compiler",
        ),
        (
            {"max_threads": {"matmul_tensor_swiglu_q4_0_narrow": 96}},
            (0, 0, 0),
            "_swiglu_q4_0_narrow' needs threadgroups of 128 threads; .* at most 96",
        ),
    ],
    ids=str,
)
def test_an_m5_uses_the_tensor_kernels_that_pass(
    path: Path, plain: Floats, limits: dict[str, Any], expected: tuple[int, int, int], reason: str
) -> None:
    be_m5(**limits)
    logits, used = logits_of(path)
    assert used == expected
    # Both multiply halves and add in float32, in another order.
    assert np.abs(logits - plain).max() <= (1e-3 * np.abs(plain).max() if any(used) else 0)
    with open_metal(path) as model, model.session() as session:
        native: Any = session.native
        assert re.search(reason, native.inspector().no_matmul_tensor)
        del native
    assert gpu.live_objects() == 0
    assert _core.metal_device()["matmul_tensor"] == "where it passes a trial"


def test_the_trial_runs_once_per_process_and_is_stored(path: Path, own_cache: Path) -> None:
    sources = ("matmul_tensor.metal", "attention_tensor.metal")

    def compiled_by(*names: str) -> list[int]:
        counts = []
        for name in names:
            gpu.set_limits(gpu.Limits(apple_family=M5, name=name))
            gpu.forget_compiled_libraries()
            with open_metal(path) as model:
                assert model.stats()["matmul_tensor"] == 1
            compiled = [library.name for library in gpu.compiled_libraries()]
            counts.append(sum(map(compiled.count, sources)))
        return counts

    gpu.set_limits(gpu.Limits(apple_family=M5, name="tried"))
    gpu.forget_compiled_libraries()
    _core.metal_device()
    assert gpu.compiled_libraries() == []
    # Two libraries of the trial, and two of the model's types and heads.
    assert compiled_by("tried", "tried") == [4, 2]
    (stored,) = own_cache.rglob("*.trial")
    for damaged in ("", "a\n", "x" * 10):
        stored.write_text(damaged)
    process = finished([sys.executable, "-c", OPENED_ELSEWHERE, str(path)], check=True)
    assert process.stdout.split() == ["4", "2"]  # the damaged file is replaced


# Opens a model in a new process each time; prints the number of libraries of tensor kernels.
OPENED_ELSEWHERE = """
import os, sys
from metal_prefill import Model, _core
for _ in range(2):
    if os.fork() == 0:
        gpu = _core.emulator
        gpu.set_limits(gpu.Limits(apple_family=10, name="tried"))
        with Model(sys.argv[1], device="metal"):
            print(sum("tensor" in library.name for library in gpu.compiled_libraries()), flush=True)
        os._exit(0)
    os.wait()
"""


def test_tensor_kernels_agree_with_float64(path: Path) -> None:
    be_m5()
    with open_metal(path) as model:
        report = doctor_report.check_kernels(model, quick=True)
    assert report["differences"] == []
    assert report["no_matmul_tensor"] == ""
    on_tensors = {"matmul_tensor_q4_0_narrow", "matmul_tensor_swiglu_q4_0_narrow", "attention_tensor_f16_64"}
    assert on_tensors <= set(report["checked"])


def test_unrelated_kernel_failures_do_not_disable_tensors(path: Path) -> None:
    be_m5(broken_kernels={"rmsnorm_f16"})
    with pytest.raises(DeviceError, match="'rmsnorm_f16' cannot be built"):
        open_metal(path)
    assert gpu.live_objects() == 0


def test_the_self_test_finds_wrong_tensor_products(
    path: Path,
    checking: None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    be_m5(wrong_kernels={"matmul_tensor_q4_0_narrow"})
    for _ in range(2):  # the second time from the first result
        caplog.clear()
        with (
            caplog.at_level(logging.WARNING, "metal_prefill"),
            open_metal(path, kv_memory=1 << 19) as model,
        ):
            assert model.stats()["matmul_tensor"] == 0
        assert "matrix units are disabled" in caplog.text
        assert "matmul_tensor_q4_0_narrow: value 0 is 195.26" in caplog.text


def test_the_environment_disables_tensor_kernels(
    path: Path, plain: Floats, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("METAL_PREFILL_MATMUL_TENSOR", "0")
    be_m5()
    logits, used = logits_of(path)
    assert used == (0, 0, 0)
    np.testing.assert_array_equal(logits, plain)
    with open_metal(path) as model:
        report = doctor_report.check_kernels(model, quick=True)
    assert report["no_matmul_tensor"] == "METAL_PREFILL_MATMUL_TENSOR is 0"
