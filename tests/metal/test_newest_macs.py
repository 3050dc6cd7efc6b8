"""Kernels on the matrix units of an emulated M5: those that cannot be built or are wrong are not used.

On a Mac these tests are skipped.
"""

import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.kernels.emulated_gpu import open_metal, require_emulator

from metal_prefill import DeviceError, _core, synth
from metal_prefill.commands import doctor_report
from metal_prefill.gpu import _self_test

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
    gpu.set_limits(gpu.Limits(apple_family=M5, **limits))


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


TALL, ATTENTION, NARROW = "matmul_tensor_q4_0_tall", "attention_tensor_f16_64", "matmul_tensor_q4_0_narrow"


@pytest.mark.parametrize(
    ("limits", "expected", "reason"),
    [
        ({}, (1, 1, 1), ""),
        ({"broken_kernels": {TALL}}, (1, 0, 1), ""),
        ({"broken_kernels": {ATTENTION}}, (1, 1, 0), ""),
        ({"broken_kernels": {TALL, ATTENTION}}, (1, 0, 0), ""),
        ({"broken_kernels": {NARROW}}, (0, 0, 0), f"{NARROW}' cannot be built: .*compiler service"),
        ({"broken_sources": {"attention_tensor.metal"}}, (1, 1, 0), ""),
        ({"metal_tensor": False}, (0, 0, 0), "matmul_tensor.metal do not compile: .*'metal_tensor' file"),
        (
            {"max_threads": {"matmul_tensor_swiglu_q4_0_narrow": 96}},
            (0, 0, 0),
            "_swiglu_q4_0_narrow' needs threadgroups of 128 threads; .* at most 96",
        ),
    ],
    ids=["all", "no tall", "no attention", "neither", "no narrow", "no source", "no headers", "few threads"],
)
def test_an_m5_uses_the_tensor_kernels_that_can_be_built(
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
    assert _core.metal_device()["matmul_tensor"] == "where it passes the self-test"


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


@pytest.mark.usefixtures("checking")
@pytest.mark.parametrize(
    ("wrong", "expected"),
    [({NARROW}, (0, 0, 0)), ({TALL}, (1, 0, 1)), ({ATTENTION}, (1, 1, 0)), ({TALL, ATTENTION}, (1, 0, 0))],
    ids=["narrow", "tall", "attention", "two"],
)
def test_the_self_test_excludes_wrong_tensor_kernels(
    path: Path, caplog: pytest.LogCaptureFixture, wrong: set[str], expected: tuple[int, int, int]
) -> None:
    be_m5(wrong_kernels=wrong)
    for _ in range(2):  # the second time from the first result
        caplog.clear()
        with caplog.at_level(logging.WARNING, "metal_prefill"):
            assert logits_of(path)[1] == expected
        assert "kernels on matrix units are disabled" in caplog.text
        assert all(f"{kernel}: value 0 is " in caplog.text for kernel in wrong)


@pytest.mark.usefixtures("checking")
def test_a_tensor_kernel_that_fails_is_excluded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = iter([DeviceError(f"the GPU failed in {TALL}: lost")])

    def compare(*arguments: Any) -> tuple[set[str], list[Any]]:
        for error in attempts:
            raise error
        return set(), []

    monkeypatch.setattr(_self_test, "kernel_differences", compare)
    be_m5()
    assert logits_of(path)[1] == (1, 0, 1)


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
