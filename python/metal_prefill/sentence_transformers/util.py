"""Functions of ``sentence_transformers.util`` over arrays.

Tensors of PyTorch are accepted, and then the results are tensors.
"""

import sys
from collections.abc import Sequence
from enum import Enum
from functools import wraps
from typing import Any

import numpy as np

from metal_prefill.errors import MissingExtraError
from metal_prefill.tasks._vectors import (
    Array,
    Similarity,
    community_detection,
    cosines,
    normalized,
    paraphrase_mining_embeddings,
    quantize_embeddings,
    semantic_search,
)

__all__ = ["community_detection", "paraphrase_mining_embeddings", "quantize_embeddings", "semantic_search"]


class UnsupportedName(AttributeError, NotImplementedError):
    """A name of sentence-transformers that this package lacks."""


def is_tensor(value: Any) -> bool:
    """Return whether a value is a tensor of PyTorch, or a list of them."""
    torch = sys.modules.get("torch")
    first = value[0] if isinstance(value, (list, tuple)) and value else value
    return torch is not None and isinstance(first, torch.Tensor)


def as_tensor(value: Any) -> Any:
    """Convert an array to a tensor of PyTorch, or raise MissingExtraError without it."""
    try:
        import torch
    except ImportError as error:
        raise MissingExtraError(f"tensors need PyTorch: pip install torch ({error})") from error
    return torch.from_numpy(np.ascontiguousarray(value))


def as_array(value: Any) -> Array:
    """Convert an array, a tensor or a list of them to an array."""
    if is_tensor(value) and isinstance(value, (list, tuple)):
        return np.stack([as_array(item) for item in value])
    return value.detach().cpu().numpy() if is_tensor(value) else np.asarray(value)


def _result(array: Array, *inputs: Any) -> Any:
    return as_tensor(array) if any(map(is_tensor, inputs)) else array


def _rows(value: Any) -> Array:
    array = np.atleast_2d(as_array(value))
    return array if array.dtype.kind == "f" else array.astype(np.float32)


class SimilarityFunction(Enum):
    """Names of similarities of vectors."""

    COSINE = "cosine"
    DOT_PRODUCT = "dot"
    EUCLIDEAN = "euclidean"
    MANHATTAN = "manhattan"


def _of_rows(compare: Similarity) -> Similarity:
    """Return a function of arrays or tensors, given the one of their rows."""

    @wraps(compare)
    def of_inputs(a: Any, b: Any) -> Any:
        return _result(compare(_rows(a), _rows(b)), a, b)

    return of_inputs


def _distances(a: Array, b: Array, order: int) -> Array:
    return np.stack([-np.linalg.norm(b - row, order, axis=1) for row in a])


@_of_rows
def cos_sim(a: Any, b: Any) -> Any:
    """Return the cosine of each vector of `a` with each of `b`, ``[a, b]``."""
    return cosines(a, b)


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


@_of_rows
def pairwise_cos_sim(a: Any, b: Any) -> Any:
    """Return the cosine of vectors in the same place, ``[a]``."""
    return (normalized(a) * normalized(b)).sum(axis=-1)


@_of_rows
def pairwise_dot_score(a: Any, b: Any) -> Any:
    """Return the inner product of vectors in the same place, ``[a]``."""
    return (a * b).sum(axis=-1)


@_of_rows
def pairwise_euclidean_sim(a: Any, b: Any) -> Any:
    """Return the negative Euclidean distance of vectors in the same place, ``[a]``."""
    return -np.linalg.norm(a - b, axis=-1)


@_of_rows
def pairwise_manhattan_sim(a: Any, b: Any) -> Any:
    """Return the negative Manhattan distance of vectors in the same place, ``[a]``."""
    return -np.linalg.norm(a - b, 1, axis=-1)


pytorch_cos_sim = cos_sim
# Functions that compare all vectors with all others, and those in the same place.
SIMILARITIES: dict[SimilarityFunction, tuple[Similarity, Similarity]] = {
    SimilarityFunction.COSINE: (cos_sim, pairwise_cos_sim),
    SimilarityFunction.DOT_PRODUCT: (dot_score, pairwise_dot_score),
    SimilarityFunction.EUCLIDEAN: (euclidean_sim, pairwise_euclidean_sim),
    SimilarityFunction.MANHATTAN: (manhattan_sim, pairwise_manhattan_sim),
}


def normalize_embeddings(embeddings: Any) -> Any:
    """Divide vectors by their lengths."""
    return _result(normalized(as_array(embeddings)), embeddings)


def truncate_embeddings(embeddings: Any, truncate_dim: int | None) -> Any:
    """Keep the first values of vectors."""
    return embeddings[..., :truncate_dim]


def paraphrase_mining(
    model: Any,
    sentences: Sequence[str],
    show_progress_bar: bool = False,
    batch_size: int = 32,
    *arguments: Any,
    truncate_dim: int | None = None,
    prompt_name: str | None = None,
    prompt: str | None = None,
    **options: Any,
) -> list[list[float | int]]:
    """Find the most similar pairs of sentences.

    Further arguments are those of :func:`paraphrase_mining_embeddings`.
    """
    embeddings = model.encode(
        sentences, prompt_name, prompt, batch_size, show_progress_bar, truncate_dim=truncate_dim
    )
    return paraphrase_mining_embeddings(embeddings, *arguments, **options)


def __getattr__(name: str) -> Any:
    raise UnsupportedName(f"{__name__}.{name} is not supported")
