"""Products with weights, also of experts, and the embedding, whose rows are unpacked in the same way."""

import numpy as np
import numpy.typing as npt

from metal_prefill import _core
from metal_prefill.files._gguf_file import SUPPORTED_TYPES
from metal_prefill.gpu._kernel_checks.captured import (
    SAMPLED_ROWS,
    Captured,
    Expected,
    Values,
    activate,
    activate_gated,
    rms_normed,
)
from metal_prefill.gpu._trace import layout_of

_ROUTE, _TILE = layout_of("Route"), layout_of("ExpertTile")
_TILE_PLACES = _core.shader_constants["MATMUL_NARROW_TILE"]
_TYPES = {kind.name.lower(): number for number, kind in SUPPORTED_TYPES.items()}


class Matrix:
    """Stacked weight matrices of a product, or a single matrix of a given shape, unpacked by row."""

    def __init__(self, d: Captured, single: tuple[int, int] | None = None) -> None:
        self._data = d.before(0, np.uint8)
        self._type = _TYPES[max((name for name in _TYPES if f"_{name}" in d.kernel), key=len)]
        self._row_bytes = d.args["row_bytes"]
        if single is None:
            self._rows, self._columns, self._offsets = d.args["rows"], d.args["in_dim"], d.offsets
        else:
            self._rows, self._columns, self._offsets = [single[0]], single[1], [0]

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


def embed(d: Captured) -> Expected:
    dim, tokens = d.args["dim"], d.some(d.args["tokens"])
    table = Matrix(d, (d.args["vocab_size"], dim))
    ids = d.before(1, np.int32)[:: d.args["id_stride"]]
    for token, row in zip(tokens, table.rows(ids[tokens].astype(np.int64)), strict=True):
        where = slice(token * dim, (token + 1) * dim)
        before = d.before(2, np.float32)[where] if d.args["accumulate"] else 0.0
        yield d.after(2, np.float32)[where], row * d.args["scale"] + before


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
    rows = d.some(args["out_dim"], SAMPLED_ROWS)
    matrix = Matrix(d)
    weights = [matrix.rows(rows)]
    if gated:
        weights = [matrix.rows_of(np.full(len(rows), i), rows) for i in range(2)]
    for token in d.some(args["tokens"]):
        vector = x[token * width : (token + 1) * width].astype(np.float64)
        if normed:
            vector = rms_normed(vector, d.floats(1, width), args["eps"])
        products = [w @ vector for w in weights]
        expected = activate_gated(products[0], products[1], args["activation"]) if gated else products[0]
        where = token * stride + rows
        yield (
            d.after(y_binding, y_type)[where],
            expected + (d.before(y_binding, y_type)[where] if adds else 0.0),
        )


def choose_experts(d: Captured) -> Expected:
    """Compare factors: if two scores nearly agree, the order of their experts may differ."""
    args, used = d.args, d.args["used"]
    dim, experts = args["dim"], args["experts"]
    routes = d.after(5, _ROUTE)
    norm = d.floats(1, dim)
    bias, offset = (
        d.floats(binding, experts) if args[has] else np.zeros(experts)
        for binding, has in ((2, "has_bias"), (3, "has_offset"))
    )
    router = Matrix(d, (experts, dim)).rows(np.arange(experts))
    for token in d.some(d.grid[0]):
        x = d.floats(4, slice(token * dim, (token + 1) * dim))
        products = router @ (rms_normed(x, norm, args["eps"]) if args["has_norm"] else x) + offset
        if args["sigmoid"]:
            scores = 1 / (1 + np.exp(-products))
        else:
            powers = np.exp(products - products.max())
            scores = powers / powers.sum()
        own = routes[token * used : (token + 1) * used]
        best = np.argsort(-(scores + bias), kind="stable")[:used]
        for chosen in (own["expert"], best):
            divisor = scores[chosen].sum() if args["normalize"] else 1.0
            yield own["factor"], scores[chosen] / divisor * args["scale"]


def sort_routes(d: Captured) -> Expected:
    used, count = d.args["used"], d.args["routes"]
    experts = d.before(0, _ROUTE)["expert"][:count]
    order = np.argsort(experts, kind="stable")
    places = np.empty(count)
    places[order] = np.arange(count)
    yield d.after(0, _ROUTE)["place"][:count], places
    yield d.after(1, np.uint32)[:count], (order // used).astype(np.float64)
    tiles = []
    first = 0
    for expert, rows in enumerate(np.bincount(experts, minlength=d.args["experts"])):
        for done in range(0, rows, _TILE_PLACES):
            tiles.append((expert, first + done, min(rows - done, _TILE_PLACES)))
        first += rows
    tiles += [(0, 0, 0)] * (d.args["tiles"] - len(tiles))
    expected = np.array(tiles, np.float64)
    for i, name in enumerate(("expert", "first", "count")):
        yield d.after(2, _TILE)[name][: len(tiles)], expected[:, i]


def add_experts(d: Captured) -> Expected:
    dim, used = d.args["dim"], d.args["used"]
    y = d.before(1, np.float32)
    for token in d.some(d.grid[1]):
        where = slice(token * dim, (token + 1) * dim)
        expected = d.floats(2, where)
        for route in d.before(0, _ROUTE)[token * used : (token + 1) * used]:
            place = int(route["place"])
            expected = expected + float(route["factor"]) * y[place * dim : (place + 1) * dim]
        yield d.after(2, np.float32)[where], expected


def _of_experts(d: Captured, expert: int, x: Values, rows: Values) -> Values:
    """Return products of rows of an expert, activated if the kernel does so."""
    first, gated = expert * d.args["out_dim"] + rows, d.args["rows"][1] > 0
    matrix = Matrix(d)
    products = [matrix.rows_of(np.full(len(rows), which), first) @ x for which in range(1 + gated)]
    if d.args["has_bias"]:
        bias = d.before(1, np.float32).astype(np.float64)
        products = [y + bias[i * d.args["rows"][0] + first] for i, y in enumerate(products)]
    if gated:
        return activate_gated(products[0], products[1], d.args["activation"])
    return activate(products[0], d.args["activation"]) if "swiglu" in d.kernel else products[0]


def matvec_experts(d: Captured) -> Expected:
    width, out_dim = d.args["in_dim"], d.args["out_dim"]
    rows, x = d.some(out_dim, SAMPLED_ROWS), d.before(2, np.float32)
    for route in d.some(d.grid[1]):
        token = int(route) // d.args["used"] if "swiglu" in d.kernel else int(route)
        expert = int(d.before(3, _ROUTE)["expert"][route])
        expected = _of_experts(d, expert, x[token * width : (token + 1) * width].astype(np.float64), rows)
        yield d.after(4, np.float32)[route * out_dim + rows], expected


def matmul_experts(d: Captured) -> Expected:
    width, out_dim, both = d.args["in_dim"], d.args["out_dim"], "swiglu" in d.kernel
    rows, x = d.some(out_dim, SAMPLED_ROWS), d.before(2, np.float16)
    tiles = d.before(4 if both else 3, _TILE)[: d.grid[1]]
    tiles = tiles[tiles["count"] > 0]
    for i in d.some(len(tiles)):
        tile = tiles[i]
        for place in int(tile["first"]) + d.some(int(tile["count"])):
            row = int(d.before(3, np.uint32)[place]) if both else place
            vector = x[row * width : (row + 1) * width].astype(np.float64)
            expected = _of_experts(d, int(tile["expert"]), vector, rows)
            y = d.after(5 if both else 4, np.float16 if both else np.float32)
            yield y[place * out_dim + rows], expected
