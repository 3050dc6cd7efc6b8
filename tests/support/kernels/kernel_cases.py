"""Instruction sets, shapes and arrays for the tests of the CPU kernels."""

from collections.abc import Sequence
from functools import cache
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type

from metal_prefill.synth._blocks import BLOCK_FORMATS
from support.kernels.arm_machine import SETS as ARM_SETS
from support.kernels.arm_machine import Kernels
from support.kernels.cpu_testing import native_sets
from support.reference import dequantized
from support.small_models import COMMON_TYPES, TYPES, half_fields

cpu = Kernels()
NATIVE_SETS = native_sets()
SETS = [*NATIVE_SETS, *ARM_SETS]
BATCHES = (1, 2, 5, 6, 7, 8, 9, 15, 16, 17, 31, 32, 33, 512)
QUANTIZED = [Type[kind] for kind in TYPES if GGML_QUANT_SIZES[Type[kind]][0] > 1]
COMMON = [kind for kind in QUANTIZED if kind.name in COMMON_TYPES]
SENTINEL = np.float32(-12345.0)

Floats = npt.NDArray[np.float32]
T = TypeVar("T")

each_set = pytest.mark.parametrize("isa", SETS)


def share(isa: str, cases: Sequence[T]) -> Sequence[T]:
    """Return all cases, or a part of them for a set of Arm: its emulated processor takes 30 times as long.

    The sets of Arm compile these kernels from the same source, and together cover all cases.
    """
    return cases[ARM_SETS.index(isa) :: len(ARM_SETS)] if isa in ARM_SETS else cases


def batches_of(isa: str) -> tuple[int, ...]:
    """Return numbers of tokens; on an emulated processor, they fill at most three tiles."""
    return BATCHES[:-1] if isa in ARM_SETS else BATCHES


def normal(*shape: int, seed: int = 0) -> Floats:
    """Draw standard normal values."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@cache
def random_weight(kind: Type, rows: int, cols: int) -> tuple[npt.NDArray[np.uint8], Floats]:
    """Return random blocks of a type, with every code in use, and their values."""
    block_values, block_bytes = GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (rows * cols // block_values, block_bytes), dtype=np.uint8)
    # Fields in f16 have plausible values: random bits may be NaN.
    for at in half_fields(kind.name):
        values = (rng.standard_normal(len(blocks)) * 0.01).astype(np.float16)
        blocks[:, at : at + 2] = values.view(np.uint8).reshape(-1, 2)
    if BLOCK_FORMATS[kind.name].exponent_scale:
        blocks[:, BLOCK_FORMATS[kind.name].scale_at] = rng.integers(118, 124, len(blocks))
    return blocks.reshape(-1), dequantized(blocks, kind).reshape(rows, cols)


def guarded(rows: int, cols: int) -> Floats:
    """Return an output full of NaN, surrounded by sentinels."""
    out = np.full((rows + 1, cols + 3), SENTINEL, np.float32)
    out[:rows, :cols] = np.nan
    return out


def inside(out: Floats, rows: int, cols: int) -> Floats:
    """Return the output of `guarded`; fails if a sentinel was written or a value was not."""
    assert np.all(out[rows:] == SENTINEL), "wrote after the last row"
    assert np.all(out[:, cols:] == SENTINEL), "wrote after the last column"
    assert not np.isnan(out[:rows, :cols]).any(), "left a value unwritten"
    return out[:rows, :cols]


def computed(
    name: str, isa: str, kind: Type, raw: npt.NDArray[Any], rows: int, x: Floats, *options: Any
) -> Floats:
    """Return the result of a product, with the weight's rows padded to whole groups of 32."""
    columns = -(-rows // 32) * 32
    out = guarded(len(x), columns)
    getattr(cpu, name)(isa, int(kind), raw, rows, x, *options, out)
    return inside(out, len(x), columns)


def bfloat16(x: Floats) -> npt.NDArray[np.uint16]:
    """Round to the nearest bfloat16, ties to even."""
    bits = x.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def widened(bits: npt.NDArray[np.uint16]) -> Floats:
    return (bits.astype(np.uint32) << 16).view(np.float32)
