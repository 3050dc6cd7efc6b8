"""Attention kernels, against a float64 softmax over every visible key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import metal_kernels
import numpy as np
import pytest
from support.kernel_harness import (
    STRUCTS,
    Array,
    Doubles,
    Output,
    Run,
    ceil_div,
    close,
    make_args,
    near,
)
from support.paged import PAGE, Pages

from metal_prefill import _core
from metal_prefill.gpu._cost_model.work import SCORE_BANK_CYCLES


class Case:
    """Random queries of sequences, (tokens, position) each, over a cache in pages."""

    def __init__(
        self,
        *sequences: tuple[int, int],
        heads: tuple[int, int] = (9, 3),
        dims: tuple[int, int] = (64, 64),
        cache: type = np.float16,
        window: int = 0,
        both_ways: bool = False,
        spread: float = 1.0,
        max_alibi_bias: float = 0.0,
    ) -> None:
        self.sequences, self.window, self.both_ways = sequences, window, both_ways
        self.max_alibi_bias = max_alibi_bias
        self.n_heads, self.n_kv = heads
        self.key_dim, self.value_dim = dims
        self.name = "f16" if cache is np.float16 else "f32"
        self.scale = 1 / np.sqrt(self.key_dim)
        self.rows = [(i, p + t) for i, (tokens, p) in enumerate(sequences) for t in range(tokens)]
        self.q_stride = self.n_heads * self.key_dim + 24  # queries are the first columns of longer rows
        self.q = np.full((len(self.rows), self.q_stride), np.nan, np.float32)
        self.pages = Pages([sum(s) for s in sequences], self.n_kv, dims, cache)
        self.k: list[Array] = []
        self.v: list[Array] = []
        row = 0
        for i, (tokens, position) in enumerate(sequences):
            # The contents of a sequence depend only on its shape: alone it is the same.
            rng = np.random.default_rng([tokens, position])
            shape = (tokens, self.n_heads * self.key_dim)
            self.q[row : row + tokens, : shape[1]] = spread * rng.standard_normal(shape)
            row += tokens
            keys = tokens + position
            self.k.append(rng.standard_normal((keys, self.n_kv, self.key_dim)).astype(cache))
            self.v.append(rng.standard_normal((keys, self.n_kv, self.value_dim)).astype(cache))
            self.pages.put(i, self.k[-1], self.v[-1])

    def expected(self) -> Doubles:
        out = np.empty((len(self.rows), self.n_heads, self.value_dim))
        for row, (sequence, position) in enumerate(self.rows):
            q = self.q[row, : self.n_heads * self.key_dim].astype(np.float64)
            keys = len(self.k[sequence])
            before = keys if not self.window else self.window // 2 if self.both_ways else self.window - 1
            after = 0 if not self.both_ways else self.window // 2 if self.window else keys
            seen = slice(max(0, position - before), min(keys, position + after + 1))
            k, v = (
                np.repeat(x[sequence][seen].astype(np.float64), self.n_heads // self.n_kv, axis=1)
                for x in (self.k, self.v)
            )
            scores = np.einsum("hd,khd->hk", q.reshape(self.n_heads, self.key_dim), k) * self.scale
            distance = np.abs(np.arange(keys)[seen] - position)
            scores -= np.array([self.slope(head) for head in range(self.n_heads)])[:, None] * distance
            weights = np.exp(scores - scores.max(1, keepdims=True))
            out[row] = np.einsum("hk,khd->hd", weights / weights.sum(1, keepdims=True), v)
        return out

    @property
    def alibi_heads(self) -> int:
        return 2 ** int(np.log2(self.n_heads)) if self.max_alibi_bias else 0

    def slope(self, head: int) -> float:
        """Slope of ALiBi: heads beyond a power of two have every other slope of twice as many."""
        if not (whole := self.alibi_heads):
            return 0.0
        power = (head + 1) / whole if head < whole else (2 * (head - whole) + 1) / (2 * whole)
        return float(2.0 ** (-self.max_alibi_bias * power))

    def args(self, **fields: Any) -> Array:
        return make_args(
            "AttentionArgs",
            n_heads=self.n_heads,
            n_kv_heads=self.n_kv,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            q_stride=self.q_stride,
            page_stride=self.pages.stride,
            window=self.window,
            both_ways=self.both_ways,
            scale=self.scale,
            alibi_heads=self.alibi_heads,
            max_alibi_bias=self.max_alibi_bias,
            **({"splits": 1, "tiles": 0} | fields),
        )

    def decode(self, run: Run, splits: int | Sequence[int] = 1, threads: int = 256) -> Array:
        """Run attention_decode with this number of splits, for every row or for each."""
        each = [splits] * len(self.rows) if isinstance(splits, int) else splits
        most = max(each)
        size = next(s for s in (32, 64, 96, 128, 256) if s >= max(self.key_dim, self.value_dim))
        heads = {32: 4, 64: 4, 96: 2, 128: 2, 256: 1}[size]
        blocks = self.n_kv * ceil_div(self.n_heads // self.n_kv, heads)
        out = Output([len(self.rows), self.n_heads, self.value_dim])
        partial = Output([len(self.rows), self.n_heads, most, self.value_dim + 2])
        rows, args = self.pages.row_table(self.rows, each), self.args(splits=most)
        run(
            f"attention_decode_{self.name}_{size}",
            self.q,
            rows.view(np.uint8),
            self.pages.pages,
            self.pages.k.buffer,
            self.pages.v.buffer,
            (out if most == 1 else partial).buffer,
            args,
            groups=(most, blocks, len(self.rows)),
            threads=(threads,),
        )
        if most > 1:
            groups = (self.n_heads, len(self.rows))
            buffers = (partial.buffer, rows.view(np.uint8), out.buffer, args)
            run("attention_combine", *buffers, groups=groups, threads=(64,))
            partial.check()
        return out.check()

    def prefill(self, run: Run, simdgroups: int = 4) -> Array:
        size = next(s for s in (64, 128, 256) if s >= max(self.key_dim, self.value_dim))
        blocks = 2 if size == 64 or (size == 128 and self.name == "f16") else 1
        tiles, row = [], 0
        for i, (tokens, position) in enumerate(self.sequences):
            stacked = range(0, tokens * self.n_heads // self.n_kv, 8 * blocks)
            tiles += [
                (row, tokens, position, self.pages.first[i], first, tokens + position) for first in stacked
            ]
            row += tokens
        np.random.default_rng(0).shuffle(tiles)  # their order determines only which one starts first
        out = Output([len(self.rows), self.n_heads, self.value_dim], np.float16)
        scratch = _core.prefill_scratch_bytes(size, self.k[0].dtype.itemsize)
        simdgroups = min(simdgroups, (32 << 10) // scratch)
        run(
            f"attention_prefill_{self.name}_{size}",
            self.q,
            np.array([tuple(t) for t in tiles], STRUCTS["AttentionTile"]).view(np.uint8),
            self.pages.pages,
            self.pages.k.buffer,
            self.pages.v.buffer,
            out.buffer,
            self.args(tiles=len(tiles)),
            groups=(ceil_div(len(tiles), simdgroups), self.n_kv),
            threads=(32 * simdgroups,),
            threadgroup_bytes=simdgroups * scratch,
        )
        return out.check()


SHAPES: list[dict[str, Any]] = [
    {"heads": (9, 3), "dims": (64, 64)},
    {"heads": (4, 4), "dims": (32, 32)},
    {"heads": (8, 1), "dims": (80, 80)},
    {"heads": (6, 2), "dims": (96, 64)},
    {"heads": (5, 1), "dims": (128, 128)},
    {"heads": (2, 1), "dims": (256, 256)},
    {"heads": (2, 2), "dims": (40, 72)},
]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "{}x{}_{}_{}".format(*s["heads"], *s["dims"]))
caches = pytest.mark.parametrize("cache", [np.float16, np.float32], ids=["f16", "f32"])


@shapes
@caches
@pytest.mark.parametrize("sequences", [[(1, 0)], [(1, 70)], [(3, 41)], [(1, 64), (2, 127), (1, 5)]])
def test_attention_decode(
    run: Run, shape: dict[str, Any], cache: type, sequences: list[tuple[int, int]]
) -> None:
    case = Case(*sequences, cache=cache, **shape)
    for threads in (32, 256):
        close(case.decode(run, threads=threads), case.expected())


@pytest.mark.parametrize("splits", [2, 5])
@pytest.mark.parametrize("sequence", [(1, 300), (2, 3)])
def test_attention_decode_over_several_threadgroups(run: Run, splits: int, sequence: tuple[int, int]) -> None:
    case = Case(sequence)
    close(case.decode(run, splits), case.expected())


@pytest.mark.parametrize("splits", [1, 4])
def test_attention_decode_in_a_window(run: Run, splits: int) -> None:
    case = Case((2, 200), (1, 60), (1, 10), window=50)  # the first splits see no key at all
    close(case.decode(run, splits), case.expected())


@pytest.mark.parametrize("position", [30, PAGE - 2, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE - 1])
def test_a_row_of_attention_decode_is_bit_identical_to_that_row_alone(run: Run, position: int) -> None:
    """The other rows, and their numbers of threads and splits, have no influence."""
    splits = 1 if position < PAGE else 2
    alone = Case((1, position)).decode(run, splits, threads=32 * min(8, ceil_div(position + 1, 4 * splits)))
    together = Case((2, 3), (1, position), (1, 400)).decode(run, [1, 1, splits, 3])
    np.testing.assert_array_equal(together[2], alone[0])


@shapes
@caches
@pytest.mark.parametrize(
    "sequences", [[(1, 0)], [(9, 0)], [(33, 0)], [(17, 45)], [(9, 120), (40, 0), (1, 70)]]
)
def test_attention_prefill(
    run: Run, shape: dict[str, Any], cache: type, sequences: list[tuple[int, int]]
) -> None:
    case = Case(*sequences, cache=cache, **shape)
    near(case.prefill(run), case.expected())


@pytest.mark.emulator
@pytest.mark.parametrize(("dims", "cache"), [(64, np.float16), (128, np.float16), (64, np.float32)], ids=str)
def test_lanes_of_attention_prefill_rarely_share_a_bank(run: Run, dims: int, cache: type) -> None:
    """In rows of 32 floats all lanes begin in one of two banks: 7.6 times the fewest possible cycles."""
    emulator: Any = getattr(metal_kernels.testing_module(), "emulator", None)
    if emulator is None or emulator.sanitizer:
        pytest.skip("needs the emulator's checked mode")
    case = Case((33, 40), heads=(4, 2), dims=(dims, dims), cache=cache)
    emulator.set_options(emulator.Options(checked=True, banks=True))
    emulator.set_history_depth(1)
    near(case.prefill(run), case.expected())
    (dispatch,) = emulator.history()[0].dispatches
    emulator.set_history_depth(0)
    assert dispatch.least_bank_cycles > 1000
    assert dispatch.bank_cycles / dispatch.least_bank_cycles < SCORE_BANK_CYCLES


@pytest.mark.parametrize("tokens", [2, 7, 8, 31, 32, 129])
@pytest.mark.parametrize("simdgroups", [1, 4])
def test_attention_prefill_at_tile_boundaries(run: Run, tokens: int, simdgroups: int) -> None:
    case = Case((tokens, 0))
    near(case.prefill(run, simdgroups), case.expected())


@pytest.mark.parametrize("position", [31, 32, 33, PAGE - 12, PAGE - 1, PAGE, PAGE + 1, 512])
def test_attention_prefill_after_other_chunks(run: Run, position: int) -> None:
    case = Case((12, position))
    near(case.prefill(run), case.expected())


def test_attention_at_any_position_within_a_page(run: Run) -> None:
    decode = Case(*((1, p) for p in range(2 * PAGE)), heads=(3, 1), dims=(32, 32))
    close(decode.decode(run), decode.expected())
    prefill = Case(*((2, p) for p in range(2 * PAGE)), heads=(3, 1), dims=(32, 32))
    near(prefill.prefill(run), prefill.expected())


@pytest.mark.parametrize("window", [1, 8, 40])
def test_attention_prefill_in_a_window(run: Run, window: int) -> None:
    case = Case((50, 60), (20, 10), window=window)
    near(case.prefill(run), case.expected())


@pytest.mark.parametrize("window", [0, 1, 16, 41])
def test_attention_prefill_bidirectional(run: Run, window: int) -> None:
    case = Case((50, 0), (3, 0), (70, 0), window=window, both_ways=True)
    near(case.prefill(run), case.expected())


@pytest.mark.parametrize("heads", [(8, 8), (12, 12), (6, 2), (1, 1)])
def test_attention_prefill_with_alibi(run: Run, heads: tuple[int, int]) -> None:
    case = Case((50, 0), (3, 0), (100, 0), heads=heads, both_ways=True, max_alibi_bias=8.0)
    near(case.prefill(run), case.expected())


@pytest.mark.parametrize("position", [0, 100])
def test_attention_with_scores_far_apart(run: Run, position: int) -> None:
    case = Case((20, position), spread=60.0)
    close(case.decode(run), case.expected(), 5e-4)  # float32 scores of about 200
    case = Case((20, position), spread=60.0, cache=np.float32)
    near(case.prefill(run), case.expected())
