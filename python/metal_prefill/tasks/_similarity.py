"""Similarities of texts, computed from their tokens' vectors."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt


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
