"""Random weights of every tensor type, generated directly as quantized blocks.

Quantizing random floats would be slow, and gguf-py cannot write K-quants. Any bit pattern in a block's
integer fields is valid, so these are filled with random bits, and the scales are chosen so that the weights
have mean zero and the requested standard deviation.
"""

import math
from dataclasses import dataclass

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


def _uniform_rms(lowest: int, highest: int) -> float:
    """Root mean square of an integer drawn uniformly from lowest..highest."""
    count = highest - lowest + 1
    mean = (lowest + highest) / 2
    return math.sqrt((count**2 - 1) / 12 + mean**2)


def _k_quant_rms(q_max: int, scale_max: int = 63) -> float:
    """Root mean square of sc * q - (q_max / 2) * m, for uniform sc and m up to scale_max, q up to q_max."""
    centre = q_max / 2
    scales = _uniform_rms(0, scale_max) ** 2
    mean_product = centre * scale_max / 2
    return math.sqrt(scales * _uniform_rms(0, q_max) ** 2 + scales * centre**2 - 2 * mean_product**2)


def _table_rms(values: tuple[int, ...]) -> float:
    return math.sqrt(sum(value**2 for value in values) / len(values))


def _set_half(blocks: Bytes, offset: int, values: Floats) -> None:
    blocks[:, offset : offset + 2] = values.astype("<f2")[:, None].view(np.uint8)


@dataclass(frozen=True)
class BlockFormat:
    """Location and magnitude of the scale in the blocks of a quantized type."""

    scale_at: int  # offset of the block's scale d
    rms: float  # root mean square of weight / d when the integer fields are random
    min_at: int | None = None  # offset of the float16 minimum, if the type has one
    min_per_scale: float = 0.0  # the minimum that centres the weights on zero, as a multiple of d
    # Whether d is the power of two 2^(e - 128) with e stored in a byte, instead of a float16.
    exponent_scale: bool = False
    # Number of scales, if they are floats of 4 exponent and 3 mantissa bits instead of a float16.
    fp8_scales: int = 0
    # Whether quantizers produce scales of either sign. A random sign also cancels the nonzero mean of
    # integers in -8..7, which would otherwise add a constant to every output of a matrix.
    signed_scale: bool = False


_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12)
# Positive floats of 4 exponent and 3 mantissa bits, by their bits; the last one is 448.
_FP8 = np.array([(m + 8 if e else m) * 2.0 ** (max(e, 1) - 10) for e in range(16) for m in range(8)][:-1])
_ODD_SCALE_RMS = math.sqrt(sum((2 * s + 1) ** 2 for s in range(16)) / 16)
# Root mean squares of the grid values of the formats.
_GRID_RMS = {"IQ2_XXS": 23.118, "IQ2_XS": 24.217, "IQ2_S": 24.430, "IQ3_XXS": 30.849, "IQ3_S": 7.594}

BLOCK_FORMATS = {
    "Q4_0": BlockFormat(0, _uniform_rms(-8, 7), signed_scale=True),
    "Q4_1": BlockFormat(0, math.sqrt((16**2 - 1) / 12), min_at=2, min_per_scale=-7.5),
    "Q5_0": BlockFormat(0, _uniform_rms(-16, 15), signed_scale=True),
    "Q5_1": BlockFormat(0, math.sqrt((32**2 - 1) / 12), min_at=2, min_per_scale=-15.5),
    "Q8_0": BlockFormat(0, _uniform_rms(-127, 127)),
    "Q2_K": BlockFormat(80, _k_quant_rms(3, 15), min_at=82, min_per_scale=1.5),
    "Q3_K": BlockFormat(108, _uniform_rms(-32, 31) * _uniform_rms(-4, 3), signed_scale=True),
    "Q4_K": BlockFormat(0, _k_quant_rms(15), min_at=2, min_per_scale=7.5),
    "Q5_K": BlockFormat(0, _k_quant_rms(31), min_at=2, min_per_scale=15.5),
    "Q6_K": BlockFormat(208, _uniform_rms(-128, 127) * _uniform_rms(-32, 31), signed_scale=True),
    "IQ2_XXS": BlockFormat(0, _ODD_SCALE_RMS / 8 * _GRID_RMS["IQ2_XXS"]),
    "IQ2_XS": BlockFormat(0, _ODD_SCALE_RMS / 8 * _GRID_RMS["IQ2_XS"]),
    "IQ2_S": BlockFormat(0, _ODD_SCALE_RMS / 8 * _GRID_RMS["IQ2_S"]),
    "IQ3_XXS": BlockFormat(0, _ODD_SCALE_RMS / 4 * _GRID_RMS["IQ3_XXS"]),
    "IQ3_S": BlockFormat(0, _ODD_SCALE_RMS * _GRID_RMS["IQ3_S"]),
    "IQ4_NL": BlockFormat(0, _table_rms(_IQ4_VALUES), signed_scale=True),
    "IQ4_XS": BlockFormat(0, _uniform_rms(-32, 31) * _table_rms(_IQ4_VALUES), signed_scale=True),
    "TQ1_0": BlockFormat(52, _uniform_rms(-1, 1), signed_scale=True),
    "TQ2_0": BlockFormat(64, math.sqrt(3 / 4), signed_scale=True),
    "MXFP4": BlockFormat(0, _table_rms(_MXFP4_VALUES), exponent_scale=True),
    "NVFP4": BlockFormat(0, _table_rms(_MXFP4_VALUES) / 2, fp8_scales=4),
}


def _random_bytes(rng: np.random.Generator, count: int) -> Bytes:
    words = rng.integers(0, 2**64, -(-count // 8), dtype=np.uint64)
    return words.astype("<u8", copy=False).view(np.uint8)[:count]


def _random_floats(rng: np.random.Generator, count: int, low: float, high: float) -> Floats:
    """Return uniform float32 values in [low, high), from 23 random bits each."""
    bits = _random_bytes(rng, 4 * count).view("<u4")
    np.right_shift(bits, 9, out=bits)
    np.bitwise_or(bits, 0x3F800000, out=bits)  # sign and exponent of [1, 2)
    floats = bits.view("<f4")
    floats -= 1
    floats *= high - low
    floats += low
    return floats


def _quantized(rng: np.random.Generator, kind: str, count: int, std: float) -> Bytes:
    fmt, (weights, size) = BLOCK_FORMATS[kind], block_size(kind)
    n_blocks = count // weights
    blocks = _random_bytes(rng, n_blocks * size).reshape(n_blocks, size)
    if kind == "Q8_0":  # quantizers never produce -128
        integers = blocks[:, 2:].view(np.int8)
        np.maximum(integers, -127, out=integers)
    if kind == "TQ2_0":  # quantizers never set both bits
        codes = blocks[:, :64]
        np.bitwise_and(codes, ~(codes >> 1 & codes & 0x55), out=codes)
    if fmt.exponent_scale:
        blocks[:, fmt.scale_at] = _random_exponents(rng, n_blocks, std / fmt.rms)
        return blocks.reshape(-1)
    # Scales vary between blocks, as in real models; E[u^2] = 13/12 for u uniform in [0.5, 1.5).
    n_scales = n_blocks * max(fmt.fp8_scales, 1)
    scale = _random_floats(rng, n_scales, 0.5, 1.5) * np.float32(std / (fmt.rms * math.sqrt(13 / 12)))
    if fmt.fp8_scales:
        nearest = np.searchsorted((_FP8[1:] + _FP8[:-1]) / 2, scale).astype(np.uint8)
        blocks[:, fmt.scale_at : fmt.scale_at + fmt.fp8_scales] = nearest.reshape(n_blocks, -1)
        return blocks.reshape(-1)
    if fmt.signed_scale:
        scale *= np.where(_random_bytes(rng, n_blocks) & 1, np.float32(1), np.float32(-1))
    _set_half(blocks, fmt.scale_at, scale)
    if fmt.min_at is not None:
        _set_half(blocks, fmt.min_at, scale * np.float32(fmt.min_per_scale))
    return blocks.reshape(-1)


def _random_exponents(rng: np.random.Generator, count: int, rms: float) -> Bytes:
    """Return exponents e such that 2^(e - 128) has this root mean square, from two adjacent values."""
    lower = math.floor(math.log2(rms))
    share = ((rms / 2.0**lower) ** 2 - 1) / 3  # share of the larger exponent: share * 4 + (1 - share) * 1
    chosen = _random_floats(rng, count, 0.0, 1.0) < share
    return np.where(chosen, lower + 129, lower + 128).astype(np.uint8)


def _floats(rng: np.random.Generator, kind: str, count: int, std: float) -> Bytes:
    edge = math.sqrt(3) * std  # uniform in [-a, a) has standard deviation a / sqrt(3)
    values = _random_floats(rng, count, -edge, edge)
    if kind == "F16":
        return values.astype("<f2").view(np.uint8)
    if kind == "BF16":
        return np.ascontiguousarray(values.view("<u2")[1::2]).view(np.uint8)
    return values.view(np.uint8)


TENSOR_TYPES = ("F32", "F16", "BF16", *BLOCK_FORMATS)
"""GGUF names of the supported tensor types."""


def block_size(kind: str) -> tuple[int, int]:
    """Return the number of weights in a block of a tensor type, the smallest storable unit, and its bytes."""
    weights, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    return int(weights), int(size)


def random_tensor(
    rng: np.random.Generator,  # source of all random bits
    kind: str,  # one of `TENSOR_TYPES`
    count: int,  # number of weights, a multiple of those in a block
    # Standard deviation of the weights. They are uniform or, for the K-quants, a product of uniforms.
    std: float,
) -> Bytes:
    """Generate random weights of mean zero in file format, uint8."""
    return (_quantized if kind in BLOCK_FORMATS else _floats)(rng, kind, count, std)


def random_norm(rng: np.random.Generator, count: int, *, signed: bool = False) -> Bytes:
    """Generate norm weights as float32 bytes: close to 1, but different enough to affect the results.

    With `signed`, half of them are negative. Before a tied output head, this prevents tokens from predicting
    themselves, because their embeddings then differ from their rows of the head.
    """
    weights = _random_floats(rng, count, 0.75, 1.25)
    if signed:
        weights *= np.where(_random_bytes(rng, count) & 1, np.float32(1), np.float32(-1))
    return weights.view(np.uint8)


_STEPS = (0.01, 0.3)  # range of the steps that the biases select


def random_decay(rng: np.random.Generator, count: int) -> Bytes:
    """Generate rates at which heads forget, as float32 bytes: between -1 and -16, as models begin with."""
    return (-rng.uniform(1.0, 16.0, count)).astype(np.float32).view(np.uint8)


def random_step(rng: np.random.Generator, count: int) -> Bytes:
    """Generate biases of steps, before softplus, as float32 bytes."""
    low, high = (float(bound) for bound in np.log(_STEPS))
    steps = np.exp(rng.uniform(low, high, count))
    biases: NDArray[np.float32] = np.log(np.expm1(steps)).astype(np.float32)  # the inverse of softplus
    return biases.view(np.uint8)
