"""Products with weights, and the embedding, whose rows are unpacked in the same way."""

import numpy as np
import numpy.typing as npt

from metal_prefill import _core
from metal_prefill.files._gguf_file import TENSOR_TYPES
from metal_prefill.gpu._kernel_checks.captured import (
    SAMPLED_ROWS,
    SAMPLED_TOKENS,
    Captured,
    Expected,
    Values,
    activate_gated,
    rms_normed,
    some_of,
)

_NAMES = _core.tensor_types()
_TYPES = {t.name.lower(): number for number, t in TENSOR_TYPES.items() if t.name in _NAMES}


class Matrix:
    """Stacked weight matrices, unpacked by row; by default those of a product."""

    def __init__(
        self,
        d: Captured,
        *,
        columns: int | None = None,
        rows: list[int] | None = None,
        offsets: list[int] | None = None,
    ) -> None:
        self._data = d.before(0, np.uint8)
        self._type = _TYPES[_type_of(d.kernel)]
        self._columns = d.args["in_dim"] if columns is None else columns
        self._row_bytes = d.args["row_bytes"]
        self._offsets = d.offsets if offsets is None else offsets
        self._rows = d.args["rows"] if rows is None else rows

    def rows(self, indices: npt.NDArray[np.int64]) -> Values:
        """Return rows of the stack, float64 ``[indices][columns]``."""
        ends = np.cumsum(self._rows)
        which = np.searchsorted(ends, indices, side="right")
        return self.rows_of(which, indices - (ends - self._rows)[which])

    def rows_of(self, which: npt.NDArray[np.int64], rows: npt.NDArray[np.int64]) -> Values:
        """Return one row of one matrix for each pair of `which` and `rows`."""
        found = []
        for matrix, row in zip(which, rows, strict=True):
            start = self._offsets[int(matrix)] + int(row) * self._row_bytes
            data = np.ascontiguousarray(self._data[start : start + self._row_bytes])
            found.append(_core.dequantize(self._type, data, self._columns))
        return np.array(found, np.float64)


def _type_of(kernel: str) -> str:
    words = [name for name in sorted(_TYPES, key=len, reverse=True) if f"_{name}" in kernel]
    return words[0]


def embed(d: Captured) -> Expected:
    dim, row_bytes = d.args["dim"], d.args["row_bytes"]
    ids, table = d.before(1, np.int32)[:: d.args["id_stride"]], d.before(0, np.uint8)
    for token in some_of(d.args["tokens"], SAMPLED_TOKENS):
        start = int(ids[token]) * row_bytes
        row = _core.dequantize(
            _TYPES[_type_of(d.kernel)], np.ascontiguousarray(table[start : start + row_bytes]), dim
        )
        where = slice(token * dim, (token + 1) * dim)
        before = d.before(2, np.float32)[where] if d.args["accumulate"] else 0.0
        yield d.after(2, np.float32)[where], row.astype(np.float64) * d.args["scale"] + before


def product(d: Captured) -> Expected:
    """Yield matrix products with their fused steps: norm before, activation after, addition to the output."""
    args, kernel = d.args, d.kernel
    normed, gated = kernel.startswith("rmsnorm_"), "swiglu" in kernel
    half = kernel.startswith("matmul")
    x_binding, y_binding = (2, 3) if normed else (1, 2)
    x = d.before(x_binding, np.float16 if half else np.float32)
    y_type = np.float16 if half and gated else np.float32
    adds = kernel.endswith("_accumulate") or bool(args.get("accumulate"))
    width, stride = args["in_dim"], args["out_stride"]
    rows = some_of(args["out_dim"], SAMPLED_ROWS)
    matrix = Matrix(d)
    weights = [matrix.rows(rows)]
    if gated:
        weights = [matrix.rows_of(np.full(len(rows), i), rows) for i in range(2)]
    for token in some_of(args["tokens"], SAMPLED_TOKENS):
        vector = x[token * width : (token + 1) * width].astype(np.float64)
        if normed:
            vector = rms_normed(vector, d.before(1, np.float32)[:width].astype(np.float64), args["eps"])
        products = [w @ vector for w in weights]
        expected = activate_gated(products[0], products[1], args["activation"]) if gated else products[0]
        where = token * stride + rows
        yield (
            d.after(y_binding, y_type)[where],
            expected + (d.before(y_binding, y_type)[where] if adds else 0.0),
        )
