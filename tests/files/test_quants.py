"""Conversions of tensor types on the host, against the gguf package, to the bit."""

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGML_QUANT_SIZES, quants
from gguf import GGMLQuantizationType as Type
from support.small_models import TYPES, half_fields

from metal_prefill import _core
from metal_prefill.synth._blocks import BLOCK_FORMATS

# Scales of either sign, down to where float16 is subnormal, and zeros of both signs.
SCALES = np.array([1, -1, 0.01, -0.3, 6e-5, -6e-8, 3e-6, 0, -0.0, 65504], np.float16)
# Exponents of powers of two, from float32's subnormals to below infinity.
EXPONENTS = np.array([0, 1, 2, 90, 120, 127, 128, 250], np.uint8)

# Types with three, four and eight magnitudes, of which 2048 random values contain fewer distinct ones.
VALUES_OF_FEW_CODES = {"TQ1_0": 10, "TQ2_0": 15, "MXFP4": 80}


def random_rows(kind: str) -> npt.NDArray[np.uint8]:
    """Draw 2048 values of a type, every bit in use."""
    n_values, n_bytes = GGML_QUANT_SIZES[Type[kind]]
    rng = np.random.default_rng(3)
    if kind in ("F32", "F16", "BF16"):
        values = rng.standard_normal(2048).astype(np.float32) * np.float32(10) ** rng.integers(-7, 4, 2048)
        floats: npt.NDArray[np.uint8] = quants.quantize(values.astype(np.float32), Type[kind]).view(np.uint8)
        return floats.reshape(-1)
    blocks = rng.integers(0, 256, (2048 // n_values, n_bytes), dtype=np.uint8)
    for at in half_fields(kind):  # random bits would make them infinite or NaN
        blocks[:, at : at + 2] = rng.choice(SCALES, len(blocks)).view(np.uint8).reshape(-1, 2)
    if BLOCK_FORMATS[kind].exponent_scale:
        blocks[:, BLOCK_FORMATS[kind].scale_at] = rng.choice(EXPONENTS, len(blocks))
    return blocks.reshape(-1)


@pytest.mark.parametrize("kind", TYPES)
def test_values_are_bit_identical_to_the_gguf_package(kind: str) -> None:
    rows = random_rows(kind)
    n_bytes = GGML_QUANT_SIZES[Type[kind]][1]
    expected = quants.dequantize(rows.reshape(-1, n_bytes), Type[kind]).reshape(-1)
    actual = _core.dequantize(Type[kind], rows, 2048)
    assert len(np.unique(expected)) > VALUES_OF_FEW_CODES.get(kind, 100)
    np.testing.assert_array_equal(actual.view(np.uint32), expected.astype(np.float32).view(np.uint32))


def test_a_partial_block_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"a row of 33 values is not a multiple of the 32 .* of Q4_0"):
        _core.dequantize(Type.Q4_0, np.zeros(18, np.uint8), 33)


def test_an_unsupported_type_is_rejected() -> None:
    with pytest.raises(ValueError, match=f"tensor type {int(Type.IQ1_S)} is not known"):
        _core.dequantize(Type.IQ1_S, np.zeros(50, np.uint8), 256)
