"""Work that is prefill only: embedding, reranking, classification, scoring."""

from __future__ import annotations

from typing import TYPE_CHECKING

from metal_prefill._support.lazy import lazy_names

if TYPE_CHECKING:
    from metal_prefill.tasks._classification import Classification
    from metal_prefill.tasks._embedding import PROMPTS, embed
    from metal_prefill.tasks._reranking import Ranked, rerank

__all__ = ["PROMPTS", "Classification", "Ranked", "embed", "rerank"]

__getattr__ = lazy_names(
    __name__,
    {
        "Classification": "_classification",
        "PROMPTS": "_embedding",
        "Ranked": "_reranking",
        "embed": "_embedding",
        "rerank": "_reranking",
    },
)
