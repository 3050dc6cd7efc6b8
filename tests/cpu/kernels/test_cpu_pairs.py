"""Products of pairs of bfloat16 numbers, on the instruction sets that have them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType as Type
from support.kernel_cases import (
    BATCHES,
    NATIVE_SETS,
    QUANTIZED,
    Floats,
    bfloat16,
    cpu,
    guarded,
    inside,
    normal,
    random_weight,
    widened,
)

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
def test_weights_are_rounded_to_the_nearest_bfloat16(isa: str) -> None:
    rows = 70
    for kind in (*FLOATS, *QUANTIZED):
        if kind in FLOATS:
            cols = 100
            exact = widened(bfloat16(normal(rows, cols))) if kind == Type.BF16 else normal(rows, cols)
            raw = file_bytes(kind, exact)
            exact = exact.astype(np.float16).astype(np.float32) if kind == Type.F16 else exact
        else:
            cols = 256
            raw, exact = random_weight(kind, rows, cols)
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
