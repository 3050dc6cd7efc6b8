"""Attention kernels, against a float64 softmax over every visible key."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.kernel_harness import CONSTANTS, Array, Doubles, Output, Run, ceil_div, close, make_args, near

POISON = 8  # rows of the cache after the last token, which hold NaN


class Case:
    """Random queries over a cache."""

    def __init__(
        self,
        tokens: int,
        position: int,
        *,
        heads: tuple[int, int] = (9, 3),
        dims: tuple[int, int] = (64, 64),
        cache: type = np.float16,
        window: int = 0,
        spread: float = 1.0,
    ) -> None:
        self.tokens, self.position, self.window = tokens, position, window
        self.n_heads, self.n_kv = heads
        self.key_dim, self.value_dim = dims
        self.name = "f16" if cache is np.float16 else "f32"
        self.scale = 1 / np.sqrt(self.key_dim)
        rng = np.random.default_rng(tokens + position)
        keys = position + tokens
        self.q_stride = self.n_heads * self.key_dim + 24  # queries are the first columns of longer rows
        self.q = np.full((tokens, self.q_stride), np.nan, np.float32)
        queries = spread * rng.standard_normal((tokens, self.n_heads * self.key_dim))
        self.q[:, : self.n_heads * self.key_dim] = queries
        self.k: Array = np.full((keys + POISON, self.n_kv, self.key_dim), np.nan, cache)
        self.v: Array = np.full((keys + POISON, self.n_kv, self.value_dim), np.nan, cache)
        self.k[:keys] = rng.standard_normal(self.k[:keys].shape)
        self.v[:keys] = rng.standard_normal(self.v[:keys].shape)

    def expected(self) -> Doubles:
        q = self.q[:, : self.n_heads * self.key_dim].astype(np.float64)
        q = q.reshape(self.tokens, self.n_heads, self.key_dim)
        k, v = (np.repeat(x.astype(np.float64), self.n_heads // self.n_kv, axis=1) for x in (self.k, self.v))
        out = np.empty((self.tokens, self.n_heads, self.value_dim))
        for t in range(self.tokens):
            last = self.position + t + 1
            seen = slice(max(0, last - self.window) if self.window else 0, last)
            scores = np.einsum("hd,khd->hk", q[t], k[seen]) * self.scale
            weights = np.exp(scores - scores.max(1, keepdims=True))
            out[t] = np.einsum("hk,khd->hd", weights / weights.sum(1, keepdims=True), v[seen])
        return out

    def args(self, **fields: Any) -> Array:
        given = {"splits": 1, "split_keys": self.position + self.tokens} | fields
        return make_args(
            "AttentionArgs",
            n_heads=self.n_heads,
            n_kv_heads=self.n_kv,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            tokens=self.tokens,
            position=self.position,
            q_stride=self.q_stride,
            window=self.window,
            scale=self.scale,
            **given,
        )

    def decode(self, run: Run, splits: int = 1, threads: int = 256) -> Array:
        dim = max(self.key_dim, self.value_dim)
        size = next(s for s in (32, 64, 96, 128, 256) if s >= dim)
        heads = {32: 4, 64: 4, 96: 2, 128: 2, 256: 1}[size]
        blocks = self.n_kv * ceil_div(self.n_heads // self.n_kv, heads)
        out = Output([self.tokens, self.n_heads, self.value_dim])
        partial = Output([self.tokens, self.n_heads, splits, self.value_dim + 2])
        args = self.args(splits=splits, split_keys=ceil_div(self.position + self.tokens, splits))
        run(
            f"attention_decode_{self.name}_{size}",
            self.q,
            self.k,
            self.v,
            (out if splits == 1 else partial).buffer,
            args,
            groups=(splits, blocks, self.tokens),
            threads=(threads,),
        )
        if splits > 1:
            groups = (self.n_heads, self.tokens)
            run("attention_combine", partial.buffer, out.buffer, args, groups=groups, threads=(64,))
            partial.check()
        return out.check()

    def prefill(self, run: Run, simdgroups: int = 4) -> Array:
        dim = max(self.key_dim, self.value_dim)
        size = next(s for s in (64, 128, 256) if s >= dim)
        blocks = 2 if size == 64 or (size == 128 and self.name == "f16") else 1
        rows = self.n_heads // self.n_kv * self.tokens
        out = Output([self.tokens, self.n_heads, self.value_dim], np.float16)
        run(
            f"attention_prefill_{self.name}_{size}",
            self.q,
            self.k,
            self.v,
            out.buffer,
            self.args(),
            groups=(ceil_div(rows, simdgroups * blocks * 8), self.n_kv),
            threads=(32 * simdgroups,),
            threadgroup_bytes=4 * simdgroups * (blocks * (8 * CONSTANTS["PREFILL_KEYS"] + 64) + 64),
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
@pytest.mark.parametrize(("tokens", "position"), [(1, 0), (1, 70), (3, 41)])
def test_attention_decode(run: Run, shape: dict[str, Any], cache: type, tokens: int, position: int) -> None:
    case = Case(tokens, position, cache=cache, **shape)
    for threads in (32, 256):
        close(case.decode(run, threads=threads), case.expected())


@pytest.mark.parametrize("splits", [2, 5])
@pytest.mark.parametrize(("tokens", "position"), [(1, 300), (2, 3)])
def test_attention_decode_over_several_threadgroups(
    run: Run, splits: int, tokens: int, position: int
) -> None:
    case = Case(tokens, position)
    close(case.decode(run, splits), case.expected())


@pytest.mark.parametrize("splits", [1, 4])
def test_attention_decode_in_a_window(run: Run, splits: int) -> None:
    case = Case(2, 200, window=50)  # the first splits see no key at all
    close(case.decode(run, splits), case.expected())


@shapes
@caches
@pytest.mark.parametrize(("tokens", "position"), [(1, 0), (9, 0), (33, 0), (17, 45)])
def test_attention_prefill(run: Run, shape: dict[str, Any], cache: type, tokens: int, position: int) -> None:
    case = Case(tokens, position, cache=cache, **shape)
    near(case.prefill(run), case.expected())


@pytest.mark.parametrize("tokens", [2, 7, 8, 31, 32, 129])
@pytest.mark.parametrize("simdgroups", [1, 4])
def test_attention_prefill_at_the_edges_of_its_tiles(run: Run, tokens: int, simdgroups: int) -> None:
    case = Case(tokens, 0)
    near(case.prefill(run, simdgroups), case.expected())


@pytest.mark.parametrize("position", [31, 32, 33, 512])
def test_attention_prefill_after_other_chunks(run: Run, position: int) -> None:
    case = Case(12, position)
    near(case.prefill(run), case.expected())


@pytest.mark.parametrize("window", [1, 8, 40])
def test_attention_prefill_in_a_window(run: Run, window: int) -> None:
    case = Case(50, 60, window=window)
    near(case.prefill(run), case.expected())


@pytest.mark.parametrize("position", [0, 100])
def test_attention_with_scores_far_apart(run: Run, position: int) -> None:
    case = Case(20, position, spread=60.0)
    close(case.decode(run), case.expected(), 5e-4)  # float32 scores of about 200
    case = Case(20, position, spread=60.0, cache=np.float32)
    near(case.prefill(run), case.expected())
