"""Functions of ``sentence_transformers.util`` over arrays; of PyTorch's tensors, similarities are tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from heapq import nlargest
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from metal_prefill._support.arguments import one_of
from metal_prefill._support.tensors import as_array, like
from metal_prefill.tasks._similarity import maxsim as scores_of_query

__all__ = [
    "SimilarityFunction", "community_detection", "cos_sim", "dot_score", "euclidean_sim", "manhattan_sim",
    "maxsim", "maxsim_pairwise", "normalize_embeddings", "pairwise_cos_sim", "pairwise_dot_score",
    "pairwise_euclidean_sim", "pairwise_manhattan_sim", "paraphrase_mining", "paraphrase_mining_embeddings",
    "quantize_embeddings", "semantic_search", "truncate_embeddings",
]  # fmt: skip

Array: TypeAlias = npt.NDArray[Any]
Similarity: TypeAlias = Callable[[Any, Any], Any]
_TINY = 1e-12  # least norm by which vectors are divided, as in torch.nn.functional.normalize


def normalized(rows: Array) -> Array:
    """Divide vectors by their lengths; those of length 0 stay."""
    return np.asarray(rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), _TINY))


def _floats(value: Any) -> Array:
    """Return numbers in float64 or float32, in which sums of those in half precision do not overflow."""
    array = as_array(value)
    return array if array.dtype in (np.float32, np.float64) else array.astype(np.float32)


def _of_inputs(name: str, of_rows: Similarity, of_pairs: Similarity) -> tuple[Similarity, Similarity]:
    """Return two functions of arrays or tensors, given functions of arrays; vectors are matrices of one row.

    By their names, other processes find them.
    """

    def similarity(a: Any, b: Any) -> Any:
        """Compare each vector of `a` with each of `b`, ``[a, b]``."""
        return like(of_rows(np.atleast_2d(_floats(a)), np.atleast_2d(_floats(b))), a, b)

    def pairwise_similarity(a: Any, b: Any) -> Any:
        """Compare vectors in the same place, ``[a]``."""
        return like(of_pairs(_floats(a), _floats(b)), a, b)

    similarity.__qualname__, pairwise_similarity.__qualname__ = name, f"pairwise_{name}"
    return similarity, pairwise_similarity


def _distances(name: str, order: int) -> tuple[Similarity, Similarity]:
    """Return the functions of negative distances: Manhattan of order 1, Euclidean of order 2."""

    def of_rows(a: Array, b: Array) -> Array:
        rows = [-np.linalg.norm(b - row, order, axis=1) for row in a]
        return np.array(rows, b.dtype).reshape(len(a), len(b))

    return _of_inputs(name, of_rows, lambda a, b: -np.linalg.norm(a - b, order, axis=-1))


cos_sim, pairwise_cos_sim = _of_inputs(
    "cos_sim",
    lambda a, b: normalized(a) @ normalized(b).T,
    lambda a, b: (normalized(a) * normalized(b)).sum(axis=-1),
)
dot_score, pairwise_dot_score = _of_inputs(
    "dot_score", lambda a, b: a @ b.T, lambda a, b: (a * b).sum(axis=-1)
)
pytorch_cos_sim = cos_sim
euclidean_sim, pairwise_euclidean_sim = _distances("euclidean_sim", 2)
manhattan_sim, pairwise_manhattan_sim = _distances("manhattan_sim", 1)


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
        return SIMILARITIES[SimilarityFunction(similarity_function).value][0]

    @staticmethod
    def to_similarity_pairwise_fn(similarity_function: str | SimilarityFunction) -> Similarity:
        """Return the function that compares vectors in the same place."""
        return SIMILARITIES[SimilarityFunction(similarity_function).value][1]


# Functions that compare all vectors with all others, and those in the same place.
SIMILARITIES = {
    "cosine": (cos_sim, pairwise_cos_sim),
    "dot": (dot_score, pairwise_dot_score),
    "euclidean": (euclidean_sim, pairwise_euclidean_sim),
    "manhattan": (manhattan_sim, pairwise_manhattan_sim),
}


class UnsupportedName(AttributeError, NotImplementedError):
    """A name of sentence-transformers that this package lacks."""


def maxsim(queries: Any, documents: Any, *, length_normalize: bool = False) -> npt.NDArray[np.float64]:
    """Return the MaxSim score of each query with each document, ``[queries, documents]``.

    Each argument is a list of matrices, or one matrix. With `length_normalize`, scores are divided by the
    number of tokens of the query.
    """
    found = [_scores(query, _matrices(documents), length_normalize) for query in _matrices(queries)]
    return np.array(found).reshape(len(found), -1)


def maxsim_pairwise(
    queries: Any, documents: Any, *, length_normalize: bool = False
) -> npt.NDArray[np.float64]:
    """Return the MaxSim score of each query with the document in the same place, ``[queries]``."""
    pairs = zip(_matrices(queries), _matrices(documents), strict=True)
    return np.array([_scores(query, [document], length_normalize)[0] for query, document in pairs])


def _scores(query: Any, documents: Sequence[Any], mean: bool) -> npt.NDArray[np.float64]:
    return scores_of_query(query, documents) / (len(query) if mean else 1)


def _matrices(vectors: Any) -> list[npt.NDArray[np.float32]]:
    """Return the matrix of each text, of a list or of one text."""
    whole = [vectors] if getattr(vectors, "ndim", 0) == 2 else vectors
    return [_floats(matrix) for matrix in whole]


def quantize_embeddings(
    embeddings: Any, precision: str, ranges: Array | None = None, calibration_embeddings: Array | None = None
) -> Array:
    """Convert vectors to integers.

    int8 and uint8 divide the range of each dimension, in `ranges` (``[2, dim]``) or of other vectors, into
    256 steps. ``"binary"`` and ``"ubinary"`` keep the sign of each value, eight to a byte.
    """
    one_of("precision", precision, ("float32", "int8", "uint8", "binary", "ubinary"))
    array = as_array(embeddings)
    if array.dtype.kind in "iu":
        raise TypeError(f"embeddings to quantize must be floating point, got {array.dtype}")
    if precision == "float32":
        return array.astype(np.float32)
    if precision.endswith("binary"):
        bits = np.packbits(array > 0, axis=-1)
        return bits if precision == "ubinary" else (bits.astype(np.int16) - 128).astype(np.int8)
    if ranges is None:
        known = array if calibration_embeddings is None else np.asarray(calibration_embeddings)
        if known.ndim == 1 or len(known) < 2:
            raise ValueError(f"{precision} needs ranges or calibration_embeddings for a single embedding")
        ranges = np.vstack((known.min(axis=0), known.max(axis=0)))
    first, last = np.asarray(ranges, np.float32)
    steps = (last - first) / np.float32(255)
    levels: Array = np.clip(np.floor((array - first) / np.where(steps == 0, 1, steps)), 0, 255)
    return levels.astype(np.uint8) if precision == "uint8" else (levels - 128).astype(np.int8)


def semantic_search(
    query_embeddings: Any,
    corpus_embeddings: Any,
    query_chunk_size: int = 100,
    corpus_chunk_size: int = 500000,
    top_k: int = 10,
    score_function: Similarity = cos_sim,
) -> list[list[dict[str, int | float]]]:
    """Return dicts of ``corpus_id`` and ``score`` of the most similar vectors to each query, best first.

    A chunk of queries is compared with the whole corpus: `corpus_chunk_size` has no effect.
    """
    queries, corpus, found = np.atleast_2d(as_array(query_embeddings)), as_array(corpus_embeddings), []
    if not len(corpus):  # vectors of no texts have no length
        return [[] for _ in queries]
    for start in range(0, len(queries), query_chunk_size):
        scores = score_function(queries[start : start + query_chunk_size], corpus)
        found += [_best(row, top_k) for row in np.asarray(scores)]
    return found


def _best(scores: Array, count: int) -> list[dict[str, int | float]]:
    some = np.argpartition(-scores, count)[:count] if count < len(scores) else np.arange(len(scores))
    best = some[np.argsort(-scores[some], kind="stable")]
    return [{"corpus_id": int(i), "score": float(scores[i])} for i in best]


def paraphrase_mining_embeddings(
    embeddings: Any,
    query_chunk_size: int = 5000,
    corpus_chunk_size: int = 100000,
    max_pairs: int = 500000,
    top_k: int = 100,
    score_function: Similarity = cos_sim,
) -> list[list[float | int]]:
    """Return lists of a score and two indices of the most similar pairs of vectors, best first.

    Each vector is compared with the `top_k` that are most similar to it.
    """
    chunks = (query_chunk_size, corpus_chunk_size)
    pairs: dict[tuple[int, int], float] = {}
    for i, items in enumerate(semantic_search(embeddings, embeddings, *chunks, top_k + 1, score_function)):
        for item in [item for item in items if item["corpus_id"] != i][:top_k]:
            j = int(item["corpus_id"])
            pairs.setdefault((min(i, j), max(i, j)), item["score"])
    best = nlargest(max_pairs, pairs.items(), key=lambda item: item[1])
    return [[score, i, j] for (i, j), score in best]


def community_detection(
    embeddings: Any,
    threshold: float = 0.75,
    min_community_size: int = 10,
    batch_size: int = 1024,
    show_progress_bar: bool = False,
) -> list[list[int]]:
    """Return the indices of groups of vectors whose cosine with the first one is at least `threshold`.

    The largest group is first. A vector is in one group only.
    """
    vectors = normalized(_floats(embeddings)) if len(embeddings) else np.empty((0, 1))
    groups: list[tuple[int, Array]] = []
    for start in range(0, len(vectors), batch_size):
        scores = vectors[start : start + batch_size] @ vectors.T
        for center, row in enumerate(scores, start):
            near = np.flatnonzero(row >= threshold)
            if len(near) >= min_community_size:
                groups.append((center, near[np.argsort(-row[near], kind="stable")]))
    groups.sort(key=lambda group: -len(group[1]))
    taken = np.zeros(len(vectors), bool)
    found: list[list[int]] = []
    for center, near in groups:
        free = near[~taken[near]]
        if not taken[center] and len(free) >= min_community_size:
            found.append([center, *(int(i) for i in free if i != center)])
            taken[free] = True
    return sorted(found, key=len, reverse=True)


def normalize_embeddings(embeddings: Any) -> Any:
    """Divide vectors by their lengths."""
    return like(normalized(_floats(embeddings)), embeddings)


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
