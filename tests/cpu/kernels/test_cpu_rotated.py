"""Products of rotated rows in 8 bits on every instruction set, and in 16 bits on those that have them."""

from itertools import product

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Type
from support.kernel_cases import (
    BATCHES,
    NATIVE_SETS,
    QUANTIZED,
    SETS,
    Floats,
    cpu,
    each_set,
    guarded,
    inside,
    normal,
    random_weight,
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


def exactly_rotated(x: Floats) -> npt.NDArray[np.float64]:
    """Rotate blocks of 64 columns, and the powers of two that the rest adds up to, in float64."""
    blocks, at = [], 0
    while at < x.shape[1]:
        size = min(64, 1 << (x.shape[1] - at).bit_length() - 1)
        blocks.append(x[:, at : at + size].astype(np.float64) @ hadamard(size))
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


def read_by(isa: str, wide: bool) -> list[Type]:
    """Return the types whose weights a form reads: one function reads those of all forms."""
    return [Type.BF16, *QUANTIZED] if isa == SETS[0] and not wide else [Type.Q4_0]


def product_of(weight: tuple[Codes, Floats], x: tuple[Codes, Floats]) -> Floats:
    """Return integer sums in int64 times scales in float32, in the order of the kernels."""
    sums = x[0].astype(np.int64) @ weight[0].astype(np.int64).T
    scaled: Floats = sums.astype(np.float32) * (weight[1] * x[1][:, None])
    return scaled


@each_set
def test_the_product_of_rotated_rows_is_exact_and_the_same_for_any_tile(isa: str) -> None:
    for wide in forms(isa):
        rows = 70
        for kind, cols in [
            (Type.F32, 32),
            (Type.F32, 80),
            (Type.F32, 576),
            *((k, 512) for k in read_by(isa, wide)),
        ]:
            if kind in QUANTIZED:
                raw, values = random_weight(kind, rows, cols)
            else:
                values = normal(rows, cols)
                raw = values.view(np.uint8).reshape(-1)
                if kind == Type.BF16:  # truncated
                    raw = np.ascontiguousarray(values.view(np.uint16).reshape(-1, 2)[:, 1]).view(np.uint8)
                    values = (values.view(np.uint32) & 0xFFFF0000).view(np.float32)
            x = normal(70, cols, seed=1)
            expected = product_of(rotated(isa, np.ascontiguousarray(values), wide), rotated(isa, x, wide))
            for batch in [n for n in BATCHES if n <= 33] + [70]:
                for first in (0, 3):
                    out = guarded(batch, 96)
                    cpu.multiply_rotated(isa, int(kind), raw, rows, x[:batch], first, wide, -1, out)
                    actual = inside(out, batch, 96)
                    case = f"wide: {wide}, {kind.name}, {cols} columns, batch {batch} at {first}"
                    np.testing.assert_array_equal(actual[:, :rows], expected[:batch], err_msg=case)
                    np.testing.assert_array_equal(actual[:, rows:], 0, err_msg=case)


@each_set
def test_the_activation_of_a_product_is_that_of_its_values(isa: str) -> None:
    rows, cols = 128, 128
    raw, x = normal(rows, cols).view(np.uint8).reshape(-1), normal(70, cols, seed=1)
    for wide, kind in product(forms(isa), range(5)):
        outs = []
        for activation in (-1, kind):
            out = guarded(70, rows)
            cpu.multiply_rotated(isa, int(Type.F32), raw, rows, x, 0, wide, activation, out)
            outs.append(np.ascontiguousarray(inside(out, 70, rows)))
        expected = np.empty(70 * rows, np.float32)
        factor = 0 if kind == 4 else 1  # the clamped one adds 1
        cpu.gated(isa, outs[0].reshape(-1), np.full_like(expected, factor), kind, expected)
        case = f"wide: {wide}, activation {kind}"
        np.testing.assert_array_equal(outs[1].reshape(-1), expected, err_msg=case)


@each_set
def test_the_largest_sums_do_not_overflow(isa: str) -> None:
    for wide in forms(isa):
        for sign, cols in product((1, -1), (64, 1 << 17)):
            x = np.zeros((20, cols), np.float32)
            x[:, ::64] = 1  # all columns of a block are equal after the rotation
            weight = np.ascontiguousarray(x[:1]) * np.float32(sign)
            out = guarded(20, 32)
            cpu.multiply_rotated(
                isa, int(Type.F32), weight.view(np.uint8).reshape(-1), 1, x, 0, wide, -1, out
            )
            np.testing.assert_allclose(
                inside(out, 20, 32)[:, 0], sign * cols / 64, rtol=1e-6, err_msg=f"wide: {wide}"
            )
