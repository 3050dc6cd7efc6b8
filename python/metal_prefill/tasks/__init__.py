"""Work that is prefill only: embedding, reranking, classification, labels of tokens, scoring."""

from __future__ import annotations

from typing import TYPE_CHECKING

from metal_prefill._support.lazy import lazy_names

if TYPE_CHECKING:
    from metal_prefill.tasks._classification import Classification
    from metal_prefill.tasks._embedding import embed
    from metal_prefill.tasks._prompts import PROMPTS, prompt_names
    from metal_prefill.tasks._reranking import Ranked, rerank
    from metal_prefill.tasks._similarity import maxsim
    from metal_prefill.tasks._sparse import HybridVectors, SparseVector
    from metal_prefill.tasks._token_labels import Entity

__all__ = [
    "PROMPTS", "Classification", "Entity", "HybridVectors", "Ranked", "SparseVector", "embed", "maxsim",
    "prompt_names", "rerank",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    _classification="Classification",
    _embedding="embed",
    _prompts="PROMPTS prompt_names",
    _reranking="Ranked rerank",
    _similarity="maxsim",
    _sparse="HybridVectors SparseVector",
    _token_labels="Entity",
)
