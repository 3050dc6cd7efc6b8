"""K and V of several sequences in unordered pages, among pages and rows full of NaN."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from support.kernels.kernel_harness import CONSTANTS, STRUCTS, Array, Output, ceil_div

PAGE = CONSTANTS["PAGE_POSITIONS"]


class Pages:
    """Pools of K and V of a layer, with room for sequences of the given lengths."""

    def __init__(self, lengths: Sequence[int], n_kv: int, dims: tuple[int, int], cache: Any) -> None:
        self.lengths, self.n_kv, self.dims = list(lengths), n_kv, dims
        counts = [ceil_div(n, PAGE) for n in lengths]
        pool = sum(counts) + 3
        order = np.random.default_rng(pool).permutation(pool)
        self.tables = np.split(order[: sum(counts)], np.cumsum(counts)[:-1])
        # Block tables are contiguous, in the order of the sequences.
        self.pages = np.concatenate(self.tables).astype(np.uint32)
        self.first = np.concatenate([[0], np.cumsum(counts)])
        self.stride = PAGE * n_kv * max(dims) + 8
        self.k, self.v = (Output([pool, self.stride], cache) for _ in range(2))

    def rows(self, sequence: int, values: bool) -> list[Array]:
        """Return views of a sequence's positions, [n_kv][dim] each."""
        pool, dim = (self.v, self.dims[1]) if values else (self.k, self.dims[0])
        row = self.n_kv * dim
        return [
            pool.array[self.tables[sequence][p // PAGE], p % PAGE * row : (p % PAGE + 1) * row].reshape(
                self.n_kv, dim
            )
            for p in range(self.lengths[sequence])
        ]

    def put(self, sequence: int, k: Array, v: Array) -> None:
        """Write the first positions of a sequence."""
        for values, rows in ((False, k), (True, v)):
            for place, row in zip(self.rows(sequence, values), rows, strict=False):
                place[...] = row

    def get(self, sequence: int, values: bool) -> Array:
        return np.array(self.rows(sequence, values))

    def copies(self) -> tuple[Array, Array]:
        """Return both pools after checking their sentinels."""
        return self.k.check().copy(), self.v.check().copy()

    def row_table(self, rows: Sequence[tuple[int, int]], splits: Sequence[int] | None = None) -> Array:
        """Make the PassRow of each (sequence, position), with its number of splits."""
        table = np.zeros(len(rows), STRUCTS["PassRow"])
        for i, (sequence, position) in enumerate(rows):
            n = splits[i] if splits else 1
            table[i] = (position, self.first[sequence], n, ceil_div(position + 1, n))
        return table
