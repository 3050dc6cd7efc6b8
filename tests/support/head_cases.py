"""Shapes of heads that kernels with rope are tested with, and rope and RMS norm in float64."""

from __future__ import annotations

from typing import Any

import numpy as np

from support.kernel_harness import Doubles, Floats


def rms(x: Doubles, eps: float) -> Doubles:
    """Normalize the last axis to a root mean square of 1."""
    normed: Doubles = x / np.sqrt((x**2).mean(-1, keepdims=True) + eps)
    return normed


def rotate(x: Doubles, table: Floats, rope_dim: int, neox: bool) -> Doubles:
    """Rotate the first `rope_dim` dimensions of [tokens][heads][dim] by table [tokens][rope_dim / 2]."""
    out: Doubles = x.copy()
    half = rope_dim // 2
    first, second = (
        (slice(0, half), slice(half, rope_dim)) if neox else (slice(0, rope_dim, 2), slice(1, rope_dim, 2))
    )
    turned = (x[..., first] + 1j * x[..., second]) * (table[..., 0] + 1j * table[..., 1])[:, None]
    out[..., first], out[..., second] = turned.real, turned.imag
    return out


ROPE_CASES: dict[str, dict[str, Any]] = {
    "norms after the rotation": {
        "heads": (4, 2),
        "dims": (64, 64),
        "rope": 64,
        "neox": True,
        "norms": True,
        "norm_after": True,
    },
    "smollm": {"heads": (9, 3), "dims": (64, 64), "rope": 64},
    "neox": {"heads": (4, 4), "dims": (32, 32), "rope": 32, "neox": True},
    "partial": {"heads": (2, 1), "dims": (80, 80), "rope": 20, "neox": True},
    "partial_interleaved": {"heads": (2, 1), "dims": (96, 64), "rope": 48},
    "without": {"heads": (3, 1), "dims": (128, 128), "rope": 0},
    "large": {"heads": (1, 1), "dims": (256, 256), "rope": 256},
    "bias": {"heads": (4, 2), "dims": (64, 64), "rope": 64, "bias": True},
    "norms": {"heads": (4, 2), "dims": (128, 64), "rope": 128, "neox": True, "norms": True},
    "bias_and_norms": {"heads": (2, 2), "dims": (40, 24), "rope": 40, "bias": True, "norms": True},
}
