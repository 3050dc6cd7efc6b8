"""Integrations with other libraries, which must be installed.

They are Chroma, LangChain, LlamaIndex, llm, scikit-learn, spaCy and lm-evaluation-harness. llm and
spaCy find their integrations by entry points, without names here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from metal_prefill._support.lazy import lazy_names

if TYPE_CHECKING:
    from metal_prefill.integrations._chroma import ChromaEmbeddings
    from metal_prefill.integrations._langchain import LangChainChat, LangChainEmbeddings, LangChainReranker
    from metal_prefill.integrations._llama_index import (
        LlamaIndexEmbeddings,
        LlamaIndexLLM,
        LlamaIndexReranker,
    )
    from metal_prefill.integrations._lm_eval import MetalPrefillLM
    from metal_prefill.integrations._sklearn import EmbeddingTransformer

__all__ = [
    "ChromaEmbeddings", "EmbeddingTransformer", "LangChainChat", "LangChainEmbeddings", "LangChainReranker",
    "LlamaIndexEmbeddings", "LlamaIndexLLM", "LlamaIndexReranker", "MetalPrefillLM",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "ChromaEmbeddings": "_chroma",
        "EmbeddingTransformer": "_sklearn",
        "LangChainChat": "_langchain",
        "LangChainEmbeddings": "_langchain",
        "LangChainReranker": "_langchain",
        "LlamaIndexEmbeddings": "_llama_index",
        "LlamaIndexLLM": "_llama_index",
        "LlamaIndexReranker": "_llama_index",
        "MetalPrefillLM": "_lm_eval",
    },
)
