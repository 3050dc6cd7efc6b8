"""Steps of encoders in float64, on the tensors of a model folder by the names of transformers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


class FolderTensors:
    """Tensors of a folder in float64, and steps that use them."""

    def __init__(self, tensors: Mapping[str, npt.NDArray[Any]], prefix: str = "", eps: float = 1e-12) -> None:
        self._tensors = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
        self._prefix = prefix
        self._eps = eps

    def __getitem__(self, name: str) -> Array:
        return self._tensors[self._prefix + name]

    def linear(self, name: str, x: Array) -> Array:
        """Multiply by a matrix, and add its bias if it has one."""
        y: Array = x @ self[f"{name}.weight"].T
        return y + self._tensors.get(f"{self._prefix}{name}.bias", 0.0)

    def normed(self, name: str, x: Array) -> Array:
        """Return the LayerNorm of rows."""
        x = x - x.mean(axis=1, keepdims=True)
        normed: Array = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + self._eps)
        return normed * self[f"{name}.weight"] + self[f"{name}.bias"]


def attended(
    q: Array,
    k: Array,
    v: Array,
    heads: int,
    *,
    seen: int | None = None,
    slopes: Sequence[float] = (),
    bias: Array | None = None,
) -> Array:
    """Return attention of ``[n, dim]`` to the first `seen` tokens.

    Slopes of ALiBi are those of each head; `bias` is added to scores, ``[heads, n, n]``.
    """
    q, k, v = (np.stack(np.split(x, heads, axis=1)) for x in (q, k, v))
    scores = q @ k[:, :seen].swapaxes(1, 2) / math.sqrt(q.shape[2])
    if slopes:
        place = np.arange(q.shape[1])
        scores = scores - np.reshape(slopes, (-1, 1, 1)) * np.abs(place[:, None] - place[None, :seen])
    if bias is not None:
        scores = scores + bias
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    joined: Array = np.concatenate(list(weights / weights.sum(axis=2, keepdims=True) @ v[:, :seen]), axis=1)
    return joined


def gelu(x: Array) -> Array:
    """Return ``x * P(X <= x)`` for a standard normal X."""
    exact: Array = x / 2 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    return exact
