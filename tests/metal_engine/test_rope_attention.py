"""Rope, append and attention of a single token in one kernel, against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.head_cases import ROPE_CASES, rms, rotate
from support.kernel_harness import CONSTANTS, STRUCTS, Array, Output, Run, ceil_div, close, make_args

ROWS_AFTER = 3  # of the cache, after the token


class Case:
    """A row of qkv, and a cache that holds `position` tokens and NaN from there on."""

    def __init__(self, position: int, cache: type, window: int = 0, **given: Any) -> None:
        given = {"neox": False, "bias": False, "norms": False} | given
        self.n_heads, self.n_kv = given["heads"]
        self.key_dim, self.value_dim = given["dims"]
        self.position, self.window = position, window
        self.cache = np.dtype(cache)
        rng = np.random.default_rng(position)
        q_dim, k_dim, v_dim = (
            self.n_heads * self.key_dim,
            self.n_kv * self.key_dim,
            self.n_kv * self.value_dim,
        )
        self.qkv = rng.standard_normal(q_dim + k_dim + v_dim).astype(np.float32)
        self.bias = rng.standard_normal(self.qkv.size).astype(np.float32)
        self.norms = np.asarray(rng.uniform(0.5, 1.5, (2, self.key_dim)), dtype=np.float32)
        half = max(int(given["rope"]) // 2, 1)
        angles = rng.uniform(-np.pi, np.pi, size=(position + 1, half))
        self.table = np.stack([np.cos(angles), np.sin(angles)], -1).astype(np.float32)
        rows = position + 1 + ROWS_AFTER
        self.k: Array = np.full((rows, self.n_kv, self.key_dim), np.nan, cache)
        self.v: Array = np.full((rows, self.n_kv, self.value_dim), np.nan, cache)
        self.k[:position] = rng.standard_normal(self.k[:position].shape)
        self.v[:position] = rng.standard_normal(self.v[:position].shape)

        wide = self.qkv.astype(np.float64) + (self.bias if given["bias"] else 0)
        q, k, v = np.split(wide, [q_dim, q_dim + k_dim])
        q, k = q.reshape(1, self.n_heads, self.key_dim), k.reshape(1, self.n_kv, self.key_dim)
        if given["norms"]:
            q, k = rms(q, 1e-6) * self.norms[0], rms(k, 1e-6) * self.norms[1]
        if given["rope"]:
            q, k = (rotate(x, self.table[position:], given["rope"], given["neox"]) for x in (q, k))
        self.own_k, self.own_v = k[0], v.reshape(self.n_kv, self.value_dim)

        keys, values = self.k.astype(np.float64), self.v.astype(np.float64)
        keys[position], values[position] = self.own_k.astype(cache), self.own_v.astype(cache)
        seen = slice(max(0, position + 1 - window) if window else 0, position + 1)
        keys, values = (np.repeat(x[seen], self.n_heads // self.n_kv, axis=1) for x in (keys, values))
        scores = np.einsum("hd,khd->hk", q[0], keys) / np.sqrt(self.key_dim)
        weights = np.exp(scores - scores.max(1, keepdims=True))
        self.expected = np.einsum("hk,khd->hd", weights / weights.sum(1, keepdims=True), values)

        self.rope = {
            "n_heads": self.n_heads,
            "n_kv_heads": self.n_kv,
            "key_dim": self.key_dim,
            "value_dim": self.value_dim,
            "rope_dim": given["rope"],
            "style": CONSTANTS["ROPE_NEOX" if given["neox"] else "ROPE_INTERLEAVED"],
            "position": position,
            "has_bias": given["bias"],
            "has_q_norm": given["norms"],
            "has_k_norm": given["norms"],
            "eps": 1e-6,
            "skip_queries": 0,
        }

    def check(self, run: Run, splits: int = 1, threads: int = 256) -> None:
        """Run the kernel; check its result and the keys and values that it appended."""
        size = next(s for s in (32, 64, 96, 128, 256) if s >= max(self.key_dim, self.value_dim))
        heads = {32: 4, 64: 4, 96: 2, 128: 2, 256: 1}[size]
        blocks = self.n_kv * ceil_div(self.n_heads // self.n_kv, heads)
        attention = make_args(
            "AttentionArgs",
            n_heads=self.n_heads,
            n_kv_heads=self.n_kv,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            tokens=1,
            position=self.position,
            q_stride=self.qkv.size,
            window=self.window,
            splits=splits,
            split_keys=ceil_div(self.position + 1, splits),
            scale=1 / np.sqrt(self.key_dim),
        )
        args = np.zeros(1, STRUCTS["RopeAttentionArgs"])
        args["rope"], args["attention"] = make_args("RopeArgs", **self.rope), attention
        k_cache, v_cache = (Output(x.shape, self.cache, initial=x) for x in (self.k, self.v))
        out = Output([self.n_heads, self.value_dim])
        partial = Output([self.n_heads, splits, self.value_dim + 2])
        run(
            f"rope_attention_decode_{'f16' if self.cache == np.float16 else 'f32'}_{size}",
            *(self.bias, self.norms[0], self.norms[1], self.table, self.qkv),
            *(k_cache.buffer, v_cache.buffer, (out if splits == 1 else partial).buffer, args),
            groups=(splits, blocks, 1),
            threads=(threads,),
        )
        if splits > 1:
            groups = (self.n_heads, 1)
            run("attention_combine", partial.buffer, out.buffer, attention, groups=groups, threads=(64,))
        close(out.check(), self.expected)
        bound = 1e-3 if self.cache == np.float16 else 1e-5
        own = self.position
        for written, before, expected in (
            (k_cache.check(), self.k, self.own_k),
            (v_cache.check(), self.v, self.own_v),
        ):
            close(written[own], expected, bound)
            np.testing.assert_array_equal(np.delete(written, own, 0), np.delete(before, own, 0))


caches = pytest.mark.parametrize("cache", [np.float16, np.float32], ids=["f16", "f32"])


@pytest.mark.parametrize("case", ROPE_CASES)
@caches
@pytest.mark.parametrize(("position", "threads"), [(0, 32), (1, 64), (45, 256)])
def test_rope_attention_decode(run: Run, case: str, cache: type, position: int, threads: int) -> None:
    Case(position, cache, **ROPE_CASES[case]).check(run, threads=threads)


@pytest.mark.parametrize("heads", [(8, 1), (5, 1)])
def test_more_query_heads_than_a_threadgroup_takes(run: Run, heads: tuple[int, int]) -> None:
    """Several threadgroups have the token's key, and one of them appends it."""
    Case(20, np.float16, heads=heads, dims=(64, 64), rope=64).check(run)


@caches
@pytest.mark.parametrize(("position", "splits"), [(299, 2), (300, 5), (2, 5)])
def test_over_several_threadgroups(run: Run, cache: type, position: int, splits: int) -> None:
    Case(position, cache, heads=(9, 3), dims=(64, 64), rope=64).check(run, splits)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("window", [1, 50])
def test_in_a_window(run: Run, splits: int, window: int) -> None:
    Case(200, np.float16, window, heads=(9, 3), dims=(64, 64), rope=64).check(run, splits)
