"""Shapes of heads for tests of kernels with rope."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from support.kernels.kernel_harness import CONSTANTS


class HeadRows:
    """Random rows of q, k and v at positions.

    A row depends only on its seed, by default its position.
    """

    def __init__(
        self,
        positions: Sequence[int],
        seeds: Sequence[int] | None = None,
        *,
        heads: tuple[int, int] = (9, 3),
        dims: tuple[int, int] = (64, 64),
        rope: int = 64,
        neox: bool = False,
        bias: bool = False,
        norms: bool = False,
        norm_after: bool = False,
        value_norm: bool = False,
    ) -> None:
        (self.n_heads, self.n_kv), (self.key_dim, self.value_dim) = heads, dims
        columns = self.n_heads * self.key_dim + self.n_kv * (self.key_dim + self.value_dim)
        drawn = [np.random.default_rng(seed) for seed in seeds or positions]
        self.qkv = np.stack([rng.standard_normal(columns, np.float32) for rng in drawn])
        rng = np.random.default_rng(1)
        self.bias = rng.standard_normal(columns).astype(np.float32)
        self.norms = np.asarray(rng.uniform(0.5, 1.5, (2, self.key_dim)), dtype=np.float32)
        angles = rng.uniform(-np.pi, np.pi, size=(500, max(rope // 2, 1)))
        self.table = np.stack([np.cos(angles), np.sin(angles)], -1).astype(np.float32)
        self.args: dict[str, Any] = {
            "n_heads": self.n_heads, "n_kv_heads": self.n_kv, "key_dim": self.key_dim,
            "value_dim": self.value_dim, "rope_dim": rope,
            "style": CONSTANTS["ROPE_NEOX" if neox else "ROPE_INTERLEAVED"], "has_bias": bias,
            "has_q_norm": norms, "has_k_norm": norms, "has_v_norm": value_norm, "norm_after": norm_after,
            "eps": 1e-6, "query_step": self.key_dim, "skip_keys": 0,
        }  # fmt: skip


ROPE_CASES: dict[str, dict[str, Any]] = {
    "norms after the rotation": {"heads": (4, 2), "neox": True, "norms": True, "norm_after": True},
    "smollm": {"heads": (9, 3), "dims": (64, 64), "rope": 64},
    "neox": {"heads": (4, 4), "dims": (32, 32), "rope": 32, "neox": True},
    "partial": {"heads": (2, 1), "dims": (80, 80), "rope": 20, "neox": True},
    "partial_interleaved": {"heads": (2, 1), "dims": (96, 64), "rope": 48},
    "without": {"heads": (3, 1), "dims": (128, 128), "rope": 0},
    "large": {"heads": (1, 1), "dims": (256, 256), "rope": 256},
    "wide": {
        "heads": (2, 1),
        "dims": (512, 512),
        "rope": 512,
        "neox": True,
        "norms": True,
        "value_norm": True,
    },
    "bias": {"heads": (4, 2), "dims": (64, 64), "rope": 64, "bias": True},
    "bias_and_norms_of_values": {
        "heads": (2, 1),
        "dims": (32, 24),
        "rope": 16,
        "bias": True,
        "value_norm": True,
    },
    "norms": {"heads": (4, 2), "dims": (128, 64), "rope": 128, "neox": True, "norms": True},
    "bias_and_norms": {"heads": (2, 2), "dims": (40, 24), "rope": 40, "bias": True, "norms": True},
}
