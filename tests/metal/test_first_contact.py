"""Profiles of the emulated device for behaviour that real Macs may have: docs/mac.md lists them.

On a Mac these tests are skipped.
"""

import os
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import metal_kernels
import numpy as np
import pytest
from support.kernels.emulated_gpu import open_with, require_emulator

from metal_prefill import DeviceError, KVMemoryError, Model, _core, synth

pytestmark = [pytest.mark.emulator, pytest.mark.usefixtures("own_device")]

gpu = require_emulator()
VIRTUAL = "Apple Paravirtual device"
PROMPT = [5 + 7 * i for i in range(40)]


@pytest.fixture(scope="module")
def expected(path: Path) -> int:
    """Return the token after the prompt, by the CPU engine."""
    with Model(path, device="cpu", compute="f32") as model:
        return model.forward_prompt(PROMPT)


def test_a_virtual_gpu_is_used_as_the_oldest_family(path: Path, expected: int) -> None:
    with open_with(path, name=VIRTUAL, apple_family=5) as model:
        assert model.forward_prompt(PROMPT) == expected
    assert _core.metal_device()["tuned_as_family"] == "7"
    assert _core.metal_device()["families"] == "Apple1, Apple2, Apple3, Apple4, Apple5, Mac2, Metal3"


@pytest.mark.parametrize(
    ("name", "family"),
    [(VIRTUAL, 5), (VIRTUAL, 7), ("Apple A13", 6)],
    ids=["virtual", "virtual of a newer family", "older"],
)
def test_a_virtual_gpu_is_not_given_features_that_may_fail(
    path: Path, expected: int, own_cache: Path, name: str, family: int
) -> None:
    """Its no-copy buffers are stale, it aborts on archives, and residency sets are an error."""
    for _ in range(2):  # the second time an archive would be opened
        gpu.forget_compiled_libraries()
        limits: dict[str, Any] = {
            "name": name,
            "apple_family": family,
            "stale_no_copy": 4096,
            "binary_archives": False,
        }
        with open_with(path, **limits) as model:
            assert model.forward_prompt(PROMPT) == expected
            stats = model.stats()
            assert (stats["weights_mapping_refused"], stats["weights_mapped_bytes"]) == (1, 0)
            assert stats["pipelines_compiled"] == stats["pipelines"] > 0
            assert stats["resident_bytes"] == gpu.resident_bytes() == 0
            assert not any(buffer.no_copy for buffer in gpu.live_buffers())
            assert not any(library.concurrent for library in gpu.compiled_libraries())
        assert not list(own_cache.rglob("*.pipelines"))


@pytest.mark.parametrize("setting", [None, "0"])
def test_the_watchdog_timeout_is_extended_unless_the_environment_sets_it(setting: str | None) -> None:
    name = "AGX_RELAX_CDM_CTXSTORE_TIMEOUT"
    environment = {key: value for key, value in os.environ.items() if key != name}
    if setting is not None:
        environment[name] = setting
    code = (
        "import ctypes; from metal_prefill import _core; _core.metal_device();"
        "getenv = ctypes.CDLL(None).getenv; getenv.restype = ctypes.c_char_p;"
        f"print(getenv(b'{name}').decode())"
    )
    output = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True)
    assert output.stdout.decode().strip() == (setting or "1")


def test_a_gpu_with_memory_of_its_own_is_rejected(path: Path) -> None:
    with pytest.raises(DeviceError, match=f"{VIRTUAL}.*of the families Apple1.*it has memory of its own"):
        open_with(path, name=VIRTUAL, apple_family=5, unified_memory=False)
    assert "problem" in _core.metal_device()
    assert not _core.metal_available()
    assert gpu.live_objects() == 0


@pytest.mark.parametrize("buffer_bytes", [0, 256 * 1024], ids=["one buffer", "many"])
def test_a_refused_mapping_is_copied_and_reported(path: Path, expected: int, buffer_bytes: int) -> None:
    with open_with(path, no_copy=False, max_buffer_length=buffer_bytes) as model:
        assert model.forward_prompt(PROMPT) == expected
        stats = model.stats()
        assert stats["weights_mapping_refused"] == 1
        assert stats["weights_mapped_bytes"] == 0
        assert stats["weights_copied_bytes"] > 0.5 * path.stat().st_size
        assert not any(buffer.no_copy for buffer in gpu.live_buffers())
    with open_with(path) as model:
        assert model.stats()["weights_mapping_refused"] == 0


def test_a_failed_copy_of_a_refused_mapping_leaks_nothing(path: Path) -> None:
    gpu.fail_allocation()
    with pytest.raises(DeviceError, match=r"cannot allocate .* 'weights'"):
        open_with(path, no_copy=False)
    assert gpu.live_objects() == 0


SMALLER = {
    "rmsnorm_f16": 32,
    "rmsnorm_f32": 32,
    "rope_append_f16": 64,
    "attention_prefill_f16_64": 32,
    "rope_attention_decode_f16_32": 32,
    "attention_combine": 32,
    "argmax_stage1": 96,
    "log_prob": 32,
}


def test_flexible_kernels_use_as_many_threads_as_their_pipeline_allows(path: Path) -> None:
    tokens, results = PROMPT + [1] * 260, []  # enough keys for two threadgroups of a token
    for limits in ({}, SMALLER):
        with open_with(path, max_threads=limits) as model:
            results.append([model.score(PROMPT), model.session().forward_prompt_logits(tokens)])
            model.forward_prompt(tokens)
            results[-1].append(model.forward_token(3))
    for found, wanted in zip(*results, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-3 * np.abs(wanted).max())
    groups: dict[str, int] = {}
    for buffer in gpu.history():
        for dispatch in buffer.dispatches:
            groups[dispatch.kernel] = max(groups.get(dispatch.kernel, 0), dispatch.group[0])
    assert all(groups[kernel] <= most for kernel, most in SMALLER.items())


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (
            {"max_threads": {"matmul_q4_0_narrow": 96}},
            r"'matmul_q4_0_narrow' needs threadgroups of 128 threads; .* at most 96",
        ),
        ({"simd_width": 64}, r"the kernel '\w+' runs in simdgroups of 64 threads"),
        ({"simdgroup_matrix": False}, r"the kernel '\w+' cannot be built: .*no simdgroup_matrix"),
        ({"broken_kernels": {"argmax_stage2"}}, r"'argmax_stage2' cannot be built: .*compiler service"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_kernel_that_cannot_be_used_is_named(path: Path, limits: dict[str, Any], message: str) -> None:
    with pytest.raises(DeviceError, match=message):
        open_with(path, **limits)
    assert gpu.live_objects() == 0


def test_a_driver_that_ignores_barriers_fails_first_contact(
    checking: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each dispatch alone is right."""
    path = synth.synthesize(tmp_path / "m.gguf", preset="tiny", vocab=320)
    with pytest.raises(DeviceError, match="computes wrong results: "):
        open_with(path, kv_memory=1 << 18, barriers=False)
    monkeypatch.setenv("METAL_PREFILL_CACHE", str(tmp_path / "other"))
    open_with(path, kv_memory=1 << 18).close()


@pytest.mark.parametrize(
    ("name", "family", "cores"),
    [
        ("Apple M4", 9, 10),
        ("Apple M4 Pro", 9, 20),
        ("Apple M2 Ultra", 8, 80),
        ("Apple A18 Pro", 9, 5),
        ("Apple Pro", 9, 10),
    ],
)
def test_a_gpu_is_tuned_for_the_cores_of_its_chip(name: str, family: int, cores: int) -> None:
    gpu.set_limits(gpu.Limits(name=name, apple_family=family))
    assert _core.metal_device()["tuned_for_cores"] == str(cores)


def test_models_of_the_suite_are_neither_checked_nor_tuned(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks and measurements take seconds, on a Mac and on the emulator."""
    monkeypatch.setattr(_core, "has_emulator", False)
    monkeypatch.setenv("METAL_PREFILL_CACHE", str(tmp_path))
    with open_with(path):  # pipelines are not stored if another model of the process has built them
        assert {found.name for found in tmp_path.iterdir()} <= {"pipelines"}


def test_the_first_dispatches_of_a_pass_are_committed_early(deep_path: Path) -> None:
    with open_with(deep_path) as model, model.session() as session:
        session.forward_token_greedy(session.forward_prompt(PROMPT))
        label = gpu.history()[-1].label
        sizes = [len(buffer.dispatches) for buffer in gpu.history() if buffer.label == label]
        assert sizes == [64, 12 * 7 + 5 - 64]
        assert session.stats()["command_buffers"] == 2


def test_transfers_retain_their_buffers_but_passes_do_not(path: Path) -> None:
    with open_with(path) as model:
        model.forward_prompt(PROMPT)
        kept = {buffer.label: buffer.retained for buffer in gpu.history()}
    assert kept == {"an upload": True, "40 tokens at position 0": False}


def test_shaders_are_compiled_without_fast_maths_and_in_the_oldest_language(path: Path) -> None:
    gpu.forget_compiled_libraries()
    with open_with(path):
        compiled = gpu.compiled_libraries()
    assert len(compiled) > 10
    assert {(library.fast_math, library.language) for library in compiled} == {(False, (3, 0))}
    assert not any(library.fast_functions for library in compiled)  # a separate option on macOS 15


def test_kernel_tests_compile_as_the_engine_does(libraries: dict[str, metal_kernels.KernelLibrary]) -> None:
    compiled = metal_kernels.testing_module().emulator.compiled_libraries()[
        -len({id(o) for o in libraries.values()}) :
    ]
    languages = {library.name: library.language for library in compiled}
    for source in ("matmul_tensor.metal", "attention_tensor.metal"):
        assert languages.pop(source) == (4, 0)  # which needs it
    assert set(languages.values()) == {(3, 0)}
    assert not any(library.fast_math or library.fast_functions for library in compiled)


def fill_cache(model: Model) -> None:
    """Prompt sessions until one does not fit."""
    with ExitStack() as held:
        while True:
            held.enter_context(model.session()).forward_prompt([1] * 250)


def test_a_cache_beyond_the_working_set_is_rejected_before_any_pass(tmp_path: Path) -> None:
    """While the cache grows, its old and its new buffer are in use together."""
    path = synth.synthesize(  # pages are large, so few prompts fill the cache
        tmp_path / "m.gguf", preset="tiny", layers=4, heads=8, kv_heads=8, head_dim=64, vocab=320
    )
    room = 12 << 20
    with open_with(path, working_set_bytes=path.stat().st_size + room, out_of_memory=True) as model:
        with pytest.raises(KVMemoryError, match="exceeds kv_memory") as refused:
            fill_cache(model)
        (limit,) = re.findall(r"kv_memory of (\d+) bytes", str(refused.value))
        assert 0.4 * room < int(limit) <= 0.5 * room


def test_a_callers_cache_limit_is_used_unchanged(path: Path) -> None:
    gpu.set_limits(gpu.Limits(working_set_bytes=1 << 16))  # less than the weights: room for a page alone
    with Model(path, device="metal") as model, pytest.raises(KVMemoryError, match="1 pages"):
        model.forward_prompt([1] * 65)
    with Model(path, device="metal", kv_memory=1 << 26) as model:
        model.forward_prompt([1] * 65)
