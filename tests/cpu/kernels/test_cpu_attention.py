"""Attention of the CPU kernels, on every instruction set."""

from functools import cache
from itertools import product, repeat
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Type
from gguf import quants
from support.kernels.float64 import attention, visible
from support.kernels.kernel_cases import SENTINEL, SETS, Floats, cpu, each_set, normal, share

from metal_prefill._support.choices import KV_DTYPES


def reference_attention(
    q: Floats,
    keys: Floats,
    values: Floats,
    heads: int,
    window: int,
    scale: float,
    both_ways: bool = False,
    sinks: Floats | None = None,
) -> npt.NDArray[np.float64]:
    """Return attention of the last positions in float64."""
    distance = np.arange(len(keys))[-len(q) :, None] - np.arange(len(keys))
    hidden = np.where(visible(distance, window, causal=not both_ways), 0.0, -np.inf)
    inputs = zip((q, keys, values), (heads, 1, 1), strict=True)
    wide_q, k, v = (x.astype(np.float64).reshape(len(x), count, -1) for x, count in inputs)
    return attention(wide_q, k, v, scale, repeat(hidden), sinks=sinks).reshape(len(q), -1)


def as_cached(rows: Floats, kv_dtype: str) -> Floats:
    """Values of the numbers that a cache holds, by NumPy and by `gguf`."""
    if kv_dtype == "q8_0":
        blocks = quants.quantize(rows, Type.Q8_0)
        return quants.dequantize(blocks, Type.Q8_0).astype(np.float32)
    return rows.astype({"f16": np.float16, "f32": np.float32}[kv_dtype]).astype(np.float32)


Case = tuple[Floats, Floats, Floats, npt.NDArray[np.float64]]


@cache
def attention_case(
    kv_dtype: str,
    heads: int,
    key_dim: int,
    value_dim: int,
    window: int = 0,
    both_ways: bool = False,
    positions: int = 203,
    tokens: int = 37,
    sinks: tuple[float, ...] | None = None,
) -> Case:
    """Return queries of the last tokens, keys and values of all positions, and attention in float64."""
    q, keys, values = (
        normal(tokens, heads * key_dim),
        normal(positions, key_dim, seed=1),
        normal(positions, value_dim, seed=2),
    )
    k, v = as_cached(keys, kv_dtype), as_cached(values, kv_dtype)
    of_heads = None if sinks is None else np.array(sinks, np.float32)
    expected = reference_attention(q, k, v, heads, window, key_dim**-0.5, both_ways, of_heads)
    return q, keys, values, expected


ATTENTION_SHAPES = [  # heads of queries, dimensions of keys and values, window, both ways
    (3, 64, 64, 0, False),
    (8, 32, 32, 0, False),
    (3, 80, 40, 0, False),
    (2, 128, 128, 0, False),
    (1, 32, 96, 0, False),
    (5, 256, 256, 70, False),
    (3, 64, 64, 20, False),
    (2, 45, 16, 0, False),
    (3, 64, 64, 0, True),
    (4, 48, 16, 131, True),
]


# Tokens that are computed alone as well: at the ends of tiles, and at each place within eight rows. Bits are
# compared with those of the same tokens computed together; the values of all are compared with float64.
ALONE = (0, 3, 6, 9, 15, 16, 18, 20, 21, 31, 32, 36)


Parts = tuple[tuple[int, int, bool], ...]  # first token, number of tokens, and whether by splits


def assert_parts(inputs: tuple[Any, ...], expected: Any, bound: float, parts: Parts, **options: Any) -> None:
    """Compute parts of the tokens.

    Values are compared with float64, and bits with those of the tokens `ALONE`, computed one at a time.
    """
    single = np.full(expected.shape, np.nan, np.float32)
    for first, count, by_splits in (*((t, 1, False) for t in ALONE), *parts):
        out = np.full_like(single, SENTINEL)
        cpu.attention(*inputs, first, count, out, by_splits=by_splits, **options)
        here, alone = slice(first, first + count), [t for t in ALONE if first <= t < first + count]
        # With the type of the cache, the window and the scale.
        case = str((first, count, by_splits, inputs[4:], options))
        assert np.abs(out[here] - expected[here]).max() <= bound, case
        assert np.all(np.delete(out, here, axis=0) == SENTINEL), case
        if count == 1 and not by_splits:
            single[here] = out[here]
        np.testing.assert_array_equal(out[alone], single[alone], err_msg=case)


@each_set
def test_attention(isa: str) -> None:
    for kv_dtype, shape in share(isa, [*product(KV_DTYPES, ATTENTION_SHAPES)]):
        heads, key_dim, value_dim, window, both_ways = shape
        if kv_dtype == "q8_0" and (key_dim % 32 or value_dim % 32):  # its blocks have 32 dimensions
            continue
        q, keys, values, expected = attention_case(kv_dtype, heads, key_dim, value_dim, window, both_ways)
        inputs = (isa, q, keys, values, kv_dtype, window, key_dim**-0.5)
        bound = error_of(isa, kv_dtype) * np.abs(expected).max()
        # 17 tokens leave one for a last tile of lanes.
        parts = ((0, 32, False), (16, 16, False), (20, 17, False), (32, 5, False), (3, 7, False))
        assert_parts(inputs, expected, bound, parts, both_ways=both_ways)


SINKS = ((-30.0, 0.5, 4.0), (-3e38, 3e38, 60.0))


@each_set
def test_sinks_take_part_in_the_softmax_without_a_value(isa: str) -> None:
    """Sinks are far below scores, among them, or above them; in one split of positions and in two."""
    cases = product(((0, False), (20, False), (1200, True)), KV_DTYPES, SINKS)
    for (window, both_ways), kv_dtype, sinks in share(isa, [*cases]):
        shape = (kv_dtype, 3, 32, 64, window, both_ways, 528)
        *_, without = attention_case(*shape)
        q, keys, values, expected = attention_case(*shape, sinks=sinks)
        of_heads = np.array(sinks, np.float32)
        inputs = (isa, q, keys, values, kv_dtype, window, 32**-0.5)
        bound = error_of(isa, kv_dtype) * np.abs(without).max()
        parts = ((0, 32, False), (0, 32, True), (20, 1, True))
        assert_parts(inputs, expected, bound, parts, sinks=of_heads, both_ways=both_ways)
    for kv_dtype in KV_DTYPES:
        sinks = (-1.0, 2.0, 5.0)
        q, keys, values, expected = attention_case(kv_dtype, 3, 64, 64, both_ways=True, sinks=sinks)
        of_heads = np.array(sinks, np.float32)
        out = np.full(expected.shape, np.nan, np.float32)
        cpu.attention(isa, q, keys, values, kv_dtype, 0, 0.125, 0, 32, out, sinks=of_heads, both_ways=True)
        assert np.abs(out - expected)[:32].max() <= error_of(isa, kv_dtype), kv_dtype


@each_set
def test_attention_at_any_last_position_within_a_page(isa: str) -> None:
    """It is followed only by NaN in memory."""
    for kv_dtype, n in product(KV_DTYPES, range(1, 131)):
        q, keys, values, expected = attention_case(kv_dtype, 3, 32, 32, positions=n, tokens=1)
        out = np.full_like(q, np.nan)
        cpu.attention(isa, q, keys, values, kv_dtype, 0, 32**-0.5, 0, 1, out)
        largest = np.abs(values).max()
        assert np.abs(out - expected).max() <= error_of(isa, kv_dtype) * largest, (kv_dtype, n)


@each_set
def test_attention_may_be_computed_split_by_split(isa: str) -> None:
    """The third split begins among the positions, and a window ends before some splits."""
    windows = ((0, False), (600, False), (20, False), (1200, True))
    for (window, both_ways), kv_dtype in share(isa, [*product(windows, KV_DTYPES)]):
        q, keys, values, expected = attention_case(kv_dtype, 3, 32, 64, window, both_ways, 1040)
        inputs = (isa, q, keys, values, kv_dtype, window, 32**-0.5)
        bound = error_of(isa, kv_dtype) * np.abs(expected).max()
        parts = ((0, 32, False), (0, 32, True), (17, 8, True), (20, 1, True), (21, 1, True))
        assert_parts(inputs, expected, bound, parts, both_ways=both_ways)


@each_set
def test_a_split_may_have_nearly_all_of_the_weight(isa: str) -> None:
    q, values = normal(4, 64), normal(1100, 64, seed=2)
    for loud, by_splits in product((slice(0, 512), slice(512, 1024), slice(1024, 1100)), (False, True)):
        keys = normal(1100, 64, seed=1)
        keys[loud] *= 30
        expected = reference_attention(q, keys, values, 1, 0, 1.0)
        out = np.full_like(q, np.nan)
        cpu.attention(isa, q, keys, values, "f32", 0, 1.0, 0, 4, out, by_splits=by_splits)
        assert np.abs(out - expected).max() <= 1e-4 * np.abs(expected).max()  # scores are up to 1,000


@each_set
def test_a_nan_split_makes_the_result_nan(isa: str) -> None:
    q, keys, values = normal(4, 64), normal(1100, 64, seed=1), normal(1100, 64, seed=2)
    keys[512:1024] = np.nan
    for kv_dtype, by_splits in product(("f16", "f32"), (False, True)):
        out = np.zeros_like(q)
        cpu.attention(isa, q, keys, values, kv_dtype, 0, 0.125, 0, 4, out, by_splits=by_splits)
        assert np.isnan(out).all()


# Relative to the largest output: float32 throughout, but where products are of bfloat16, whose half unit is
# 2^-9; a weight and its value add up to two of them, and the scores' errors move weights.
ATTENTION_ERROR = dict.fromkeys([*SETS, "f32"], 1e-5) | dict.fromkeys(["avx512bf16", "amx"], 2**-7)

# Queries and weights of the softmax keep 15 bits and their sign there: half a unit is 2^-16 of the largest.
# The errors of a query's dimensions add up in a score, with a deviation of some 2^-15.
Q8_ATTENTION_ERROR = 2**-13


def error_of(isa: str, kv_dtype: str) -> float:
    """Return the largest error relative to the largest output."""
    return {"f16": ATTENTION_ERROR[isa], "f32": ATTENTION_ERROR["f32"], "q8_0": Q8_ATTENTION_ERROR}[kv_dtype]


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
def test_padding_of_keys_changes_nothing(isa: str) -> None:
    """AMX multiplies 32 dimensions at a time. Unwritten memory is NaN here, since 0 * NaN is NaN."""
    for key_dim in (45, 48, 80):
        q, keys, values = normal(37, 2 * key_dim), normal(203, key_dim, seed=1), normal(203, 16, seed=2)
        plain, filled = np.full((2, 37, 32), SENTINEL)
        cpu.attention(isa, q, keys, values, "f16", 0, 0.125, 0, 32, plain)
        cpu.attention(isa, q, keys, values, "f16", 0, 0.125, 0, 32, filled, key_multiple=32)
        np.testing.assert_array_equal(filled, plain)


@each_set
def test_nan_of_an_earlier_call_does_not_reach_a_split(isa: str) -> None:
    """Memory on the stack holds the results of the earlier call."""
    q, keys, values = normal(32, 64), normal(1100, 64, seed=1), normal(1100, 64, seed=2)
    for kv_dtype in KV_DTYPES:
        out, nan, expected = np.zeros((3, 32, 64), np.float32)
        cpu.attention(isa, q, keys, values, kv_dtype, 0, 0.125, 0, 32, expected)
        cpu.attention(isa, q, np.full_like(keys, np.nan), values, kv_dtype, 0, 0.125, 0, 32, nan)
        assert np.isnan(nan).all()
        cpu.attention(isa, q, keys, values, kv_dtype, 0, 0.125, 0, 32, out, by_splits=True)
        np.testing.assert_array_equal(out, expected)


@each_set
def test_attention_does_not_see_later_positions(isa: str) -> None:
    """Keys of later positions are NaN."""
    q, keys, values = normal(70, 64), normal(70, 64, seed=1), normal(70, 64, seed=2)
    for kv_dtype in ("f16", "f32"):
        whole, cut = np.empty((2, 70, 64), np.float32)
        cpu.attention(isa, q, keys, values, kv_dtype, 0, 0.125, 38, 32, whole)
        spoiled, others = keys.copy(), values.copy()
        spoiled[60:], others[60:] = np.nan, -1e3
        cpu.attention(isa, q, spoiled, others, kv_dtype, 0, 0.125, 38, 32, cut)
        np.testing.assert_array_equal(cut[38:60], whole[38:60])
        assert np.isnan(cut[60:]).all()
