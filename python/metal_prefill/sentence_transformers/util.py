"""Functions of ``sentence_transformers.util`` over arrays.

Tensors of PyTorch are accepted, and then the results are tensors.
"""

import sys
from collections.abc import Sequence
from enum import Enum
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


def _of_rows(*functions: Similarity) -> list[Similarity]:
    """Return functions of arrays or tensors, given those of their rows."""

    def of_rows(compare: Similarity) -> Similarity:
        return lambda a, b: _result(compare(_rows(a), _rows(b)), a, b)

    return list(map(of_rows, functions))


def _distances(order: int) -> list[Similarity]:
    return _of_rows(
        lambda a, b: np.stack([-np.linalg.norm(b - row, order, axis=1) for row in a]),
        lambda a, b: -np.linalg.norm(a - b, order, axis=-1),
    )


# Functions of two arrays that compare all vectors with all others, ``[a, b]``, and those in the same place,
# ``[a]``. Distances are negative.
SIMILARITIES: dict[SimilarityFunction, list[Similarity]] = {
    SimilarityFunction.COSINE: _of_rows(cosines, lambda a, b: (normalized(a) * normalized(b)).sum(axis=-1)),
    SimilarityFunction.DOT_PRODUCT: _of_rows(lambda a, b: a @ b.T, lambda a, b: (a * b).sum(axis=-1)),
    SimilarityFunction.EUCLIDEAN: _distances(2),
    SimilarityFunction.MANHATTAN: _distances(1),
}
cos_sim, pairwise_cos_sim = SIMILARITIES[SimilarityFunction.COSINE]
pytorch_cos_sim = cos_sim
dot_score, pairwise_dot_score = SIMILARITIES[SimilarityFunction.DOT_PRODUCT]
euclidean_sim, pairwise_euclidean_sim = SIMILARITIES[SimilarityFunction.EUCLIDEAN]
manhattan_sim, pairwise_manhattan_sim = SIMILARITIES[SimilarityFunction.MANHATTAN]


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
