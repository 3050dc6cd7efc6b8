"""Integrations with other libraries, which must be installed.

They are LangChain, LlamaIndex, llm and lm-evaluation-harness. llm finds its plugin by an entry point,
without a name here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from metal_prefill._support.lazy import lazy_names

if TYPE_CHECKING:
    from metal_prefill.integrations._langchain import LangChainChat, LangChainEmbeddings, LangChainReranker
    from metal_prefill.integrations._llama_index import (
        LlamaIndexEmbeddings,
        LlamaIndexLLM,
        LlamaIndexReranker,
    )
    from metal_prefill.integrations._lm_eval import MetalPrefillLM

__all__ = [
    "LangChainChat", "LangChainEmbeddings", "LangChainReranker", "LlamaIndexEmbeddings", "LlamaIndexLLM",
    "LlamaIndexReranker", "MetalPrefillLM",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    _langchain="LangChainChat LangChainEmbeddings LangChainReranker",
    _llama_index="LlamaIndexEmbeddings LlamaIndexLLM LlamaIndexReranker",
    _lm_eval="MetalPrefillLM",
)
