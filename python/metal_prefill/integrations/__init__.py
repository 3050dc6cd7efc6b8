"""Integrations with Chroma, llm, Ray, scikit-learn and lm-evaluation-harness, which must be installed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from metal_prefill._support.lazy import lazy_names

if TYPE_CHECKING:
    from metal_prefill.integrations._chroma import ChromaEmbeddings
    from metal_prefill.integrations._lm_eval import MetalPrefillLM
    from metal_prefill.integrations._ray import (
        ContinuePrompts,
        EmbedTexts,
        RerankPairs,
        ScorePrompts,
        serve_app,
    )
    from metal_prefill.integrations._sklearn import EmbeddingTransformer

__all__ = [
    "ChromaEmbeddings", "ContinuePrompts", "EmbedTexts", "EmbeddingTransformer", "MetalPrefillLM",
    "RerankPairs", "ScorePrompts", "serve_app",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "ChromaEmbeddings": "_chroma",
        "ContinuePrompts": "_ray",
        "EmbedTexts": "_ray",
        "EmbeddingTransformer": "_sklearn",
        "MetalPrefillLM": "_lm_eval",
        "RerankPairs": "_ray",
        "ScorePrompts": "_ray",
        "serve_app": "_ray",
    },
)
