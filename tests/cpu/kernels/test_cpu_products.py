"""Products of the CPU kernels with quantized and float weights, on every instruction set."""

import platform
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGML_QUANT_SIZES, quants
from gguf import GGMLQuantizationType as Type
from support.kernels.cpu_testing import cpu_testing
from support.kernels.kernel_cases import (
    BATCHES,
    COMMON,
    NATIVE_SETS,
    QUANTIZED,
    SETS,
    Floats,
    batches_of,
    bfloat16,
    computed,
    cpu,
    each_set,
    guarded,
    inside,
    normal,
    random_weight,
    share,
    widened,
)

from metal_prefill import Model, _core, synth

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


def test_scalar_kernels_are_always_available() -> None:
    assert NATIVE_SETS[-1] == "scalar"


def test_the_compiler_omitted_no_kernels() -> None:
    sets = {
        "x86_64": ["amx", "avx512bf16", "avx512vnni", "avxvnni", "avx2"],
        "arm64": ["neon_i8mm", "neon_dotprod", "neon"],
    }
    machine = platform.machine().lower().replace("amd64", "x86_64").replace("aarch64", "arm64")
    assert _core.built_sets() == [*sets.get(machine, []), "scalar"]


def test_bfloat16_pairs_are_preferred_if_faster_than_float32() -> None:
    sets, speedup = _core.kernel_sets(), _core.pair_speedup()
    assert (speedup > 0) == ("avx512bf16" in sets)
    if "avx512bf16" in sets:
        assert (sets.index("avx512bf16") < sets.index("avx512vnni")) == (speedup >= 1.5)
        assert speedup == _core.pair_speedup()  # measured once


@each_set
def test_activations_are_quantized_to_the_nearest_step_of_their_block(isa: str) -> None:
    x = normal(21, 96) * np.float32(3.0)
    x[4, 32:64] = 0
    x[5, :32] *= np.float32(1e-30)
    q, scale, scaled_sum, start, start_half = cpu.quantize(isa, x, 3)
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
def test_nan_and_infinity_survive_quantization(isa: str) -> None:
    x = normal(9, 512)
    for bad in (np.nan, np.inf, -np.inf):
        x[:, 40] = bad
        for kind in (Type.Q8_0, Type.Q4_K, Type.Q6_K):
            raw, _ = random_weight(kind, 32, 512)
            for tokens in (1, 9):
                out = guarded(tokens, 32)
                cpu.multiply_int8(isa, int(kind), raw, 32, x[:tokens], 0, out)
                assert not np.isfinite(out[:tokens, :32]).any()
        _, scale, *_ = cpu.quantize(isa, x, 0)
        assert np.isfinite(scale[0, 0])


# On AMX, activations that these types multiply share a scale and a zero in a super-block of 256 columns.
INTEGER_SCALES = [
    kind for kind in QUANTIZED if GGML_QUANT_SIZES[kind][0] == 256 and kind not in (Type.TQ1_0, Type.TQ2_0)
]


def rounded(isa: str, kind: Type, x: Floats) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Activations as a set rounds them for a type: steps from zero, and a scale for each 32 columns."""
    if isa != "amx" or kind not in INTEGER_SCALES:
        q, scale, *_ = cpu.quantize(isa, x, 0)
        return q, scale
    blocks = x.reshape(len(x), -1, 256)
    lowest = np.minimum(blocks.min(-1, keepdims=True), 0)
    span = np.maximum(blocks.max(-1, keepdims=True), 0) - lowest
    inverse = np.divide(np.float32(255), span, where=span > 0, out=np.zeros_like(span))
    lowest_step = np.rint(lowest * inverse)
    steps = np.minimum(np.rint(blocks * inverse), lowest_step + 255)
    scale = np.repeat(span / np.float32(255), 8, axis=1)[..., 0]
    return steps.reshape(x.shape).astype(np.float64), scale.astype(np.float64)


def exact_product(
    values: Floats, q: npt.NDArray[np.float64], scale: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Product in float64 of dequantized weights and quantized activations."""
    tokens, cols = q.shape
    x = q.reshape(tokens, -1, 32) * scale[..., None]
    return x.reshape(tokens, cols) @ values.astype(np.float64).T


@each_set
def test_the_quantized_product_is_exact(isa: str) -> None:
    cases = [(kind, cols) for kind in QUANTIZED for cols in ((64, 576) if kind in COMMON else (768,))]
    for kind, columns in (*cases, (Type.Q4_0, 2048)):
        block = GGML_QUANT_SIZES[kind][0]
        cols = -(-columns // block) * block
        rows = 70  # two groups of 32, and 6 rows of a third
        raw, values = random_weight(kind, rows, cols)
        x = normal(33, cols, seed=1)
        x[7, :256] = 0
        x[8, :2] = -127.5, 127.5  # in a super-block both are in the middle between two steps
        expected = exact_product(values, *rounded(isa, kind, x))
        actual = computed("multiply_int8", isa, kind, raw, rows, x, 0)
        np.testing.assert_array_equal(actual[:, rows:], 0)  # the group is filled up with zeros
        # Integer sums are exact; the remaining error is float32 rounding, once per block of activations.
        assert np.abs(actual[:, :rows] - expected).max() <= 2e-6 * np.abs(expected).max(), (kind.name, cols)


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


def test_packed_weights_of_most_types_are_at_most_5_percent_larger_than_in_the_file(tmp_path: Path) -> None:
    shape: Any = {"preset": "tiny", "dim": 256, "head_dim": 64, "ffn": 512}
    for kind in QUANTIZED:
        path = synth.synthesize(tmp_path / f"{kind.name}.gguf", tensor_type=kind.name, **shape)
        with Model(path, device="cpu", threads=1) as model:
            tensors = model.gguf.tensors.values()
            in_layers, in_head = (
                sum(tensor.nbytes for tensor in tensors if tensor.type_name == name)
                for name in (kind.name, "Q8_0" if kind is not Type.Q8_0 else "")
            )
            packed = model.stats()["weight_bytes"] - in_head
        assert 0 < packed <= MOST_OF_THE_FILE.get(kind, 1.05) * in_layers, kind.name


@each_set
def test_integer_sums_are_exact_at_the_extremes(isa: str) -> None:
    """Codes and activations at the ends of their ranges have the largest sums that can occur."""
    for (kind, codes), code in product(EXTREME_CODES.items(), (0x00, 0xFF, 0x80, 0x7F)):
        raw = random_weight(kind, 32, 256)[0].copy()
        blocks = raw.reshape(-1, GGML_QUANT_SIZES[kind][1])
        blocks[:, codes] = code
        values = quants.dequantize(blocks, kind).reshape(32, 256)
        for sign in (1, -1):
            x = np.full((17, 256), sign, np.float32)
            q, scale = rounded(isa, kind, x)
            assert np.all(q == sign * (255 if isa == "amx" and kind in INTEGER_SCALES else 127))
            expected = exact_product(values, q, scale)
            error = np.abs(computed("multiply_int8", isa, kind, raw, 32, x, 0) - expected).max()
            assert error <= 2e-6 * np.abs(values).max() * 256, kind.name


@each_set
def test_product_of_a_token_does_not_depend_on_the_batch(isa: str) -> None:
    for kind in share(isa, QUANTIZED):
        cols = 512
        raw, _ = random_weight(kind, 64, cols)
        # With many tokens, the other types multiply the same wide blocks; they differ in products of a few.
        batches = batches_of(isa) if kind in (*COMMON, *INTEGER_SCALES) else (*BATCHES[:7], 17, 33)
        # 37 different tokens, repeated: a prime, so that no two tiles of a batch start with the same one.
        tokens = normal(37, cols)
        alone = np.concatenate([computed("multiply_int8", isa, kind, raw, 64, x, 0) for x in tokens[:, None]])
        x, single = (np.resize(rows, (batches[-1], rows.shape[1])) for rows in (tokens, alone))
        for batch in batches:
            for first in (0, 5) if batch <= 33 else (5,):
                actual = computed("multiply_int8", isa, kind, raw, 64, x[:batch], first)
                np.testing.assert_array_equal(actual, single[:batch], err_msg=f"batch {batch} at {first}")


def test_quantized_products_are_bit_identical_on_all_sets_with_fma() -> None:
    """AVX2, AVX-512, AMX and NEON run the same float operations in the same order."""
    raw, _ = random_weight(Type.Q4_0, 64, 576)
    x = normal(40, 576)
    sets = [isa for isa in SETS if isa != "scalar"]
    results = [computed("multiply_int8", isa, Type.Q4_0, raw, 64, x, 0) for isa in sets]
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


@pytest.mark.parametrize("name", ["multiply_float", "multiply_float_panels"])
@each_set
def test_float_products_agree_with_float64(isa: str, name: str) -> None:
    for cols in share(isa, [80, 100, 2048]):
        padded = (cols + 15) // 16 * 16
        weight, x = np.zeros((32, padded), np.float32), np.zeros((512, padded), np.float32)
        weight[:, :cols], x[:, :cols] = normal(32, cols), normal(512, cols, seed=1)
        expected = x.astype(np.float64) @ weight.astype(np.float64).T
        single = None
        for batch in reversed(batches_of(isa)):
            out = guarded(batch, 32)
            getattr(cpu, name)(isa, weight, cols, x[:batch], out)
            actual = inside(out, batch, 32)
            assert np.abs(actual - expected[:batch]).max() <= 1e-6 * np.abs(expected).max()
            single = actual if single is None else single
            np.testing.assert_array_equal(actual, single[:batch], err_msg=f"batch {batch}")


@each_set
def test_products_of_few_tokens_with_16_bit_weights_are_bit_identical_to_those_of_many(isa: str) -> None:
    for kind in [Type.F16, Type.BF16]:
        weight, x = normal(32, 592), normal(9, 592, seed=1)
        bits = bfloat16(weight) if kind == Type.BF16 else weight.astype(np.float16).view(np.uint16)
        expanded = widened(bits) if kind == Type.BF16 else weight.astype(np.float16).astype(np.float32)
        many = guarded(9, 32)
        cpu.multiply_float(isa, expanded, 592, x, many)
        for count in range(1, 10):
            out = guarded(count, 32)
            cpu.multiply_half(isa, bits.reshape(-1), kind == Type.BF16, x[:count], out)
            np.testing.assert_array_equal(inside(out, count, 32), inside(many, 9, 32)[:count])


@each_set
def test_products_reach_their_columns_with_a_bias_and_added(isa: str) -> None:
    products = normal(5, 32)
    for columns, biased, add in product((1, 7, 16, 31, 32), (False, True), (False, True)):
        bias = normal(32, seed=1) if biased else np.zeros(32, np.float32)
        before = normal(5, columns, seed=2)
        out = guarded(5, columns)
        out[:5, :columns] = before
        cpu.add_products(isa, products, bias if biased else bias[:0], columns, add, out)
        expected = products[:, :columns] + bias[:columns]
        np.testing.assert_array_equal(inside(out, 5, columns), before + expected if add else expected)


@pytest.mark.parametrize("isa", NATIVE_SETS)
def test_products_are_exact_after_limits_were_measured_on_the_thread(isa: str) -> None:
    """Measurements and products of each type release the tiles of AMX for those that follow."""
    x = normal(32, 256)
    for limit in cpu_testing().peaks(isa):
        assert cpu_testing().peak_workload(isa, limit, 1).run(2) > 0
        for kind in (Type.Q4_0, Type.Q6_K):
            raw, values = random_weight(kind, 32, 256)
            exact = exact_product(values, *rounded(isa, kind, x))
            actual = computed("multiply_int8", isa, kind, raw, 32, x, 0)
            assert np.abs(actual - exact).max() <= 1e-5 * np.abs(exact).max()


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_team_computes_each_item_once_and_phases_in_order(threads: int) -> None:
    phases = [1, 7, 0, 64, 3, 1, 1, 1000, 2, 0]
    jobs = 200
    for items, counts in zip(phases, cpu_testing().run_team(threads, phases, jobs), strict=True):
        assert counts == [jobs] * items
