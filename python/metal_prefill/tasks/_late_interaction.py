"""Late interaction: texts are compared by the vectors of their tokens."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from metal_prefill._support.tensors import as_array
from metal_prefill.tasks._embedding import EncodedText, vectors_of
from metal_prefill.tasks._text_passes import Ids, TextPasses


def maxsim(
    query: npt.NDArray[np.float32], documents: Iterable[npt.NDArray[np.float32]]
) -> npt.NDArray[np.float64]:
    """Return the score of each document: the sum of each query token's largest similarity.

    The scores are those of :meth:`metal_prefill.Model.rerank` for vectors of
    :meth:`metal_prefill.Model.embed` with pooling ``"none"`` and instructions ``"query"`` and ``"document"``.

    Parameters
    ----------
    query
        Vectors of the tokens of a query, ``[tokens, dim]``.
    documents
        Vectors of the tokens of each document, ``[tokens, dim]``. One without tokens has the score 0.

    Raises
    ------
    ValueError
        An array is not a matrix, or has vectors of another length than the query.

    Notes
    -----
    MaxSim of arXiv:2004.12832, equation 3. Similarities are inner products.
    """
    scores = []
    for i, tokens in enumerate(documents):
        if np.ndim(query) != 2 or np.ndim(tokens) != 2 or query.shape[1] != tokens.shape[1]:
            raise ValueError(
                f"document {i} has the shape {np.shape(tokens)} and the query {np.shape(query)}: both must "
                "be matrices of tokens with vectors of one length"
            )
        largest = (query @ tokens.T).max(axis=1) if len(tokens) else np.zeros(1, np.float32)
        scores.append(largest.sum(dtype=np.float64))
    return np.array(scores, np.float64)


def query_scores(queries: Any, documents: Any, *, length_normalize: bool = False) -> npt.NDArray[np.float64]:
    """Return the MaxSim score of each query with each document, ``[queries, documents]``.

    Each argument is a list of matrices, or one matrix. With `length_normalize`, scores are divided by the
    number of tokens of the query.
    """
    found = [_scores(query, _matrices(documents), length_normalize) for query in _matrices(queries)]
    return np.array(found).reshape(len(found), -1)


def pair_scores(queries: Any, documents: Any, *, length_normalize: bool = False) -> npt.NDArray[np.float64]:
    """Return the MaxSim score of each query with the document in the same place, ``[queries]``."""
    pairs = zip(_matrices(queries), _matrices(documents), strict=True)
    return np.array([_scores(query, [document], length_normalize)[0] for query, document in pairs])


def _scores(query: Any, documents: Sequence[Any], mean: bool) -> npt.NDArray[np.float64]:
    return maxsim(query, documents) / (len(query) if mean else 1)


def _matrices(vectors: Any) -> list[npt.NDArray[np.float32]]:
    """Return the matrix of each text, of a list or of one text."""
    whole = [vectors] if getattr(vectors, "ndim", 0) == 2 else vectors
    return [as_array(matrix) for matrix in whole]


def late_scores(
    passes: TextPasses, query: EncodedText, documents: Sequence[Ids], skipped: Sequence[int]
) -> list[float]:
    """Return the MaxSim score of each document, without its `skipped` tokens."""
    names = ["the query", *(f"document {i}" for i in range(len(documents)))]
    expansions = [query.expansion, *(0 for _ in documents)]
    vectors = iter(vectors_of(passes, "none", [query.ids, *documents], names, expansions))
    asked = next(vectors)
    kept = (tokens[~np.isin(ids, skipped)] for ids, tokens in zip(documents, vectors, strict=True))
    return [float(score) for score in maxsim(asked, kept)]
