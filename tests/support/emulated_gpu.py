"""Models on an emulated GPU with fewer capabilities than the emulator's defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from metal_prefill import Model, _core


def open_metal(path: Path, **options: Any) -> Model:
    """Open a model with a small cache: the self-test copies it before and after each kernel."""
    return Model(path, device="metal", kv_memory=1 << 20, **options)


def open_with(path: Path, **limits: Any) -> Model:
    """Open a model on a GPU with these limits, and keep the last 64 command buffers from then on."""
    gpu = _core.emulator
    gpu.set_limits(gpu.Limits(**limits))
    gpu.set_history_depth(0)
    gpu.set_history_depth(64)
    return Model(path, device="metal")
