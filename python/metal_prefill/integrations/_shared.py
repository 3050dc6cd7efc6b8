"""Texts, vectors and ranks in the forms that several frameworks ask for."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

from metal_prefill.model import Model


class Embedder:
    """Vectors of documents and queries, each with its instruction.

    Parameters
    ----------
    model
        Model, as for :class:`metal_prefill.Model`.
    query, document
        Instruction for queries and for documents.
    model_options, options
        Options of :class:`metal_prefill.Model` and of :meth:`metal_prefill.Model.embed`.
    """

    def __init__(
        self,
        model: str | None,
        query: str | None,
        document: str | None,
        model_options: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> None:
        self._model = Model(model, **model_options)
        self._query, self._document, self._options = query, document, dict(options)

    def documents(self, texts: Sequence[str]) -> list[list[float]]:
        """Return the vectors of documents."""
        found: list[list[float]] = self._model.embed(
            texts, instruction=self._document, **self._options
        ).tolist()
        return found

    def query(self, text: str) -> list[float]:
        """Return the vector of a query."""
        (found,) = self._model.embed([text], instruction=self._query, **self._options).tolist()
        return list(found)


class Writer:
    """Answers to messages, and continuations of texts.

    Parameters
    ----------
    model
        Model, as for :class:`metal_prefill.Model`.
    model_options
        Options of :class:`metal_prefill.Model`.
    """

    def __init__(self, model: str | None, model_options: Mapping[str, Any]) -> None:
        self._model = Model(model, **model_options)

    @property
    def max_context(self) -> int:
        """Maximum number of tokens of a prompt and its answer."""
        return self._model.max_context

    @property
    def name(self) -> str:
        """Name of the model's file."""
        return self._model.path.name

    def stream(self, prompt: str | Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> Iterator[str]:
        """Yield the answer to messages, or the continuation of a text."""
        ids, options = self._prepared(prompt, options)
        with self._model.session() as session:
            yield from session.generate(ids, **options)

    async def stream_async(
        self, prompt: str | Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> AsyncIterator[str]:
        """Do the same, in one batch with the texts of other tasks."""
        ids, options = self._prepared(prompt, options)
        async for text in self._model.generate_async(ids, **options):
            yield text

    def _prepared(
        self, prompt: str | Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        if isinstance(prompt, str):
            return prompt, dict(options)
        tokenizer = self._model.tokenizer
        stop = [*tokenizer.chat_stop, *(options.get("stop") or ())]
        return tokenizer.apply_chat_template(prompt), {**options, "stop": stop}
