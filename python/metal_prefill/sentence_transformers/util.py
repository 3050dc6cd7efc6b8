"""Functions of ``sentence_transformers.util`` over arrays; of PyTorch's tensors, similarities are tensors."""

from collections.abc import Sequence
from typing import Any

from metal_prefill._support.tensors import as_array, like
from metal_prefill.tasks._similarity import (
    SimilarityFunction,
    community_detection,
    cos_sim,
    dot_score,
    euclidean_sim,
    manhattan_sim,
    normalized,
    pairwise_cos_sim,
    pairwise_dot_score,
    pairwise_euclidean_sim,
    pairwise_manhattan_sim,
    paraphrase_mining_embeddings,
    quantize_embeddings,
    semantic_search,
)
from metal_prefill.tasks._similarity import pair_scores as maxsim_pairwise
from metal_prefill.tasks._similarity import query_scores as maxsim

__all__ = [
    "SimilarityFunction", "community_detection", "cos_sim", "dot_score", "euclidean_sim", "manhattan_sim",
    "maxsim", "maxsim_pairwise", "normalize_embeddings", "pairwise_cos_sim", "pairwise_dot_score",
    "pairwise_euclidean_sim", "pairwise_manhattan_sim", "paraphrase_mining", "paraphrase_mining_embeddings",
    "quantize_embeddings", "semantic_search", "truncate_embeddings",
]  # fmt: skip

pytorch_cos_sim = cos_sim


class UnsupportedName(AttributeError, NotImplementedError):
    """A name of sentence-transformers that this package lacks."""


def normalize_embeddings(embeddings: Any) -> Any:
    """Divide vectors by their lengths."""
    return like(normalized(as_array(embeddings)), embeddings)


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
