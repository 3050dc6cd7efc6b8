"""Models on an emulated GPU with fewer capabilities than the emulator's defaults."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from metal_prefill import Model, _core


def require_emulator() -> Any:
    """Return the module that controls the emulator, or skip the test module that calls this."""
    if not _core.has_emulator:
        pytest.skip("needs a build with the Metal emulator", allow_module_level=True)
    return _core.emulator


def open_metal(path: Path, kv_memory: int = 1 << 18, **options: Any) -> Model:
    """Open a model with a small cache, since the self-test copies it before and after each kernel."""
    return Model(path, device="metal", kv_memory=kv_memory, **options)


def require_cpu_executor(ability: str) -> None:
    """Skip a test of a feature that the emulator's executor on an NVIDIA GPU lacks."""
    if "(CPU)" not in _core.metal_device()["name"]:
        pytest.skip(f"only the emulator's CPU executor {ability}")


def set_matrix_layout(name: str) -> None:
    """Choose which elements of a matrix a lane holds."""
    require_cpu_executor("has matrix layouts to choose from")
    gpu = _core.emulator
    if name == "COLUMNS" and gpu.sanitizer:
        pytest.skip("kernels then access pairs that are not aligned, which a sanitizer reports")
    gpu.set_options(gpu.Options(matrix_layout=getattr(gpu.MatrixLayout, name)))


def open_with(path: Path, kv_memory: int | None = None, **limits: Any) -> Model:
    """Open a model on a GPU with these limits, and keep the last 64 command buffers from then on."""
    gpu = _core.emulator
    gpu.set_limits(gpu.Limits(**limits))
    gpu.set_history_depth(0)
    gpu.set_history_depth(64)
    return Model(path, device="metal", kv_memory=kv_memory)


def command_buffers_of(run: Callable[[], object]) -> Any:
    """Return the last command buffers of a call, at most 256."""
    _core.emulator.set_history_depth(0)
    _core.emulator.set_history_depth(256)
    run()
    return _core.emulator.history()
