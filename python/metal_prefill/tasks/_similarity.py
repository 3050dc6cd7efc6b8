"""Similarities of vectors, which are arrays or tensors of PyTorch; of tensors, the results are tensors."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from functools import wraps
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from metal_prefill._support.tensors import as_array, like

Array: TypeAlias = npt.NDArray[Any]
Similarity: TypeAlias = Callable[[Any, Any], Any]
_TINY = 1e-12  # least norm by which vectors are divided, as in torch.nn.functional.normalize


def normalized(rows: Array) -> Array:
    """Divide vectors by their lengths; those of length 0 stay."""
    return np.asarray(rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), _TINY))


def _floats(value: Any) -> Array:
    array = as_array(value)
    return array if array.dtype.kind == "f" else array.astype(np.float32)


def _of_pairs(compare: Similarity) -> Similarity:
    """Return a function of arrays or tensors, given the one of arrays."""

    @wraps(compare)
    def of_inputs(a: Any, b: Any) -> Any:
        return like(compare(_floats(a), _floats(b)), a, b)

    return of_inputs


def _of_rows(compare: Similarity) -> Similarity:
    """Return a function of arrays or tensors, given the one of matrices; vectors are matrices of one row."""
    return _of_pairs(wraps(compare)(lambda a, b: compare(np.atleast_2d(a), np.atleast_2d(b))))


def _distances(a: Array, b: Array, order: int) -> Array:
    rows = [-np.linalg.norm(b - row, order, axis=1) for row in a]
    return np.array(rows, b.dtype).reshape(len(a), len(b))


@_of_rows
def cos_sim(a: Any, b: Any) -> Any:
    """Return the cosine of each vector of `a` with each of `b`, ``[a, b]``."""
    return normalized(a) @ normalized(b).T


@_of_rows
def dot_score(a: Any, b: Any) -> Any:
    """Return the inner product of each vector of `a` with each of `b`, ``[a, b]``."""
    return a @ b.T


@_of_rows
def euclidean_sim(a: Any, b: Any) -> Any:
    """Return the negative Euclidean distance of each vector of `a` to each of `b`, ``[a, b]``."""
    return _distances(a, b, 2)


@_of_rows
def manhattan_sim(a: Any, b: Any) -> Any:
    """Return the negative Manhattan distance of each vector of `a` to each of `b`, ``[a, b]``."""
    return _distances(a, b, 1)


@_of_pairs
def pairwise_cos_sim(a: Any, b: Any) -> Any:
    """Return the cosine of vectors in the same place, ``[a]``."""
    return (normalized(a) * normalized(b)).sum(axis=-1)


@_of_pairs
def pairwise_dot_score(a: Any, b: Any) -> Any:
    """Return the inner product of vectors in the same place, ``[a]``."""
    return (a * b).sum(axis=-1)


@_of_pairs
def pairwise_euclidean_sim(a: Any, b: Any) -> Any:
    """Return the negative Euclidean distance of vectors in the same place, ``[a]``."""
    return -np.linalg.norm(a - b, axis=-1)


@_of_pairs
def pairwise_manhattan_sim(a: Any, b: Any) -> Any:
    """Return the negative Manhattan distance of vectors in the same place, ``[a]``."""
    return -np.linalg.norm(a - b, 1, axis=-1)


class SimilarityFunction(Enum):
    """Names of similarities of vectors."""

    COSINE = "cosine"
    DOT_PRODUCT = "dot"
    EUCLIDEAN = "euclidean"
    MANHATTAN = "manhattan"

    @staticmethod
    def possible_values() -> list[str]:
        """Return the names."""
        return [item.value for item in SimilarityFunction]

    @staticmethod
    def to_similarity_fn(similarity_function: str | SimilarityFunction) -> Similarity:
        """Return the function that compares all vectors with all others."""
        return SIMILARITIES[SimilarityFunction(similarity_function)][0]

    @staticmethod
    def to_similarity_pairwise_fn(similarity_function: str | SimilarityFunction) -> Similarity:
        """Return the function that compares vectors in the same place."""
        return SIMILARITIES[SimilarityFunction(similarity_function)][1]


# Functions that compare all vectors with all others, and those in the same place.
SIMILARITIES: dict[SimilarityFunction, tuple[Similarity, Similarity]] = {
    SimilarityFunction.COSINE: (cos_sim, pairwise_cos_sim),
    SimilarityFunction.DOT_PRODUCT: (dot_score, pairwise_dot_score),
    SimilarityFunction.EUCLIDEAN: (euclidean_sim, pairwise_euclidean_sim),
    SimilarityFunction.MANHATTAN: (manhattan_sim, pairwise_manhattan_sim),
}
