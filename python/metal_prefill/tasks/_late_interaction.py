"""Late interaction: texts are compared by the vectors of their tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from metal_prefill.engine import Engine
from metal_prefill.errors import GGUFError
from metal_prefill.files._metadata_keys import SKIPPED_KEY
from metal_prefill.tasks._embedding import EncodedText, vectors_of
from metal_prefill.tasks._text_passes import Ids, TextPasses


def late_scores(passes: TextPasses, query: EncodedText, documents: Sequence[Ids]) -> list[float]:
    """Return the score of each document: the sum of each query token's largest similarity (MaxSim).

    Similarities are products of vectors of length 1. Reference: arXiv:2004.12832, equation 3.
    """
    names = ["the query", *(f"document {i}" for i in range(len(documents)))]
    expansions = [query.expansion, *(0 for _ in documents)]
    vectors = iter(vectors_of(passes, "none", [query.ids, *documents], names, expansions))
    asked = next(vectors)
    skipped = skipped_tokens(passes.engine)
    scores = []
    for ids, tokens in zip(documents, vectors, strict=True):
        kept = tokens[~np.isin(ids, skipped)]
        largest = (asked @ kept.T).max(axis=1) if len(kept) else np.zeros(len(asked), np.float32)
        scores.append(float(largest.sum(dtype=np.float64)))
    return scores


def skipped_tokens(engine: Engine) -> npt.NDArray[np.int64]:
    """Return the ids of tokens of documents that are not compared."""
    metadata = engine.gguf.metadata
    if SKIPPED_KEY not in metadata:
        return np.empty(0, np.int64)
    ids = metadata[SKIPPED_KEY]
    if not isinstance(ids, np.ndarray) or not np.issubdtype(ids.dtype, np.integer):
        kind = metadata.type_name(SKIPPED_KEY)
        raise GGUFError(f"{engine.path}: {SKIPPED_KEY} has type {kind}, expected an array of integers")
    return ids.astype(np.int64)
