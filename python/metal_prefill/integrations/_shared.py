"""Texts, vectors and ranks in the forms that frameworks require, as classes of pydantic."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from metal_prefill.model import Model

if TYPE_CHECKING:
    from metal_prefill.tasks._reranking import Ranked


class Opened(BaseModel):  # type: ignore[misc,unused-ignore]
    """A model, and the options with which it is opened."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = Field(default=None, description="model, as for metal_prefill.Model")
    model_options: dict[str, Any] = Field(
        default_factory=dict, description="options of metal_prefill.Model, such as threads"
    )
    _model: Model = PrivateAttr()

    def model_post_init(self, context: Any, /) -> None:
        super().model_post_init(context)
        self._model = Model(self.model, **self.model_options)


class Writer(Opened):
    """A model that answers messages and continues texts, and its options."""

    max_tokens: int = Field(default=512, ge=1, description="maximum length of a text in tokens")
    options: dict[str, Any] = Field(
        default_factory=dict, description="options of metal_prefill.Session.generate, such as temperature"
    )

    def _texts(self, prompt: str | Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> Iterator[str]:
        """Yield the answer to messages, or the continuation of a text."""
        ids, options = self._prepared(prompt, options)
        with self._model.session() as session:
            yield from session.generate(ids, **options)

    async def _texts_async(
        self, prompt: str | Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> AsyncIterator[str]:
        """Do the same, in one batch with the texts of other tasks."""
        ids, options = self._prepared(prompt, options)
        async for text in self._model.generate_async(ids, **options):
            yield text

    def _prepared(
        self, prompt: str | Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        options = {"max_tokens": self.max_tokens, **self.options, **options}
        if isinstance(prompt, str):
            return prompt, options
        tokenizer = self._model.tokenizer
        options["stop"] = tokenizer.chat_stop(options.get("stop"))
        return tokenizer.apply_chat_template(prompt), options


class Embedder(Opened):
    """A model that embeds texts, and its options; it must pool the states of a text into one vector."""

    query: str | None = Field(default=None, description="instruction for queries, as for Model.embed")
    document: str | None = Field(default=None, description="instruction for documents")
    options: dict[str, Any] = Field(default_factory=dict, description="options of metal_prefill.Model.embed")

    def _documents(self, texts: list[str]) -> list[list[float]]:
        return self._vectors(texts, self.document)

    def _query(self, text: str) -> list[float]:
        return self._vectors([text], self.query)[0]

    def _vectors(self, texts: list[str], instruction: str | None) -> list[list[float]]:
        return list(self._model.embed(texts, instruction=instruction, **self.options).tolist())


class Reranker(Opened):
    """A model that ranks documents, and its options."""

    top_n: int | None = Field(default=None, ge=1, description="number of documents; None keeps all")
    options: dict[str, Any] = Field(default_factory=dict, description="options of metal_prefill.Model.rerank")

    def _ranked(self, query: str, texts: Sequence[str]) -> list[Ranked]:
        return self._model.rerank(query, texts, self.top_n, **self.options) if texts else []
