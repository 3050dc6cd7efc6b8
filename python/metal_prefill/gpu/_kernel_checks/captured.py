"""A dispatch with the contents of its buffers, and functions for several steps."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from metal_prefill import _core
from metal_prefill.gpu._trace import decode_args

Values = npt.NDArray[Any]
Expected = Iterator[tuple[Values, Values]]  # actual and expected results
SILU = _core.shader_constants["ACTIVATION_SILU"]
_RELU = _core.shader_constants["ACTIVATION_RELU"]
_GELU_ERF = _core.shader_constants["ACTIVATION_GELU_ERF"]
_CLAMPED_SILU = _core.shader_constants["ACTIVATION_CLAMPED"]
SAMPLED_ROWS = 24  # of a matrix
_SAMPLED_TOKENS = 3


class Captured:
    """A dispatch with the contents of its buffers."""

    def __init__(
        self,
        dispatch: _core.Dispatch,
        sampled: bool = True,  # compare some tokens, and some rows of a matrix, instead of all
    ) -> None:
        self._sampled = sampled
        self.kernel = dispatch.kernel
        self.args = decode_args(dispatch.args_struct, dispatch.args)
        self.grid = dispatch.grid
        self._dispatch = dispatch

    @property
    def offsets(self) -> list[int]:
        """Offsets of the stacked matrices, in bytes from the binding."""
        return [int(n) for n in np.frombuffer(self._dispatch.args, np.uint64, len(self.args["rows"]))]

    @property
    def out(self) -> Any:
        """Type of the results, by the kernel's name."""
        return np.float16 if self.kernel.endswith("f16") else np.float32

    def before(self, binding: int, dtype: Any) -> Values:
        """Return the contents of a buffer, from its binding on, before the dispatch."""
        return _as(np.asarray(self._dispatch.before(binding)), dtype)

    def floats(self, binding: int, part: int | slice) -> Values:
        """Return a slice, or the first `part` values, of a float32 buffer before the dispatch, as float64."""
        part = slice(part) if isinstance(part, int) else part
        return self.before(binding, np.float32)[part].astype(np.float64)

    def after(self, binding: int, dtype: Any) -> Values:
        """Return the contents of a buffer, from its binding on, after the dispatch."""
        return _as(np.asarray(self._dispatch.after(binding)), dtype)

    def some(self, n: int, most: int = _SAMPLED_TOKENS) -> npt.NDArray[np.int64]:
        """Return which of n tokens, or of n rows, are compared, including the first and the last."""
        most = min(n, most) if self._sampled else n
        return np.unique(np.linspace(0, n - 1, most).astype(np.int64))

    def places(self, n: int, width: int, stride: int | None = None) -> Iterator[slice]:
        """Yield the places of the rows of `some` of n tokens."""
        for token in self.some(n):
            first = int(token) * (width if stride is None else stride)
            yield slice(first, first + width)


def _as(data: npt.NDArray[np.uint8], dtype: Any) -> Values:
    size = np.dtype(dtype).itemsize
    return data[: data.size // size * size].view(dtype)


def activate(x: Values, activation: int) -> Values:
    if activation == _RELU:
        return np.maximum(x, 0.0)
    if activation == _GELU_ERF:
        return 0.5 * x * (1.0 + np.array([math.erf(value) for value in x.ravel() / math.sqrt(2.0)]))
    argument = x if activation == SILU else 1.5957691216057308 * (x + 0.044715 * x**3)
    return x / (1.0 + np.exp(-argument))


def activate_gated(gate: Values, up: Values, activation: int) -> Values:
    if activation == _CLAMPED_SILU:
        gate, up = np.minimum(gate, 7.0), np.clip(up, -7.0, 7.0)  # as in gpt-oss
        return gate / (1.0 + np.exp(-1.702 * gate)) * (up + 1.0)
    return activate(gate, activation) * up


def rms_normed(x: Values, weight: Values, eps: float) -> Values:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight
