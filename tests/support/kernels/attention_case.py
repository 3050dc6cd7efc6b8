"""Compares attention kernels over a cache in pages with a float64 softmax."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from metal_prefill import _core
from support.kernels.kernel_harness import CONSTANTS, STRUCTS, Array, Output, Run, ceil_div, check, make_args
from support.paged import Pages

# Heads of the variants of kernels.
DECODE_SIZES = (32, 64, 96, 128, 256, 512)
PREFILL_SIZES = (64, 128, 256, 512)


def attention_args(**fields: Any) -> Array:
    """Make arguments; options are off unless given."""
    absent = dict.fromkeys(
        ("both_ways", "tiles", "alibi_heads", "max_alibi_bias", "position_bias", "added_keys", "has_sinks"), 0
    )
    return make_args("AttentionArgs", **({"splits": 1, **absent} | fields))


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
        position_bias: bool = False,
        score_cap: float = 0.0,
        relative_rows: int = 0,
        sinks: float | None = None,
    ) -> None:
        self.sequences, self.window, self.both_ways = sequences, window, both_ways
        self.max_alibi_bias, self.score_cap = max_alibi_bias, score_cap
        self.n_heads, self.n_kv = heads
        # Sinks about a mean score; one head has almost none.
        self.sinks = np.linspace(-0.5, 0.5, self.n_heads, dtype=np.float32) + np.float32(sinks or 0)
        self.sinks[-1] = -60 if sinks is not None else np.nan
        self.has_sinks = sinks is not None
        shape = (32, self.n_heads) if position_bias else (0, self.n_heads)
        self.position_bias = np.random.default_rng(7).standard_normal(shape).astype(np.float32)
        self.key_dim, self.value_dim = dims
        self.longest = max(sum(sequence) for sequence in sequences) if relative_rows else 0
        rng = np.random.default_rng(8)
        rows = rng.standard_normal((2, relative_rows, self.n_heads * self.key_dim)).astype(np.float32)
        self.relative_keys, self.relative_queries = rows
        self.row_of = rng.integers(0, max(relative_rows, 1), 2 * self.longest).astype(np.float32)
        self.name = "f16" if cache is np.float16 else "f32"
        self.scale = 1 / np.sqrt(self.key_dim)
        self.rows = [(i, p + t) for i, (tokens, p) in enumerate(sequences) for t in range(tokens)]
        self.q_stride = self.n_heads * self.key_dim + 24  # queries are the first columns of longer rows
        self.q = np.full((len(self.rows), self.q_stride), np.nan, np.float32)
        self.pages = Pages([sum(s) for s in sequences], self.n_kv, dims, cache)
        row = 0
        for i, (tokens, position) in enumerate(sequences):
            # Contents depend only on the shape of the sequence, so that a sequence alone has the same.
            rng = np.random.default_rng([tokens, position])
            shape = (tokens, self.n_heads * self.key_dim)
            self.q[row : row + tokens, : shape[1]] = spread * rng.standard_normal(shape)
            row += tokens
            k, v = (rng.standard_normal((tokens + position, self.n_kv, dim)) for dim in dims)
            self.pages.put(i, k, v)

    @property
    def alibi_heads(self) -> int:
        return 2 ** int(np.log2(self.n_heads)) if self.max_alibi_bias else 0

    def args(self, **fields: Any) -> Array:
        return attention_args(
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
            position_bias=len(self.position_bias) > 0,
            added_keys=self.longest,
            query_step=self.key_dim,
            score_cap=self.score_cap,
            has_sinks=self.has_sinks,
            **fields,
        )

    def decode(
        self, run: Run, splits: int | Sequence[int] = 1, threads: int = 256, within: float = 1e-4
    ) -> Array:
        """Run attention_decode with this number of splits for all rows, or with one for each row."""
        each = [splits] * len(self.rows) if isinstance(splits, int) else splits
        most = max(each)
        size = next(s for s in DECODE_SIZES if s >= max(self.key_dim, self.value_dim))
        blocks = self.n_kv * ceil_div(
            self.n_heads // self.n_kv, _core.attention_sizes(size, 4)["decode_heads"]
        )
        out = Output([len(self.rows), self.n_heads, self.value_dim])
        partial = Output([len(self.rows), self.n_heads, most, self.value_dim + 2])
        rows, args = self.pages.row_table(self.rows, each), self.args(splits=most)
        check(
            run,
            f"attention_decode_{self.name}_{size}",
            *(self.q, rows.view(np.uint8), self.pages.pages, self.pages.k.buffer, self.pages.v.buffer),
            *(out if most == 1 else partial.buffer, args),
            within=within,
            groups=(most, blocks, len(self.rows)),
            threads=(threads,),
        )
        if most > 1:
            groups = (self.n_heads, len(self.rows))
            buffers = (partial.buffer, rows.view(np.uint8), out, args)
            check(run, "attention_combine", *buffers, groups=groups, threads=(64,))
            partial.check()
        return out.check()

    def tiles(self, rows: int) -> Array:
        """Return the tiles, each with this number of stacked rows."""
        tiles, row = [], 0
        for i, (tokens, position) in enumerate(self.sequences):
            stacked = range(0, tokens * self.n_heads // self.n_kv, rows)
            tiles += [
                (row, tokens, position, self.pages.first[i], first, tokens + position) for first in stacked
            ]
            row += tokens
        np.random.default_rng(0).shuffle(tiles)  # results do not depend on their order
        return np.array([tuple(t) for t in tiles], STRUCTS["AttentionTile"])

    def _additions(self, run: Run) -> Array:
        if self.longest:
            return self.added(run, 16)
        return self.position_bias if len(self.position_bias) else self.q  # any buffer: it is not read

    def prefill(self, run: Run, simdgroups: int = 4, **options: Any) -> Array:
        """Run attention_prefill, with a tile for each simdgroup."""
        size = next(s for s in PREFILL_SIZES if s >= max(self.key_dim, self.value_dim))
        blocks = 2 if size == 64 or (size == 128 and self.name == "f16") else 1
        tiles = self.tiles(8 * blocks)
        sizes = _core.attention_sizes(size, self.pages.k.array.itemsize)
        scratch = sizes["prefill_scratch_bytes"]
        simdgroups = min(simdgroups, (32 << 10) // scratch)
        return self._prefill(
            run,
            f"attention_prefill_{self.name}_{size}",
            tiles,
            groups=(ceil_div(len(tiles), simdgroups), self.n_kv * sizes["prefill_value_parts"]),
            threads=(32 * simdgroups,),
            threadgroup_bytes=simdgroups * scratch,
            **options,
        )

    def prefill_on_tensors(self, run: Run, **options: Any) -> Array:
        """Run attention_tensor, with a tile for each threadgroup."""
        tiles = self.tiles(CONSTANTS["ATTENTION_TENSOR_ROWS"])
        return self._prefill(
            run,
            f"attention_tensor_f16_{self.key_dim}",
            tiles,
            groups=(len(tiles), self.n_kv),
            threads=(CONSTANTS["MATMUL_THREADS"],),
            **options,
        )

    def added(self, run: Run, tile_rows: int) -> Array:
        """Run relative_scores, with tiles of this number of rows."""
        tiles = self.tiles(tile_rows)
        out = Output([len(self.rows), self.n_heads, self.longest])
        check(
            run,
            f"relative_scores_{self.name}",
            *(self.relative_keys, self.relative_queries, self.row_of, self.q, tiles.view(np.uint8)),
            *(self.pages.pages, self.pages.k.buffer, out.buffer),
            make_args(
                "RelativeScoresArgs",
                n_heads=self.n_heads,
                key_dim=self.key_dim,
                q_stride=self.q_stride,
                page_stride=self.pages.stride,
                tile_rows=tile_rows,
                context=self.longest,
                keys=self.longest,
                scale=self.scale,
            ),
            groups=(ceil_div(self.longest, 64), len(tiles), self.n_heads),
            threads=(64,),
        )
        return out.check()

    def _prefill(self, run: Run, kernel: str, tiles: Array, **launch: Any) -> Array:
        out = Output([len(self.rows), self.n_heads, self.value_dim], np.float16)
        check(
            run,
            kernel,
            *(self.q, tiles.view(np.uint8), self.pages.pages, self.pages.k.buffer, self.pages.v.buffer),
            *(self._additions(run), self.sinks, out, self.args(tiles=len(tiles))),
            **launch,
        )
        return out.check()
