"""Products of rotated rows in 8 and 16 bits, and of pairs of bfloat16 numbers, on every instruction set."""

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType as Type
from support.kernels.kernel_cases import (
    BATCHES,
    NATIVE_SETS,
    QUANTIZED,
    SETS,
    Floats,
    bfloat16,
    computed,
    cpu,
    each_set,
    guarded,
    normal,
    random_weight,
    widened,
)

Codes = npt.NDArray[np.int8 | np.int16]
WIDE_SETS = [isa for isa in NATIVE_SETS if isa.startswith("a")]  # avx2 to amx


def forms(isa: str) -> tuple[bool, ...]:
    """Return for each form of a set whether its codes have 16 bits."""
    return (False, True) if isa in WIDE_SETS else (False,)


def filled_up(cols: int) -> int:
    return -(-cols // 64) * 64


def most(cols: int, wide: bool) -> int:
    """Return the largest code: in 16 bits, sums of its squares over all columns fit 32 bits."""
    return min(int(np.sqrt((2**31 - 1) / filled_up(cols))), 32767) if wide else 127


def rotated(isa: str, x: Floats, wide: bool) -> tuple[Codes, Floats]:
    """Return codes [rows, cols filled up to 64] and scales [rows] as products take them."""
    codes = np.full((len(x), filled_up(x.shape[1])), 99, np.int16 if wide else np.int8)
    scales = np.full(len(x), np.nan, np.float32)
    cpu.rotate(isa, x, wide, codes.view(np.int8), scales)
    return codes, scales


def hadamard(size: int) -> npt.NDArray[np.float64]:
    """Return an orthogonal matrix of Hadamard."""
    matrix: npt.NDArray[np.float64] = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    matrix /= np.sqrt(size)
    return matrix


def rotation(size: int) -> npt.NDArray[np.float64]:
    """Return the matrix that rotates a block of columns.

    A block of 64 is four quarters of 16. Quarters are reflected, three times, and column c of quarter q
    comes from column ``c ^ q`` after the first time and ``c ^ 4 * q`` after the second.
    """
    if size < 64:
        return hadamard(size)
    mixed = np.kron(np.full((4, 4), 0.5) - np.eye(4), np.eye(16))
    moves = [np.eye(64)[:, [16 * q + (c ^ step * q) for q in range(4) for c in range(16)]] for step in (1, 4)]
    return mixed @ moves[0] @ mixed @ moves[1] @ mixed


def test_each_value_of_a_block_spreads_over_all_columns() -> None:
    np.testing.assert_allclose(np.abs(rotation(64)), 1 / 8, rtol=1e-12)
    np.testing.assert_allclose(rotation(64) @ rotation(64).T, np.eye(64), atol=1e-12)


def exactly_rotated(x: Floats) -> npt.NDArray[np.float64]:
    """Rotate blocks of 64 columns, and the powers of two that the rest adds up to, in float64."""
    blocks, at = [], 0
    while at < x.shape[1]:
        size = min(64, 1 << (x.shape[1] - at).bit_length() - 1)
        blocks.append(x[:, at : at + size].astype(np.float64) @ rotation(size))
        at += size
    return np.concatenate(blocks, axis=1)


@each_set
def test_rows_are_rotated_and_rounded(isa: str) -> None:
    for wide in forms(isa):
        for cols in (1, 7, 80, 100, 127, 576):
            x = normal(5, cols)
            x[1, cols // 2] = x[3, -1] = 30  # as some channels of real models
            x[2] = 0
            codes, scales = rotated(isa, x, wide)
            exact, largest = exactly_rotated(x), most(cols, wide)
            np.testing.assert_allclose(
                scales, np.abs(exact).max(axis=1) / largest, rtol=1e-6, err_msg=f"wide: {wide}"
            )
            unit = np.where(scales > 0, scales, 1).astype(np.float64)[:, None]
            # Sums of 64 values in float32 err by less than 2^-17 of the largest.
            assert np.all(np.abs(codes[:, :cols] - exact / unit) <= 0.5 + largest * 2.0**-17), (wide, cols)
            assert np.all(np.abs(codes[[0, 1, 3, 4]]).max(axis=1) == largest), (wide, cols)
            assert np.all(codes[:, cols:] == 0), (wide, cols)


@each_set
def test_all_sets_rotate_to_the_same_bits(isa: str) -> None:
    for wide in forms(isa):
        x = normal(40, 1000, seed=3) * np.exp(normal(40, 1, seed=4) * 20)
        first = WIDE_SETS[-1] if wide else "scalar"
        for actual, expected in zip(rotated(isa, x, wide), rotated(first, x, wide), strict=True):
            np.testing.assert_array_equal(actual, expected, err_msg=f"wide: {wide}")


@each_set
def test_tiny_rows_vanish_and_bad_values_reach_every_result(isa: str) -> None:
    for wide in forms(isa):
        x = np.stack([np.full(64, 1e-39), [np.nan] * 64, [np.inf] * 64, normal(64)]).astype(np.float32)
        x[1, 1:] = 0
        codes, scales = rotated(isa, x, wide)
        assert scales[0] == 0, wide
        assert np.all(codes[0] == 0), wide
        assert not np.isfinite(scales[1:3]).any(), wide
        weight = normal(32, 64)
        out = guarded(4, 32)
        cpu.multiply_rotated(isa, int(Type.F32), weight.view(np.uint8).reshape(-1), 32, x, 0, wide, -1, out)
        assert np.all(out[0, :32] == 0), wide
        assert not np.isfinite(out[1:3, :32]).any(), wide
        assert np.isfinite(out[3, :32]).all(), wide


FLOATS = [Type.F32, Type.F16, Type.BF16]


def file_bytes(kind: Type, weight: Floats) -> npt.NDArray[np.uint8]:
    as_stored: dict[Type, Callable[[Floats], npt.NDArray[Any]]] = {
        Type.BF16: bfloat16,
        Type.F16: lambda x: x.astype(np.float16),
        Type.F32: lambda x: x,
    }
    return as_stored[kind](weight).reshape(-1).view(np.uint8)


def stored_weight(kind: Type, rows: int, cols: int) -> tuple[npt.NDArray[np.uint8], Floats]:
    """Return the bytes of random weights of any type in a file, and their values."""
    if kind in QUANTIZED:
        return random_weight(kind, rows, cols)
    exact = normal(rows, cols)
    rounded = {Type.F16: exact.astype(np.float16).astype(np.float32), Type.BF16: widened(bfloat16(exact))}
    values = rounded.get(kind, exact)
    return file_bytes(kind, values), values


def product_of(weight: tuple[Codes, Floats], x: tuple[Codes, Floats]) -> Floats:
    """Return integer sums in int64 times scales in float32, in the order of the kernels."""
    sums = x[0].astype(np.int64) @ weight[0].astype(np.int64).T
    return sums.astype(np.float32) * (weight[1] * x[1][:, None])


@each_set
def test_the_product_of_rotated_rows_is_exact_and_the_same_for_any_tile(isa: str) -> None:
    for wide in forms(isa):
        rows = 70
        # One function reads weights for all forms.
        others = [Type.BF16, *QUANTIZED] if isa == SETS[0] and not wide else [Type.Q4_0]
        for kind, cols in (*product([Type.F32], (32, 80, 576)), *product(others, [512])):
            raw, values = stored_weight(kind, rows, cols)
            x = normal(70, cols, seed=1)
            expected = product_of(rotated(isa, np.ascontiguousarray(values), wide), rotated(isa, x, wide))
            for batch in [n for n in BATCHES if n <= 33] + [70]:
                for first in (0, 3):
                    actual = computed("multiply_rotated", isa, kind, raw, rows, x[:batch], first, wide, -1)
                    case = f"wide: {wide}, {kind.name}, {cols} columns, batch {batch} at {first}"
                    np.testing.assert_array_equal(actual[:, :rows], expected[:batch], err_msg=case)
                    np.testing.assert_array_equal(actual[:, rows:], 0, err_msg=case)


@each_set
def test_products_of_the_largest_codes_are_exact(isa: str) -> None:
    # AVX2 adds products of neighbouring columns in 16 bits, and divides codes that add up to more than 128.
    chosen = np.array([-127, -65, -64, -63, 0, 1, 63, 64, 65, 127])
    codes = np.random.default_rng(2).choice(chosen, (70, 256))
    codes[:, ::64] = 127
    x = np.ascontiguousarray(codes.reshape(70, 4, 64) @ rotation(64).T, np.float32).reshape(70, 256)
    found = rotated(isa, x, False)
    np.testing.assert_array_equal(found[0], codes)
    raw = x.view(np.uint8).reshape(-1)
    for batch in (1, 2, 7, 70):
        actual = computed("multiply_rotated", isa, Type.F32, raw, 70, x[:batch], 0, False, -1)
        expected = product_of(found, (found[0][:batch], found[1][:batch]))
        np.testing.assert_array_equal(actual[:, :70], expected)


@each_set
def test_the_activation_of_a_product_is_that_of_its_values(isa: str) -> None:
    rows, cols = 128, 128
    raw, x = normal(rows, cols).view(np.uint8).reshape(-1), normal(70, cols, seed=1)
    for wide, kind in product(forms(isa), range(5)):
        outs = [
            np.ascontiguousarray(computed("multiply_rotated", isa, Type.F32, raw, rows, x, 0, wide, a))
            for a in (-1, kind)
        ]
        expected = np.empty(70 * rows, np.float32)
        factor = 0 if kind == 4 else 1  # the clamped one adds 1
        cpu.gated(isa, outs[0].reshape(-1), np.full_like(expected, factor), kind, expected)
        case = f"wide: {wide}, activation {kind}"
        np.testing.assert_array_equal(outs[1].reshape(-1), expected, err_msg=case)


@each_set
def test_the_largest_sums_do_not_overflow(isa: str) -> None:
    tokens = 20 if isa in NATIVE_SETS else 5  # a tile and a part, or on an emulated processor a part alone
    for wide in forms(isa):
        for sign, cols in product((1, -1), (64, 1 << 17)):
            x = np.zeros((tokens, cols), np.float32)
            x[:, ::64] = 1  # all columns of a block are as large after the rotation
            raw = (x[0] * np.float32(sign)).view(np.uint8)
            actual = computed("multiply_rotated", isa, Type.F32, raw, 1, x, 0, wide, -1)
            np.testing.assert_allclose(actual[:, 0], sign * cols / 64, rtol=1e-6, err_msg=f"wide: {wide}")


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


def paired_weights(isa: str, kind: Type, raw: npt.NDArray[np.uint8], rows: int, cols: int) -> Floats:
    """Return weights as products of pairs take them: the products of an identity matrix."""
    return computed("multiply_pairs", isa, kind, raw, rows, np.eye(cols, dtype=np.float32), 0).T


@each_pair_set
def test_weights_are_rounded_to_the_nearest_bfloat16(isa: str) -> None:
    rows = 70
    for kind in (*FLOATS, *QUANTIZED):
        cols = 100 if kind in FLOATS else 256
        raw, exact = stored_weight(kind, rows, cols)
        weights = paired_weights(isa, kind, raw, rows, cols)
        assert np.all(weights[:rows].view(np.uint32) & 0xFFFF == 0), kind.name
        if kind in FLOATS:
            np.testing.assert_array_equal(weights[:rows], widened(bfloat16(exact)), err_msg=kind.name)
        half_unit = np.ldexp(1.0, np.frexp(exact)[1] - 9)  # of eight significant bits
        # Scales times codes are rounded to float32 first, by one step more or less than in `gguf`.
        error = np.abs(weights[:rows] - exact.astype(np.float64))
        assert np.all(error <= half_unit * (1 + 2.0**-12)), kind.name
        np.testing.assert_array_equal(weights[rows:], 0)  # the group is filled up with zeros


@each_pair_set
@pytest.mark.parametrize(
    ("kind", "cols"),
    [*((Type.BF16, cols) for cols in (32, 80, 576, 2048)), (Type.Q4_0, 576), (Type.Q6_K, 512)],
    ids=lambda value: value.name if isinstance(value, Type) else str(value),
)
def test_the_product_of_pairs_is_that_of_rounded_numbers(isa: str, kind: Type, cols: int) -> None:
    raw, _ = stored_weight(kind, 32, cols)
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
            actual = computed("multiply_pairs", isa, kind, raw, 32, x[:batch], first)
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
    actual = computed("multiply_pairs", "amx", Type.BF16, file_bytes(Type.BF16, weight), 32, x, 0)
    np.testing.assert_array_equal(actual, sums)


@each_pair_set
def test_products_of_pairs_flush_subnormal_numbers(isa: str) -> None:
    weight, x = np.full((32, 32), 2.0**-70, np.float32), np.full((2, 32), 2.0**-60, np.float32)
    x[1] = 2.0**-50
    actual = computed("multiply_pairs", isa, Type.BF16, file_bytes(Type.BF16, weight), 32, x, 0)
    np.testing.assert_array_equal(actual[0], 0)
    np.testing.assert_array_equal(actual[1], np.float32(2.0**-115))


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
