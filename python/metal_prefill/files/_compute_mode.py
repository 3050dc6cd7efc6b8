"""Numbers that products of the CPU engine multiply, and the choice for a model and a processor."""

from __future__ import annotations

import os
from typing import Literal, TypeAlias, get_args

from metal_prefill import _core
from metal_prefill._support.pair_speed import settle_pair_speed
from metal_prefill.files._gguf_file import TENSOR_TYPES, GGUFFile
from metal_prefill.files._model_config import ModelConfig

ComputeMode: TypeAlias = Literal["int8", "bf16", "f32"]
MODES: tuple[ComputeMode, ...] = get_args(ComputeMode)
AUTO: Literal["auto"] = "auto"
CHOICES = (AUTO, *MODES)

# Kernel sets that multiply pairs of bfloat16 faster than 8 bits with a scale for each block of 32, once
# quantized weights are pairs.
_FASTER_IN_PAIRS = ("amx",)


def core_mode(mode: ComputeMode) -> _core.Compute:
    """Return the native value of a mode."""
    return _core.Compute[mode.upper()]


def chosen_mode(gguf: GGUFFile, config: ModelConfig) -> ComputeMode:
    """Return the mode that ``compute="auto"`` selects on this processor.

    It is at least as close to float32 as 8 bits, and but for K-quants, IQ2, IQ3 and IQ4_XS on AMX the fastest
    such. Weights that are not quantized are multiplied in float32 by ``"int8"``. Models that attend to
    earlier tokens only may generate: their quantized weights stay in 8 bits or fewer, since a single token
    waits for them to be read.
    """
    in_pairs = not config.causal and kernel_set() in _FASTER_IN_PAIRS
    return "bf16" if in_pairs and any(map(_is_quantized, _layer_types(gguf))) else "int8"


def kernel_set() -> str:
    """Return the name of the kernel set that the CPU engine uses."""
    settle_pair_speed()
    return os.environ.get("METAL_PREFILL_CPU_ISA") or _core.cpu.kernel_sets()[0]


def _layer_types(gguf: GGUFFile) -> set[int]:
    return {tensor.type for tensor in gguf.tensors.values() if tensor.name.startswith("blk.")}


def _is_quantized(tensor_type: int) -> bool:
    return TENSOR_TYPES[tensor_type].block_values > 1
