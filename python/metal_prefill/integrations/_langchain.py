"""Chat model, embeddings and reranker for LangChain.

Needs langchain-core 1.0 or later (``pip install langchain-core``). For tools, use its ``ChatOpenAI`` with the
server.

>>> from metal_prefill.integrations import LangChainChat, LangChainEmbeddings
>>> LangChainChat(model="smollm2", max_tokens=64).invoke("What is gravity?").content
>>> LangChainEmbeddings(model="minilm").embed_query("A rose")
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from metal_prefill._support.arguments import stops_of
from metal_prefill.errors import MissingExtraError

try:
    from langchain_core.documents import BaseDocumentCompressor
    from langchain_core.embeddings import Embeddings
    from langchain_core.language_models import BaseChatModel
    from langchain_core.messages import AIMessage, AIMessageChunk, convert_to_openai_messages
    from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
    from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
    from pydantic import BaseModel

    from metal_prefill.integrations._shared import Embedder, Reranker, Writer
except ImportError as error:
    raise MissingExtraError(f"classes for LangChain need: pip install langchain-core ({error})") from error


class LangChainEmbeddings(Embedder, Embeddings):  # type: ignore[misc,unused-ignore]
    """Vectors of documents and queries."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return self._documents(texts)

    def embed_query(self, text: str) -> list[float]:
        return self._query(text)


class LangChainChat(Writer, BaseChatModel):  # type: ignore[misc,unused-ignore]
    """Chat model with the template of its file.

    Asynchronous calls share passes. ``with_structured_output`` constrains answers to the schema, which needs
    the extra ``guide``.
    """

    @property
    def _llm_type(self) -> str:
        return "metal_prefill"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {"model": self._model.path.name, "max_tokens": self.max_tokens, **self.options}

    def get_token_ids(self, text: str) -> list[int]:
        """Return the tokens of a text, by which LangChain counts and trims messages."""
        return list(self._model.tokenizer.encode(text, add_bos=False))

    def _arguments(
        self, messages: list[Any], stop: list[str] | None, options: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        options.pop("ls_structured_output_format", None)  # for tracing
        given = [self.options.get("stop"), stop]
        options["stop"] = [item for items in given if items is not None for item in stops_of(items)]
        return convert_to_openai_messages(messages), options

    def _stream(
        self, messages: list[Any], stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> Iterator[Any]:
        for text in self._texts(*self._arguments(messages, stop, kwargs)):
            chunk = ChatGenerationChunk(message=AIMessageChunk(content=text))
            if run_manager:
                run_manager.on_llm_new_token(text, chunk=chunk)
            yield chunk

    async def _astream(
        self, messages: list[Any], stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> AsyncIterator[Any]:
        async for text in self._texts_async(*self._arguments(messages, stop, kwargs)):
            chunk = ChatGenerationChunk(message=AIMessageChunk(content=text))
            if run_manager:
                await run_manager.on_llm_new_token(text, chunk=chunk)
            yield chunk

    def _generate(
        self, messages: list[Any], stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> Any:
        return _result("".join(self._texts(*self._arguments(messages, stop, kwargs))))

    async def _agenerate(
        self, messages: list[Any], stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> Any:
        pieces = self._texts_async(*self._arguments(messages, stop, kwargs))
        return _result("".join([text async for text in pieces]))

    def with_structured_output(self, schema: Any, *, include_raw: bool = False, **kwargs: Any) -> Any:
        """Return a runnable whose answers match a class of pydantic or a JSON schema."""
        if include_raw or kwargs:
            raise ValueError(f"include_raw and {', '.join(kwargs) or 'methods'} are not supported")
        typed = isinstance(schema, type) and issubclass(schema, BaseModel)
        parser = PydanticOutputParser(pydantic_object=schema) if typed else JsonOutputParser()
        return self.bind(json_schema=schema.model_json_schema() if typed else schema) | parser


def _result(text: str) -> Any:
    return ChatResult(generations=[ChatGeneration(message=AIMessage(content=text))])


class LangChainReranker(Reranker, BaseDocumentCompressor):  # type: ignore[misc,unused-ignore]
    """The documents most relevant to a query, best first, with ``relevance_score`` in their metadata."""

    def compress_documents(self, documents: Sequence[Any], query: str, callbacks: Any = None) -> list[Any]:
        texts = [document.page_content for document in documents]
        return [
            documents[found.index].model_copy(
                update={"metadata": {**documents[found.index].metadata, "relevance_score": found.score}}
            )
            for found in self._ranked(query, texts)
        ]
