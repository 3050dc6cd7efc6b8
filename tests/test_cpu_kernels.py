"""Kernels of the CPU engine, on each instruction set that this machine has, against exact arithmetic."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGML_QUANT_SIZES, quants
from gguf import GGMLQuantizationType as Type
from support.arm_machine import SETS as ARM_SETS
from support.arm_machine import Kernels
from support.cpu_testing import cpu_testing, native_sets
from support.small_models import COMMON_TYPES, TYPES, half_fields

from metal_prefill import Model, _core, synth
from metal_prefill.synth._blocks import BLOCK_FORMATS

cpu = Kernels()
NATIVE_SETS = native_sets()
SETS = [*NATIVE_SETS, *ARM_SETS]
BATCHES = (1, 2, 5, 6, 7, 8, 9, 15, 16, 17, 31, 32, 33, 512)
QUANTIZED = [Type[kind] for kind in TYPES if GGML_QUANT_SIZES[Type[kind]][0] > 1]
COMMON = [kind for kind in QUANTIZED if kind.name in COMMON_TYPES]
SENTINEL = np.float32(-12345.0)
# Where the blocks of a type have its codes.
EXTREME_CODES = {
    Type.Q4_0: slice(2, 18),
    Type.Q5_0: slice(2, 22),
    Type.Q5_1: slice(4, 24),
    Type.Q8_0: slice(2, 34),
    Type.Q2_K: slice(16, 80),
    Type.Q3_K: slice(0, 96),
    Type.Q4_K: slice(16, 144),
    Type.Q5_K: slice(16, 176),
    Type.Q6_K: slice(0, 192),
    Type.IQ4_NL: slice(2, 18),
}

Floats = npt.NDArray[np.float32]

each_set = pytest.mark.parametrize("isa", SETS)


def normal(*shape: int, seed: int = 0) -> Floats:
    """Draw standard normal values."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@cache
def random_weight(kind: Type, rows: int, cols: int, seed: int = 0) -> tuple[npt.NDArray[np.uint8], Floats]:
    """Random blocks of a type, every code in use, and the values that they represent."""
    block_values, block_bytes = GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows * cols // block_values, block_bytes), dtype=np.uint8)
    for at in half_fields(
        kind.name
    ):  # f16 fields have plausible values instead of random bits, which may be NaN
        values = (rng.standard_normal(len(blocks)) * 0.01).astype(np.float16)
        blocks[:, at : at + 2] = values.view(np.uint8).reshape(-1, 2)
    if BLOCK_FORMATS[kind.name].exponent_scale:
        blocks[:, BLOCK_FORMATS[kind.name].scale_at] = rng.integers(118, 124, len(blocks))
    return blocks.reshape(-1), quants.dequantize(blocks, kind).reshape(rows, cols)


def guarded(rows: int, cols: int) -> Floats:
    """Return an output full of NaN inside a frame of sentinels."""
    out = np.full((rows + 1, cols + 3), SENTINEL, np.float32)
    out[:rows, :cols] = np.nan
    return out


def inside(out: Floats, rows: int, cols: int) -> Floats:
    """Return the output of `guarded`; fails where the frame was written or a value was not."""
    assert np.all(out[rows:] == SENTINEL), "wrote after the last row"
    assert np.all(out[:, cols:] == SENTINEL), "wrote after the last column"
    assert not np.isnan(out[:rows, :cols]).any(), "left a value unwritten"
    return out[:rows, :cols]


def test_scalar_kernels_are_always_available() -> None:
    assert NATIVE_SETS[-1] == "scalar"


def test_the_compiler_omitted_no_kernels() -> None:
    sets = {
        "x86_64": ["amx", "avx512bf16", "avx512vnni", "avxvnni", "avx2"],
        "arm64": ["neon_i8mm", "neon_dotprod", "neon"],
    }
    machine = platform.machine().lower().replace("amd64", "x86_64").replace("aarch64", "arm64")
    assert _core.cpu.built_sets() == [*sets.get(machine, []), "scalar"]


def test_bfloat16_pairs_are_preferred_if_faster_than_float32() -> None:
    sets, speedup = _core.cpu.kernel_sets(), _core.cpu.pair_speedup()
    assert (speedup > 0) == ("avx512bf16" in sets)
    if "avx512bf16" in sets:
        assert (sets.index("avx512bf16") < sets.index("avx512vnni")) == (speedup >= 1.5)
        assert speedup == _core.cpu.pair_speedup()  # measured once


@each_set
@pytest.mark.parametrize("first", [0, 3])
def test_activations_are_quantized_to_the_nearest_step_of_their_block(isa: str, first: int) -> None:
    x = normal(21, 96) * np.float32(3.0)
    x[4, 32:64] = 0
    x[5, :32] *= np.float32(1e-30)
    q, scale, scaled_sum, start, start_half = cpu.quantize(isa, x, first)
    blocks = x.reshape(21, 3, 32).astype(np.float64)
    largest = np.abs(blocks).max(-1)
    np.testing.assert_allclose(scale, largest / 127, rtol=1e-6)
    exact = np.divide(
        blocks * 127, largest[..., None], where=largest[..., None] > 0, out=np.zeros_like(blocks)
    )
    # Ties aside, a product that rounds in float32 moves no value by more than a hair over half a step.
    assert np.abs(q.reshape(21, 3, 32) - exact).max() <= 0.5 + 1e-4
    sums = q.reshape(21, 3, 32).sum(-1)
    np.testing.assert_array_equal(start, -8 * sums)
    np.testing.assert_array_equal(start_half, -8 * q.reshape(21, 3, 32)[..., :16].sum(-1))
    np.testing.assert_allclose(scaled_sum, scale * sums, rtol=1e-6, atol=1e-30)


@each_set
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_survive_quantization(isa: str, bad: float) -> None:
    x = normal(1, 64)
    x[0, 40] = bad
    raw, _ = random_weight(Type.Q8_0, 32, 64)
    out = guarded(1, 32)
    cpu.multiply_int8(isa, int(Type.Q8_0), raw, 32, x, 0, out)
    assert not np.isfinite(out[0, :32]).any()
    _, scale, *_ = cpu.quantize(isa, x, 0)
    assert np.isfinite(scale[0, 0])


def exact_product(
    values: Floats, q: npt.NDArray[np.float64], scale: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Product in float64 of dequantized weights and quantized activations."""
    tokens, cols = q.shape
    x = q.reshape(tokens, -1, 32) * scale[..., None]
    product: npt.NDArray[np.float64] = x.reshape(tokens, cols) @ values.astype(np.float64).T
    return product


@each_set
@pytest.mark.parametrize(
    ("kind", "cols"),
    [
        *((kind, cols) for kind in COMMON for cols in (64, 576, 1536, 2048)),
        *((kind, 768) for kind in QUANTIZED if kind not in COMMON),
    ],
    ids=lambda value: value.name if isinstance(value, Type) else str(value),
)
def test_the_quantized_product_is_exact(isa: str, kind: Type, cols: int) -> None:
    block_values = GGML_QUANT_SIZES[kind][0]
    cols = -(-cols // block_values) * block_values
    rows = 70  # two groups of 32, and 6 rows of a third
    raw, values = random_weight(kind, rows, cols)
    x = normal(33, cols, seed=1)
    q, scale, *_ = cpu.quantize(isa, x, 0)
    expected = exact_product(values, q, scale)
    out = guarded(33, 96)
    cpu.multiply_int8(isa, int(kind), raw, rows, x, 0, out)
    actual = inside(out, 33, 96)
    np.testing.assert_array_equal(actual[:, rows:], 0)  # the group is filled up with zeros
    # Integer sums are exact; the remaining error is float32 rounding, once per block of 32 columns.
    assert np.abs(actual[:, :rows] - expected).max() <= 2e-6 * np.abs(expected).max()


# Codes of types with a grid have 3 or 4 bits instead of indices into it, those of TQ1_0 two instead of 1.6; a
# block of MXFP4 has an empty half line; scales of NVFP4 have two bytes instead of one.
MOST_OF_THE_FILE = {
    Type.IQ2_XXS: 1.64,
    Type.IQ2_XS: 1.57,
    Type.IQ2_S: 1.42,
    Type.IQ3_XXS: 1.43,
    Type.IQ3_S: 1.28,
    Type.TQ1_0: 1.23,
    Type.MXFP4: 1.06,
    Type.NVFP4: 1.12,
}


@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda t: t.name)
def test_packed_weights_of_most_types_are_at_most_5_percent_larger_than_in_the_file(
    kind: Type, tmp_path: Path
) -> None:
    path = synth.synthesize(
        tmp_path / "model.gguf", preset="tiny", dim=256, head_dim=64, ffn=512, tensor_type=kind.name
    )
    with Model(path, device="cpu", threads=1) as model:
        tensors = model.gguf.tensors.values()
        in_layers, in_head = (
            sum(tensor.nbytes for tensor in tensors if tensor.type_name == name)
            for name in (kind.name, "Q8_0" if kind is not Type.Q8_0 else "")
        )
        packed = model.stats()["weight_bytes"] - in_head
    assert 0 < packed <= MOST_OF_THE_FILE.get(kind, 1.05) * in_layers


@each_set
@pytest.mark.parametrize("kind", EXTREME_CODES, ids=lambda t: t.name)
def test_integer_sums_are_exact_at_the_extremes(isa: str, kind: Type) -> None:
    """All codes at either end against activations at either end: the largest sums that can occur."""
    raw = random_weight(kind, 32, 256)[0].copy()
    blocks = raw.reshape(-1, GGML_QUANT_SIZES[kind][1])
    for code in (0x00, 0xFF, 0x80, 0x7F):
        blocks[:, EXTREME_CODES[kind]] = code
        values = quants.dequantize(blocks, kind).reshape(32, 256)
        for sign in (1, -1):
            x = np.full((17, 256), sign, np.float32)
            q, scale, *_ = cpu.quantize(isa, x, 0)
            assert np.all(q == 127 * sign)
            out = guarded(17, 32)
            cpu.multiply_int8(isa, int(kind), raw, 32, x, 0, out)
            expected = exact_product(values, q, scale)
            error = np.abs(inside(out, 17, 32) - expected).max()
            assert error <= 2e-6 * np.abs(values).max() * 256


@each_set
@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda t: t.name)
def test_product_of_a_token_does_not_depend_on_the_batch(isa: str, kind: Type) -> None:
    cols = 512
    raw, _ = random_weight(kind, 64, cols)
    # Of many tokens the other types multiply the same wide blocks; they differ in products of a few.
    batches = BATCHES if kind in COMMON else (*BATCHES[:7], 17, 33)
    # 37 different tokens, repeated: a prime, so that no two tiles of a batch start with the same one.
    tokens = normal(37, cols)
    alone = np.empty((len(tokens), 64), np.float32)
    for t in range(len(tokens)):
        cpu.multiply_int8(isa, int(kind), raw, 64, tokens[t : t + 1], 0, alone[t : t + 1])
    x, single = (np.resize(rows, (batches[-1], rows.shape[1])) for rows in (tokens, alone))
    for batch in batches:
        for first in (0, 5):
            out = guarded(batch, 64)
            cpu.multiply_int8(isa, int(kind), raw, 64, x[:batch], first, out)
            np.testing.assert_array_equal(
                inside(out, batch, 64), single[:batch], err_msg=f"batch {batch} at {first}"
            )


def test_quantized_products_are_bit_identical_on_all_sets_with_fma() -> None:
    """AVX2, AVX-512, AMX and NEON run the same float operations in the same order."""
    raw, _ = random_weight(Type.Q4_0, 64, 576)
    x = normal(40, 576)
    results = []
    for isa in SETS:
        if isa != "scalar":
            results.append(guarded(40, 64))
            cpu.multiply_int8(isa, int(Type.Q4_0), raw, 64, x, 0, results[-1])
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


@each_set
@pytest.mark.parametrize("cols", [64, 80, 100, 576, 2048])
def test_float_products_agree_with_float64(isa: str, cols: int) -> None:
    padded = (cols + 15) // 16 * 16
    weight, x = np.zeros((32, padded), np.float32), np.zeros((512, padded), np.float32)
    weight[:, :cols], x[:, :cols] = normal(32, cols), normal(512, cols, seed=1)
    expected = x.astype(np.float64) @ weight.astype(np.float64).T
    single = None
    for batch in reversed(BATCHES):
        out = guarded(batch, 32)
        cpu.multiply_float(isa, weight, cols, x[:batch], out)
        actual = inside(out, batch, 32)
        assert np.abs(actual - expected[:batch]).max() <= 1e-6 * np.abs(expected).max()
        single = actual if single is None else single
        np.testing.assert_array_equal(actual, single[:batch], err_msg=f"batch {batch}")


def bfloat16(x: Floats) -> npt.NDArray[np.uint16]:
    """Round to the nearest bfloat16, ties to even."""
    bits = x.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def widened(bits: npt.NDArray[np.uint16]) -> Floats:
    """Return the values of bfloat16."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


@each_set
@pytest.mark.parametrize("kind", [Type.F16, Type.BF16], ids=lambda kind: str(kind.name))
def test_products_of_few_tokens_with_16_bit_weights_are_bit_identical_to_those_of_many(
    isa: str, kind: Type
) -> None:
    weight, x = normal(32, 592), normal(9, 592, seed=1)
    bits = bfloat16(weight) if kind == Type.BF16 else weight.astype(np.float16).view(np.uint16)
    expanded = widened(bits) if kind == Type.BF16 else weight.astype(np.float16).astype(np.float32)
    many = guarded(9, 32)
    cpu.multiply_float(isa, expanded, 592, x, many)
    for count in range(1, 10):
        out = guarded(count, 32)
        cpu.multiply_half(isa, bits.reshape(-1), kind == Type.BF16, x[:count], out)
        np.testing.assert_array_equal(inside(out, count, 32), inside(many, 9, 32)[:count])


PAIR_SETS = [isa for isa in NATIVE_SETS if isa in ("avx512bf16", "amx")]
each_pair_set = pytest.mark.parametrize("isa", PAIR_SETS)


@each_pair_set
@pytest.mark.parametrize("n", [1, 16, 37])
def test_activations_are_rounded_to_the_nearest_bfloat16(isa: str, n: int) -> None:
    x = np.concatenate([normal(n), np.array([1 + 2**-8, 1 + 3 * 2**-8, -3e38, np.inf], np.float32)])
    out = np.full(len(x) + 4, 7, np.uint16)
    cpu.round_to_bfloat16(isa, x, out)
    np.testing.assert_array_equal(out[: len(x)], bfloat16(x))
    assert np.all(out[len(x) :] == 7)
    cpu.round_to_bfloat16(isa, np.full(len(x), np.nan, np.float32), out)
    assert np.isnan(widened(out[: len(x)])).all()


def file_bytes(kind: Type, weight: Floats) -> npt.NDArray[np.uint8]:
    """Return the bytes of floats in a file."""
    as_stored: dict[Type, Callable[[Floats], npt.NDArray[Any]]] = {
        Type.BF16: bfloat16,
        Type.F16: lambda x: x.astype(np.float16),
        Type.F32: lambda x: x,
    }
    return as_stored[kind](weight).reshape(-1).view(np.uint8)


def paired_weights(isa: str, kind: Type, raw: npt.NDArray[np.uint8], rows: int, cols: int) -> Floats:
    """Return weights as products of pairs take them: the products of an identity matrix."""
    groups = -(-rows // 32)
    out = guarded(cols, 32 * groups)
    cpu.multiply_pairs(isa, int(kind), raw, rows, np.eye(cols, dtype=np.float32), 0, out)
    weights: Floats = inside(out, cols, 32 * groups).T
    return weights


FLOATS = [Type.F32, Type.F16, Type.BF16]


@each_pair_set
@pytest.mark.parametrize("kind", [*FLOATS, *QUANTIZED], ids=lambda kind: str(kind.name))
def test_weights_are_rounded_to_the_nearest_bfloat16(isa: str, kind: Type) -> None:
    rows = 70
    if kind in FLOATS:
        cols = 100
        exact = widened(bfloat16(normal(rows, cols))) if kind == Type.BF16 else normal(rows, cols)
        raw = file_bytes(kind, exact)
        exact = exact.astype(np.float16).astype(np.float32) if kind == Type.F16 else exact
    else:
        cols = 256
        raw, exact = random_weight(kind, rows, cols)
    weights = paired_weights(isa, kind, raw, rows, cols)
    assert np.all(weights[:rows].view(np.uint32) & 0xFFFF == 0)
    if kind in FLOATS:
        np.testing.assert_array_equal(weights[:rows], widened(bfloat16(exact)))
    half_unit = np.ldexp(1.0, np.frexp(exact)[1] - 9)  # of eight significant bits
    # Scales times codes are rounded to float32 first, by one step more or less than in `gguf`.
    assert np.all(np.abs(weights[:rows] - exact.astype(np.float64)) <= half_unit * (1 + 2.0**-12))
    np.testing.assert_array_equal(weights[rows:], 0)  # the group is filled up with zeros


@each_pair_set
@pytest.mark.parametrize(
    ("kind", "cols"),
    [*((Type.BF16, cols) for cols in (32, 80, 576, 2048)), (Type.Q4_0, 576), (Type.Q6_K, 512)],
    ids=lambda value: value.name if isinstance(value, Type) else str(value),
)
def test_the_product_of_pairs_is_that_of_rounded_numbers(isa: str, kind: Type, cols: int) -> None:
    raw = file_bytes(kind, normal(32, cols)) if kind == Type.BF16 else random_weight(kind, 32, cols)[0]
    exact = paired_weights(isa, kind, raw, 32, cols).astype(np.float64)
    x = normal(512, cols, seed=1)
    rounded = widened(bfloat16(x)).astype(np.float64)
    expected = rounded @ exact.T
    # Products of two bfloat16 are exact in float32. Each addition errs by 2^-24 of a sum that is no larger
    # than that of the magnitudes: one for each column, or 16 for a step of 32 columns and one for each step.
    additions = cols if isa == "avx512bf16" else 17 + cols / 32
    error = additions * 2.0**-24 * (np.abs(rounded) @ np.abs(exact).T)
    single = None
    for batch in reversed(BATCHES):
        for first in (0, 3):
            out = guarded(batch, 32)
            cpu.multiply_pairs(isa, int(kind), raw, 32, x[:batch], first, out)
            actual = inside(out, batch, 32)
            assert np.all(np.abs(actual - expected[:batch]) <= error[:batch])
            single = actual if single is None else single
            np.testing.assert_array_equal(actual, single[:batch], err_msg=f"batch {batch}")


@pytest.mark.skipif("amx" not in PAIR_SETS, reason="neither AMX nor AVX512-BF16, which its emulation needs")
def test_the_matrix_unit_adds_even_and_odd_columns_separately() -> None:
    """Intel's manual defines this order; that of an emulated unit is compared with the same sums."""
    weight, x = widened(bfloat16(normal(32, 576))), widened(bfloat16(normal(19, 576, seed=1)))
    sums = np.zeros((19, 32), np.float32)
    for step in range(0, 576, 32):
        even, odd = np.zeros((2, 19, 32), np.float32)
        for column in range(step, step + 32, 2):  # products of two bfloat16 are exact in float32
            even += np.outer(x[:, column], weight[:, column])
            odd += np.outer(x[:, column + 1], weight[:, column + 1])
        sums += even + odd
    out = guarded(19, 32)
    cpu.multiply_pairs("amx", int(Type.BF16), file_bytes(Type.BF16, weight), 32, x, 0, out)
    np.testing.assert_array_equal(inside(out, 19, 32), sums)


@each_pair_set
def test_products_of_pairs_flush_subnormal_numbers(isa: str) -> None:
    weight, x = np.full((32, 32), 2.0**-70, np.float32), np.full((2, 32), 2.0**-60, np.float32)
    x[1] = 2.0**-50
    out = guarded(2, 32)
    cpu.multiply_pairs(isa, int(Type.BF16), file_bytes(Type.BF16, weight), 32, x, 0, out)
    np.testing.assert_array_equal(inside(out, 2, 32)[0], 0)
    np.testing.assert_array_equal(out[1, :32], np.float32(2.0**-115))


@each_pair_set
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_survive_rounding_to_pairs(isa: str, bad: float) -> None:
    weight, x = np.ones((32, 64), np.float32), normal(3, 64)
    x[1, 40] = bad
    out = guarded(3, 32)
    cpu.multiply_pairs(isa, int(Type.F32), file_bytes(Type.F32, weight), 32, x, 0, out)
    assert not np.isfinite(out[1, :32]).any()
    assert np.isfinite(out[[0, 2], :32]).all()
    weight[5, 7] = bad
    cpu.multiply_pairs(isa, int(Type.F32), file_bytes(Type.F32, weight), 32, normal(3, 64), 0, out)
    assert not np.isfinite(out[:3, 5]).any()
    assert np.isfinite(np.delete(out[:3, :32], 5, axis=1)).all()


@each_set
@pytest.mark.parametrize("n", [1, 5, 64, 80, 576])
def test_rms_norm(isa: str, n: int) -> None:
    x, weight = normal(n), normal(n, seed=1)
    out = np.full(n + 4, SENTINEL, np.float32)
    out[:n] = np.nan
    cpu.rms_norm(isa, x, weight, 1e-5, out)
    expected = x / np.sqrt(np.square(x.astype(np.float64)).mean() + 1e-5) * weight
    np.testing.assert_allclose(out[:n], expected, rtol=1e-5, atol=1e-6)
    assert np.all(out[n:] == SENTINEL)


@each_set
@pytest.mark.parametrize("dim", [1, 10, 16, 32, 64, 80, 100])
@pytest.mark.parametrize("rows", [1, 16, 128])
def test_scan(isa: str, dim: int, rows: int) -> None:
    """The state-space recurrence of a head, over tokens in calls of any length."""
    tokens = 70
    x, b, c = normal(tokens, dim), normal(tokens, rows, seed=1), normal(tokens, rows, seed=2)
    dt, before = 2 * normal(tokens, seed=3), normal(rows, dim, seed=4)
    dt[3], dt[5] = 30.0, -30.0  # softplus of a large and of a small number
    a, bias, skip = -0.7, 0.3, 1.5
    state, expected = before.astype(np.float64), np.empty((tokens, dim))
    for t in range(tokens):
        step = np.logaddexp(0.0, float(dt[t]) + bias)
        state = np.exp(step * a) * state + np.outer(b[t], step * x[t].astype(np.float64))
        expected[t] = c[t] @ state + skip * x[t]
    factors = np.array([a, bias, skip], np.float32)
    results = []
    for piece in (tokens, 1, 33):
        out, held = guarded(tokens, dim), np.concatenate([before, np.full((1, dim), SENTINEL, np.float32)])
        cpu.scan(isa, x, b, c, dt, factors, piece, held, out)
        results.append((inside(out, tokens, dim).tobytes(), held.tobytes()))
        scale = np.abs(expected).max()
        np.testing.assert_allclose(inside(out, tokens, dim), expected, atol=3e-6 * scale)
        np.testing.assert_allclose(held[:rows], state, atol=3e-6 * np.abs(state).max())
        assert np.all(held[rows:] == SENTINEL)
    assert results[1:] == results[:-1]


@each_set
@pytest.mark.parametrize("neox", [False, True])
def test_rope_turns_pairs_and_leaves_the_rest(isa: str, neox: bool) -> None:
    head, angle = normal(80), np.linspace(0.0, 9.0, 32)
    cos_sin = np.concatenate([np.cos(angle), np.sin(angle)]).astype(np.float32)
    pairs = np.stack([head[:32], head[32:64]]) if neox else head[:64].reshape(32, 2).T
    z = (pairs[0] + 1j * pairs[1]) * np.exp(1j * angle)
    expected = np.concatenate([z.real, z.imag]) if neox else np.stack([z.real, z.imag], 1).reshape(-1)
    out = head.copy()
    cpu.rope(isa, out, cos_sin, neox)
    np.testing.assert_allclose(out[:64], expected, atol=1e-6)
    np.testing.assert_array_equal(out[64:], head[64:])


@each_set
@pytest.mark.parametrize("n", [3, 32, 100])
def test_gate_of_a_head(isa: str, n: int) -> None:
    x, gate = np.full(n + 4, SENTINEL, np.float32), normal(n, seed=1) * np.float32(4)
    x[:n] = normal(n)
    gate[:2] = -100.0, 100.0
    expected = x[:n] / (1 + np.exp(-gate.astype(np.float64)))
    cpu.apply_gate(isa, gate, x)
    np.testing.assert_allclose(x[:n], expected, rtol=1e-5, atol=1e-6)
    assert np.all(x[n:] == SENTINEL)


@each_set
@pytest.mark.parametrize("keys", [1, 7, 20, 128])
@pytest.mark.parametrize("columns", [1, 5, 32])
def test_delta_rule(isa: str, keys: int, columns: int) -> None:
    """Three tokens, one after the other; columns that are not there stay zero."""
    state, out = np.zeros((keys, 32), np.float32), np.full(36, SENTINEL, np.float32)
    state[:, :columns] = normal(keys, columns)
    expected = state[:, :columns].astype(np.float64)
    for t, (decay, beta) in enumerate([(0.9, 0.7), (0.01, 1.0), (1.0, 0.0)]):
        q, k, v = normal(keys, seed=t), normal(keys, seed=t + 3), normal(columns, seed=t + 6)
        k /= np.float32(np.linalg.norm(k))
        cpu.delta_rule(isa, q, k, v, decay, beta, state, out)
        expected = decay * expected
        expected = expected + np.outer(k, beta * (v - k @ expected))
        np.testing.assert_allclose(out[:columns], q @ expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(state[:, :columns], expected, rtol=1e-5, atol=1e-5)
        assert np.all(state[:, columns:] == 0)
        assert np.all(out[columns:] == SENTINEL)


@each_set
@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("n", [3, 32, 100])
def test_gated_activation(isa: str, gelu: bool, n: int) -> None:
    gate, up = normal(n) * np.float32(4), normal(n, seed=1)
    gate[:3] = (-100.0, 100.0, 0.0)
    g = gate.astype(np.float64)
    if gelu:
        activated = 0.5 * g * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3)))
    else:
        activated = g / (1 + np.exp(-g))
    out = np.full(n + 4, SENTINEL, np.float32)
    out[:n] = np.nan
    cpu.gated(isa, gate, up, int(gelu), out)
    np.testing.assert_allclose(out[:n], activated * up, rtol=2e-6, atol=1e-6)
    assert np.all(out[n:] == SENTINEL)


@each_set
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_erf"])
def test_activations_are_exact_to_a_few_roundings_for_numbers_of_every_size(
    isa: str, activation: str
) -> None:
    sizes = np.concatenate([np.linspace(0, 30, 4001), np.geomspace(1e-9, 1e30, 400)])
    x = np.concatenate([sizes, -sizes]).astype(np.float32)
    wide = x.astype(np.float64)
    with np.errstate(over="ignore"):
        if activation == "silu":
            share = 1 / (1 + np.exp(-wide))
        elif activation == "gelu":
            share = 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)))
        else:
            share = 0.5 * np.array([math.erfc(-value / math.sqrt(2)) for value in wide])
    out = np.empty_like(x)
    cpu.gated(isa, x, np.ones_like(x), ["silu", "gelu", "gelu_erf"].index(activation), out)
    # 7.1.26 of Abramowitz and Stegun, which most sets take for erf, is within 1.5e-7.
    assert np.all(np.abs(out - wide * share) <= 4e-7 * np.maximum(1, np.abs(wide * share)))
    bad = np.array([np.nan, np.inf, 1.0], np.float32)
    result = np.empty_like(bad)
    cpu.gated(isa, bad, np.ones_like(bad), 0, result)
    assert np.isnan(result[0])
    assert result[1] == np.inf
    assert np.isfinite(result[2])


@each_set
@pytest.mark.parametrize("columns", [1, 7, 16, 31, 32])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("add", [False, True])
def test_products_reach_their_columns_with_a_bias_and_added(
    isa: str, columns: int, biased: bool, add: bool
) -> None:
    products, bias = normal(5, 32), normal(32, seed=1) if biased else np.zeros(32, np.float32)
    before = normal(5, columns, seed=2)
    out = guarded(5, columns)
    out[:5, :columns] = before
    cpu.add_products(isa, products, bias if biased else bias[:0], columns, add, out)
    expected = products[:, :columns] + bias[:columns]
    np.testing.assert_array_equal(inside(out, 5, columns), before + expected if add else expected)


@each_set
def test_sum_exp(isa: str) -> None:
    x = normal(49_153) * np.float32(5)
    expected = np.exp(x.astype(np.float64) - float(x.max())).sum()
    assert cpu.sum_exp(isa, x, float(x.max())) == pytest.approx(expected, rel=1e-6)


@each_set
def test_16_bit_floats_are_converted_exactly(isa: str) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)[:-3]
    out = np.empty(len(bits), np.float32)
    cpu.half_to_float(isa, bits, False, out)
    np.testing.assert_array_equal(out, bits.view(np.float16).astype(np.float32))
    cpu.half_to_float(isa, bits, True, out)
    np.testing.assert_array_equal(out, (bits.astype(np.uint32) << 16).view(np.float32))


def reference_attention(
    q: Floats, keys: Floats, values: Floats, heads: int, window: int, scale: float, both_ways: bool = False
) -> npt.NDArray[np.float64]:
    """Attention in float64, one head and token at a time.

    A bidirectional window has half of its positions before a token and half after it.
    """
    tokens, positions = len(q), len(keys)
    out = np.empty((tokens, heads, values.shape[1]))
    for t in range(tokens):
        end = positions - tokens + t + 1
        begin = max(0, end - window) if window else 0
        if both_ways:
            begin = max(0, end - 1 - window // 2) if window else 0
            end = min(positions, end + window // 2) if window else positions
        for h, head in enumerate(q[t].reshape(heads, -1).astype(np.float64)):
            scores = keys[begin:end].astype(np.float64) @ head * scale
            weights = np.exp(scores - scores.max())
            out[t, h] = weights / weights.sum() @ values[begin:end].astype(np.float64)
    return out.reshape(tokens, -1)


def as_cached(rows: Floats, kv_dtype: str) -> Floats:
    """Values of the numbers that a cache holds, by NumPy and by `gguf`."""
    if kv_dtype == "q8_0":
        blocks = quants.quantize(rows, Type.Q8_0)
        values: Floats = quants.dequantize(blocks, Type.Q8_0).astype(np.float32)
        return values
    return rows.astype({"f16": np.float16, "f32": np.float32}[kv_dtype]).astype(np.float32)


@cache
def attention_case(
    kv_dtype: str, heads: int, key_dim: int, value_dim: int, window: int, both_ways: bool
) -> tuple[Floats, Floats, Floats, npt.NDArray[np.float64]]:
    """Return queries of 37 tokens, keys and values of 203 positions, and attention in float64."""
    q, keys, values = (
        normal(37, heads * key_dim),
        normal(203, key_dim, seed=1),
        normal(203, value_dim, seed=2),
    )
    k, v = as_cached(keys, kv_dtype), as_cached(values, kv_dtype)
    return q, keys, values, reference_attention(q, k, v, heads, window, key_dim**-0.5, both_ways)


ATTENTION_SHAPES = [  # heads of queries, dimensions of keys and values, window, both ways
    (1, 64, 64, 0, False),
    (3, 64, 64, 0, False),
    (8, 32, 32, 0, False),
    (3, 80, 40, 0, False),
    (2, 128, 128, 0, False),
    (1, 32, 96, 0, False),
    (5, 256, 256, 70, False),
    (3, 64, 64, 20, False),
    (4, 48, 16, 130, False),
    (2, 45, 16, 0, False),
    (3, 64, 64, 0, True),
    (3, 64, 64, 20, True),
    (4, 48, 16, 131, True),
]


@each_set
@pytest.mark.parametrize(
    ("kv_dtype", "heads", "key_dim", "value_dim", "window", "both_ways"),
    [
        (kv_dtype, *shape)
        for kv_dtype in ("f16", "f32", "q8_0")
        for shape in ATTENTION_SHAPES
        if kv_dtype != "q8_0" or not (shape[1] % 32 or shape[2] % 32)  # its blocks have 32 dimensions
    ],
)
def test_attention(
    isa: str, kv_dtype: str, heads: int, key_dim: int, value_dim: int, window: int, both_ways: bool
) -> None:
    q, keys, values, expected = attention_case(kv_dtype, heads, key_dim, value_dim, window, both_ways)
    scale = key_dim**-0.5
    single = np.full(expected.shape, np.nan, np.float32)
    for t in range(len(q)):
        cpu.attention(isa, q, keys, values, kv_dtype, window, scale, t, 1, single, both_ways=both_ways)
    error = {"f16": ATTENTION_ERROR[isa], "f32": ATTENTION_ERROR["f32"], "q8_0": Q8_ATTENTION_ERROR}[kv_dtype]
    assert np.abs(single - expected).max() <= error * np.abs(expected).max()
    for first, count in ((0, 32), (16, 16), (32, 5), (3, 7)):
        out = np.full_like(single, SENTINEL)
        cpu.attention(isa, q, keys, values, kv_dtype, window, scale, first, count, out, both_ways=both_ways)
        np.testing.assert_array_equal(out[first : first + count], single[first : first + count])
        assert np.all(np.delete(out, np.s_[first : first + count], axis=0) == SENTINEL)


@each_set
@pytest.mark.parametrize("kv_dtype", ["f16", "f32", "q8_0"])
def test_attention_at_any_last_position_within_a_page(isa: str, kv_dtype: str) -> None:
    """It is followed only by NaN in memory."""
    q, keys, values = normal(1, 96), normal(130, 32, seed=1), normal(130, 32, seed=2)
    error = {"f16": ATTENTION_ERROR[isa], "f32": ATTENTION_ERROR["f32"], "q8_0": Q8_ATTENTION_ERROR}[kv_dtype]
    for n in range(1, len(keys) + 1):
        out = np.full_like(q, np.nan)
        cpu.attention(isa, q, keys[:n], values[:n], kv_dtype, 0, 32**-0.5, 0, 1, out)
        k, v = as_cached(keys[:n], kv_dtype), as_cached(values[:n], kv_dtype)
        expected = reference_attention(q, k, v, 3, 0, 32**-0.5)
        assert np.abs(out - expected).max() <= error * np.abs(values[:n]).max(), n


@each_set
@pytest.mark.parametrize("kv_dtype", ["f16", "f32", "q8_0"])
@pytest.mark.parametrize(
    ("window", "both_ways"), [(0, False), (600, False), (20, False), (0, True), (1200, True)]
)
def test_attention_may_be_computed_split_by_split(
    isa: str, kv_dtype: str, window: int, both_ways: bool
) -> None:
    """Tokens 1,003 to 1,039: the third split begins among them, and a window ends before some splits."""
    q, keys, values = normal(37, 96), normal(1040, 32, seed=1), normal(1040, 64, seed=2)
    k, v = as_cached(keys, kv_dtype), as_cached(values, kv_dtype)
    expected = reference_attention(q, k, v, 3, window, 32**-0.5, both_ways)
    single = np.full(expected.shape, np.nan, np.float32)
    for t in range(len(q)):
        cpu.attention(isa, q, keys, values, kv_dtype, window, 32**-0.5, t, 1, single, both_ways=both_ways)
    error = {"f16": ATTENTION_ERROR[isa], "f32": ATTENTION_ERROR["f32"], "q8_0": Q8_ATTENTION_ERROR}[kv_dtype]
    assert np.abs(single - expected).max() <= error * np.abs(expected).max()
    for first, count, by_splits in (
        (0, 32, False),
        (0, 32, True),
        (17, 8, True),
        (20, 1, True),
        (21, 1, True),
    ):
        out = np.full_like(single, np.nan)
        cpu.attention(
            isa,
            q,
            keys,
            values,
            kv_dtype,
            window,
            32**-0.5,
            first,
            count,
            out,
            both_ways=both_ways,
            by_splits=by_splits,
        )
        np.testing.assert_array_equal(out[first : first + count], single[first : first + count])


@each_set
@pytest.mark.parametrize("loud", [slice(0, 512), slice(512, 1024), slice(1024, 1100)])
def test_a_split_may_have_nearly_all_of_the_weight(isa: str, loud: slice) -> None:
    q, keys, values = normal(4, 64), normal(1100, 64, seed=1), normal(1100, 64, seed=2)
    keys[loud] *= 30
    expected = reference_attention(q, keys, values, 1, 0, 1.0)
    for by_splits in (False, True):
        out = np.full_like(q, np.nan)
        cpu.attention(isa, q, keys, values, "f32", 0, 1.0, 0, 4, out, by_splits=by_splits)
        assert np.abs(out - expected).max() <= 1e-4 * np.abs(expected).max()  # scores are up to 1,000


@each_set
@pytest.mark.parametrize("kv_dtype", ["f16", "f32"])
def test_a_nan_split_makes_the_result_nan(isa: str, kv_dtype: str) -> None:
    q, keys, values = normal(4, 64), normal(1100, 64, seed=1), normal(1100, 64, seed=2)
    keys[512:1024] = np.nan
    for by_splits in (False, True):
        out = np.zeros_like(q)
        cpu.attention(isa, q, keys, values, kv_dtype, 0, 0.125, 0, 4, out, by_splits=by_splits)
        assert np.isnan(out).all()


# Relative to the largest output: float32 throughout, but where products are of bfloat16, whose half unit is
# 2^-9; a weight and its value add up to two of them, and the scores' errors move weights.
ATTENTION_ERROR = dict.fromkeys([*SETS, "f32"], 1e-5) | dict.fromkeys(["avx512bf16", "amx"], 2**-7)


# Queries and weights of the softmax keep 15 bits and their sign there: half a unit is 2^-16 of the largest.
# The errors of a query's dimensions add up in a score, with a deviation of some 2^-15.
Q8_ATTENTION_ERROR = 2**-13


@each_set
def test_attention_is_exact_on_request(isa: str) -> None:
    q, keys, values = normal(70, 192), normal(70, 64, seed=1), normal(70, 64, seed=2)
    keys, values = (a.astype(np.float16).astype(np.float32) for a in (keys, values))
    expected = reference_attention(q, keys, values, 3, 0, 0.125)
    out = np.empty_like(q)
    for first in range(0, 70, 32):
        cpu.attention(isa, q, keys, values, "f16", 0, 0.125, first, min(32, 70 - first), out, exact=True)
    assert np.abs(out - expected).max() <= ATTENTION_ERROR["f32"] * np.abs(expected).max()


@each_set
@pytest.mark.parametrize("key_dim", [45, 48, 80])
def test_padding_of_keys_changes_nothing(isa: str, key_dim: int) -> None:
    """AMX multiplies 32 dimensions at a time. Unwritten memory is NaN here, since 0 * NaN is NaN."""
    q, keys, values = normal(37, 2 * key_dim), normal(203, key_dim, seed=1), normal(203, 16, seed=2)
    plain, filled = np.full((2, 37, 32), SENTINEL)
    cpu.attention(isa, q, keys, values, "f16", 0, 0.125, 0, 32, plain)
    cpu.attention(isa, q, keys, values, "f16", 0, 0.125, 0, 32, filled, key_multiple=32)
    np.testing.assert_array_equal(filled, plain)


@each_set
def test_attention_does_not_see_later_positions(isa: str) -> None:
    q, keys, values = normal(70, 64), normal(70, 64, seed=1), normal(70, 64, seed=2)
    out, changed = np.empty((70, 64), np.float32), np.empty((70, 64), np.float32)
    cpu.attention(isa, q, keys, values, "f16", 0, 0.125, 48, 16, out)
    keys[60:], values[60:] = 1e3, -1e3
    cpu.attention(isa, q, keys, values, "f16", 0, 0.125, 48, 16, changed)
    np.testing.assert_array_equal(out[48:60], changed[48:60])
    assert not np.array_equal(out[60:64], changed[60:64])


@pytest.mark.parametrize("isa", NATIVE_SETS)
def test_products_are_exact_after_limits_were_measured_on_the_thread(isa: str) -> None:
    """Measurements and products of each type release the tiles of AMX for those that follow."""
    x = normal(32, 256)
    q, scale, *_ = cpu.quantize(isa, x, 0)
    for limit in cpu_testing().peaks(isa):
        assert cpu_testing().peak_workload(isa, limit, 1).run(2) > 0
        for kind in (Type.Q4_0, Type.Q6_K):
            raw, values = random_weight(kind, 32, 256)
            out = guarded(32, 32)
            cpu.multiply_int8(isa, int(kind), raw, 32, x, 0, out)
            exact = exact_product(values, q, scale)
            assert np.abs(inside(out, 32, 32) - exact).max() <= 1e-5 * np.abs(exact).max()


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_team_computes_each_item_once_and_phases_in_order(threads: int) -> None:
    phases = [1, 7, 0, 64, 3, 1, 1, 1000, 2, 0]
    jobs = 200
    for items, counts in zip(phases, cpu_testing().run_team(threads, phases, jobs), strict=True):
        assert counts == [jobs] * items
