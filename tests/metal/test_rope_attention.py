"""Rope, append and attention of sequences with a single token each: one kernel has the bits of the two.

Those are compared with float64 in test_token_steps.py and test_attention.py.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from support.kernels.attention_case import DECODE_SIZES, attention_args
from support.kernels.head_cases import ROPE_CASES, HeadRows
from support.kernels.kernel_harness import STRUCTS, Array, Output, Run, ceil_div, make_args
from support.paged import PAGE, Pages

from metal_prefill import _core


class Case:
    """Rows of qkv, one for each position, and a cache with as many tokens of each sequence."""

    def __init__(
        self,
        *positions: int,
        cache: type = np.float16,
        window: int = 0,
        score_cap: float = 0.0,
        **options: Any,
    ) -> None:
        self.given = given = HeadRows(positions, **options)
        self.n_heads, self.n_kv = given.n_heads, given.n_kv
        self.key_dim, self.value_dim = given.key_dim, given.value_dim
        self.positions, self.window, self.score_cap = positions, window, score_cap
        self.cache = np.dtype(cache)
        self.before: list[tuple[Array, Array]] = []
        for p in positions:
            rng = np.random.default_rng([p, 1])
            k: Array = rng.standard_normal((p, self.n_kv, self.key_dim)).astype(cache)
            self.before.append((k, rng.standard_normal((p, self.n_kv, self.value_dim)).astype(cache)))

    def pages(self) -> Pages:
        pages = Pages([p + 1 for p in self.positions], self.n_kv, (self.key_dim, self.value_dim), self.cache)
        for i, (k, v) in enumerate(self.before):
            pages.put(i, k, v)
        return pages

    def attend(
        self,
        run: Run,
        pages: Pages,
        splits: Sequence[int],
        threads: int = 256,
        fused: bool = True,
        skip_keys: bool = False,
    ) -> Array:
        """Run the kernel, or the two that it joins. With `skip_keys` the pages have all keys and values."""
        given = self.given
        size = next(s for s in DECODE_SIZES if s >= max(self.key_dim, self.value_dim))
        blocks = self.n_kv * ceil_div(
            self.n_heads // self.n_kv, _core.attention_sizes(size, 4)["decode_heads"]
        )
        attention = attention_args(
            n_heads=self.n_heads,
            n_kv_heads=self.n_kv,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            q_stride=given.qkv.shape[1],
            page_stride=pages.stride,
            window=self.window,
            splits=max(splits),
            scale=1 / np.sqrt(self.key_dim),
            query_step=self.key_dim,
            score_cap=self.score_cap,
        )
        row_stride = given.qkv.shape[1]
        rope = make_args(
            "RopeArgs",
            **given.args | {"skip_keys": skip_keys},
            page_stride=pages.stride,
            skip_queries=0,
            row_stride=row_stride,
        )
        args = np.zeros(1, STRUCTS["RopeAttentionArgs"])
        args["rope"], args["attention"] = rope, attention
        n, most = len(self.positions), max(splits)
        rows = pages.row_table(list(enumerate(self.positions)), splits).view(np.uint8)
        qkv = Output(given.qkv.shape, initial=given.qkv)
        inputs = (given.bias, *given.norms, given.table, qkv.buffer, rows, pages.pages)
        caches = (pages.k.buffer, pages.v.buffer)
        out = Output([n, self.n_heads, self.value_dim])
        partial = Output([n, self.n_heads, most, self.value_dim + 2])
        first = (out if most == 1 else partial).buffer
        kind = f"{'f16' if self.cache == np.float16 else 'f32'}"
        grid: dict[str, Any] = {"groups": (most, blocks, n), "threads": (threads,)}
        if fused:
            run(f"rope_attention_decode_{kind}_{size}", *inputs, *caches, first, args, **grid)
        else:
            groups = (self.n_heads + (0 if skip_keys else 2 * self.n_kv), n)
            run(f"rope_append_{kind}", *inputs, *caches, rope, groups=groups, threads=(32,))
            q = qkv.check()
            run(f"attention_decode_{kind}_{size}", q, rows, pages.pages, *caches, first, attention, **grid)
        if most > 1:
            groups = (self.n_heads, n)
            run(
                "attention_combine", partial.buffer, rows, out.buffer, attention, groups=groups, threads=(64,)
            )
        return out.check()

    def check(self, run: Run, *splits: int, threads: int = 256) -> None:
        """Compare the kernel with the two that it joins: its result, and the K and V that it appends."""
        each = splits or [1] * len(self.positions)
        pages, other = self.pages(), self.pages()
        found = self.attend(run, pages, each, threads)
        assert np.isfinite(found).all()
        np.testing.assert_array_equal(found, self.attend(run, other, each, threads, fused=False))
        np.testing.assert_array_equal(pages.k.check(), other.k.check())
        np.testing.assert_array_equal(pages.v.check(), other.v.check())


caches = pytest.mark.parametrize("cache", [np.float16, np.float32], ids=["f16", "f32"])


@caches
def test_any_number_of_threads(run: Run, cache: type) -> None:
    for position, threads in [(0, 32), (1, 64), (45, 256)]:
        Case(position, cache=cache).check(run, threads=threads)


def test_more_query_heads_than_a_threadgroup_takes(run: Run) -> None:
    """Several threadgroups need the token's key, and one of them appends it."""
    for heads in [(8, 1), (5, 1)]:
        Case(20, heads=heads).check(run)


@caches
def test_over_several_threadgroups(run: Run, cache: type) -> None:
    for position, splits in [(299, 2), (300, 5), (2, 5)]:
        Case(position, cache=cache).check(run, splits)


@pytest.mark.parametrize("case", ROPE_CASES)
@caches
def test_several_sequences(run: Run, case: str, cache: type) -> None:
    Case(PAGE, 3, 2 * PAGE - 1, 0, PAGE - 1, cache=cache, **ROPE_CASES[case]).check(run)


def test_results_are_bit_identical_to_single_sequences(run: Run) -> None:
    for position in [0, 2, 3, PAGE - 1, PAGE, PAGE + 1, 130]:
        splits = 1 if position < PAGE else 2
        alone, together = Case(position), Case(70, position, 400)
        threads = 32 * min(8, ceil_div(position + 1, 4 * splits))
        expected = alone.attend(run, alone.pages(), [splits], threads)
        each = together.attend(run, together.pages(), [1, splits, 3])
        np.testing.assert_array_equal(each[1], expected[0])


def test_at_any_position_within_a_page(run: Run) -> None:
    Case(*range(2 * PAGE), heads=(3, 1), dims=(32, 32), rope=32).check(run)


def test_limited_scores(run: Run) -> None:
    for splits in [1, 3]:
        Case(200, 20, 0, score_cap=0.5).check(run, splits, 1, 1)


def test_in_a_window(run: Run) -> None:
    for splits in [1, 4]:
        for window in [1, 50]:
            Case(200, 20, 100, window=window).check(run, splits, 1, 2)


@pytest.mark.parametrize("case", ["smollm", "wide", "norms after the rotation"])
@caches
def test_keys_and_values_that_an_earlier_layer_stored(run: Run, case: str, cache: type) -> None:
    """Rows have only queries; the fused kernel has the bits of the two."""
    positions, splits = (2 * PAGE, 3, 0, PAGE - 1), [2, 1, 1, 1]
    rows = Case(*positions, cache=cache, **ROPE_CASES[case])
    pages = rows.pages()
    for i, position in enumerate(positions):
        for values in (False, True):
            pages.rows(i, values)[position][...] = 0.5
    before = pages.copies()
    rows.given.qkv[:, rows.n_heads * rows.key_dim :] = np.nan
    fused, separate = (
        rows.attend(run, pages, splits, fused=fused, skip_keys=True) for fused in (True, False)
    )
    assert np.isfinite(fused).all()
    np.testing.assert_array_equal(fused, separate)
    for pool, unchanged in zip((pages.k, pages.v), before, strict=True):
        np.testing.assert_array_equal(pool.check(), unchanged)
