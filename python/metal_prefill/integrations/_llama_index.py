"""Language model, embeddings and reranker for LlamaIndex.

Needs llama-index-core 0.12 or later (``pip install llama-index-core``).

>>> from metal_prefill.integrations import LlamaIndexEmbeddings, LlamaIndexLLM
>>> LlamaIndexLLM(model="smollm2", max_tokens=64).complete("Gravity is").text
>>> LlamaIndexEmbeddings(model="minilm").get_query_embedding("A rose")
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import Any

from metal_prefill.errors import MissingExtraError

try:
    from llama_index.core.base.embeddings.base import BaseEmbedding
    from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse, LLMMetadata
    from llama_index.core.llms import CustomLLM
    from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
    from llama_index.core.postprocessor.types import BaseNodePostprocessor

    from metal_prefill.integrations._shared import Embedder, Reranker, Writer
except ImportError as error:
    raise MissingExtraError(f"classes for LlamaIndex need: pip install llama-index-core ({error})") from error


class LlamaIndexEmbeddings(Embedder, BaseEmbedding):  # type: ignore[misc,unused-ignore]
    """Vectors of documents and queries."""

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._query(query)

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._documents([text])[0]

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return self._documents(texts)

    async def _aget_query_embedding(self, query: str) -> Any:
        return await asyncio.to_thread(self._get_query_embedding, query)

    async def _aget_text_embedding(self, text: str) -> Any:
        return await asyncio.to_thread(self._get_text_embedding, text)

    async def _aget_text_embeddings(self, texts: list[str]) -> Any:
        return await asyncio.to_thread(self._get_text_embeddings, texts)


class LlamaIndexLLM(Writer, CustomLLM):  # type: ignore[misc,unused-ignore]
    """Language model: answers with the template of its file, and continuations of texts.

    Asynchronous calls share passes.
    """

    @property
    def metadata(self) -> Any:
        """Lengths, name and kind of the model."""
        return LLMMetadata(
            context_window=self._model.max_context,
            num_output=self.max_tokens,
            is_chat_model=True,
            model_name=self._model.path.name,
        )

    @llm_completion_callback()  # type: ignore[misc,untyped-decorator,unused-ignore]
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> Any:
        return CompletionResponse(text="".join(self._texts(prompt, kwargs)))

    @llm_completion_callback()  # type: ignore[misc,untyped-decorator,unused-ignore]
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> Any:
        """Yield the continuation of a text as it is written."""
        return _growing(self._texts(prompt, kwargs), _completion)

    @llm_completion_callback()  # type: ignore[misc,untyped-decorator,unused-ignore]
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> Any:
        pieces = self._texts_async(prompt, kwargs)
        return CompletionResponse(text="".join([text async for text in pieces]))

    @llm_completion_callback()  # type: ignore[misc,untyped-decorator,unused-ignore]
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> Any:
        """Yield the continuation of a text as it is written."""
        return _growing_async(self._texts_async(prompt, kwargs), _completion)

    @llm_chat_callback()  # type: ignore[misc,untyped-decorator,unused-ignore]
    def chat(self, messages: Sequence[Any], **kwargs: Any) -> Any:
        return _answer("".join(self._texts(_plain(messages), kwargs)))

    @llm_chat_callback()  # type: ignore[misc,untyped-decorator,unused-ignore]
    def stream_chat(self, messages: Sequence[Any], **kwargs: Any) -> Any:
        return _growing(self._texts(_plain(messages), kwargs), _answer)

    @llm_chat_callback()  # type: ignore[misc,untyped-decorator,unused-ignore]
    async def achat(self, messages: Sequence[Any], **kwargs: Any) -> Any:
        pieces = self._texts_async(_plain(messages), kwargs)
        return _answer("".join([text async for text in pieces]))

    @llm_chat_callback()  # type: ignore[misc,untyped-decorator,unused-ignore]
    async def astream_chat(self, messages: Sequence[Any], **kwargs: Any) -> Any:
        return _growing_async(self._texts_async(_plain(messages), kwargs), _answer)


def _plain(messages: Iterable[Any]) -> list[dict[str, str]]:
    return [{"role": message.role.value, "content": message.content or ""} for message in messages]


def _completion(text: str, delta: str | None = None) -> Any:
    return CompletionResponse(text=text, delta=delta)


def _answer(text: str, delta: str | None = None) -> Any:
    return ChatResponse(message=ChatMessage(role="assistant", content=text), delta=delta)


def _growing(pieces: Iterable[str], response: Callable[[str, str], Any]) -> Iterator[Any]:
    whole = ""
    for piece in pieces:
        whole += piece
        yield response(whole, piece)


async def _growing_async(
    pieces: AsyncIterator[str], response: Callable[[str, str], Any]
) -> AsyncIterator[Any]:
    whole = ""
    async for piece in pieces:
        whole += piece
        yield response(whole, piece)


class LlamaIndexReranker(Reranker, BaseNodePostprocessor):  # type: ignore[misc,unused-ignore]
    """The nodes that are most relevant to a query, best first, with their scores."""

    def _postprocess_nodes(self, nodes: list[Any], query_bundle: Any = None) -> list[Any]:
        if query_bundle is None:
            raise ValueError("ranking nodes needs a query: pass query_str or query_bundle")
        ranked = self._ranked(query_bundle.query_str, [node.get_content() for node in nodes])
        return [nodes[found.index].model_copy(update={"score": found.score}) for found in ranked]
