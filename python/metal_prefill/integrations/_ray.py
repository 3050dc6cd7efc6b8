"""Batch inference on a cluster: callable classes for Ray Data's ``map_batches``.

Needs the extra ``ray`` (``pip install 'metal_prefill[ray]'``). Each actor opens the model once. Within a
batch, prompts are ordered by shared prefix, and each prefix is computed once; for the largest gain, sort the
data set by prompt or keep related prompts in one batch. A batch that Ray repeats after a failure returns the
same rows, because the model is the only state.

>>> import ray
>>> from metal_prefill.integrations._ray import ScorePrompts
>>> rows = ray.data.read_parquet("prompts/").map_batches(
...     ScorePrompts,
...     fn_constructor_kwargs={"model": "owner/repo:*Q4_0.gguf", "column": "text"},
...     compute=ray.data.ActorPoolStrategy(size=8),
...     num_cpus=4,
...     batch_size=256,
... )
>>> rows.write_parquet("scored/")
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from metal_prefill._support.arguments import integer
from metal_prefill._support.cached_property import cached_property
from metal_prefill.errors import MissingExtraError
from metal_prefill.files._task_config import TextPooling
from metal_prefill.hub._download import resolve_model
from metal_prefill.model import Model
from metal_prefill.tasks._embedding import check_pooling, encode_texts
from metal_prefill.tasks._prompt_rules import PromptRules
from metal_prefill.tasks._prompts import PromptForm, prompt_form
from metal_prefill.tasks._scoring import check_prompt
from metal_prefill.tasks._text_roles import TextRole, role_of

try:
    import ray
except ImportError as error:
    raise MissingExtraError(f"bulk processing needs: pip install 'metal_prefill[ray]' ({error})") from error

Batch: TypeAlias = dict[str, npt.NDArray[Any]]


class _PromptMapper:
    """Base class: opens the model, reads and writes columns, and handles invalid prompts.

    Parameters
    ----------
    model
        A GGUF file that every node can read, ``owner/repo:file`` on the Hugging Face Hub, or None for the
        bundled model.
    column
        Column of the prompts, as text or token ids.
    output
        Column to write.
    errors
        With ``"raise"``, a prompt that is empty, too long or outside the vocabulary ends the job. With
        ``"record"``, its output is empty and a column ``error`` contains the message, which is empty for
        valid prompts.
    options
        Options of :class:`metal_prefill.Model`. `threads` defaults to the number of CPUs of the actor.
    """

    least = 1  # minimum tokens of a prompt

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        column: str = "prompt",
        output: str,
        errors: Literal["raise", "record"] = "raise",
        **options: Any,
    ) -> None:
        if errors not in ("raise", "record"):
            raise ValueError(f"errors must be 'raise' or 'record', got {errors!r}")
        options.setdefault("threads", _assigned_cpus())
        self._model = Model(None if model is None else resolve_model(model), **options)
        self._session = self._model.session(max_context=options.get("max_context"))
        self._column = column
        self._output = output
        self._record = errors == "record"

    def __call__(self, batch: Batch) -> Batch:
        """Add the output column to a batch, keeping the order of its rows."""
        if self._column not in batch:
            raise ValueError(f"there is no column {self._column!r}; the columns are {', '.join(batch)}")
        given = [self._encode(prompt) for prompt in batch[self._column]]
        checked: dict[int, npt.NDArray[np.int32]] = {}
        messages = np.full(len(given), "", dtype=object)
        for row, prompt in enumerate(given):
            try:
                checked[row] = self._check(prompt)
            except (ValueError, TypeError) as error:
                if not self._record:
                    raise type(error)(f"row {row} of a batch: {error}") from None
                messages[row] = str(error)
        column = np.empty(len(given), dtype=object)
        for row in range(len(given)):
            column[row] = self._nothing()
        for row, answer in zip(checked, self._answer(list(checked.values())), strict=True):
            column[row] = answer
        added: Batch = {self._output: column}
        if self._record:
            added["error"] = messages
        return {**batch, **added}

    def _encode(self, prompt: Any) -> Any:
        return self._model.tokenizer.encode(str(prompt)) if isinstance(prompt, str) else prompt

    def _check(self, prompt: Any) -> npt.NDArray[np.int32]:
        return check_prompt(prompt, self._model.config.vocab_size, self.least, self._limit())

    def _limit(self) -> int:
        return self._session.max_context

    def _answer(self, prompts: Sequence[npt.NDArray[np.int32]]) -> Sequence[Any]:
        raise NotImplementedError

    def _nothing(self) -> Any:
        raise NotImplementedError


class ScorePrompts(_PromptMapper):
    """Callable that adds a column with the log probability of each token given those before it.

    The rows hold float32 ``[n - 1]`` for a prompt of n tokens, in nats; see
    :meth:`metal_prefill.Model.score_many`. A prompt must have at least two tokens; the first is not scored.
    Text is encoded with the tokenizer's defaults, which add a beginning-of-text token if the model requires
    one.

    See the module for an example and the base class for further parameters.
    """

    least = 2

    def __init__(
        self, model: str | os.PathLike[str] | None = None, *, output: str = "log_probs", **options: Any
    ) -> None:
        super().__init__(model, output=output, **options)

    def _limit(self) -> int:
        return self._session.max_context + 1  # the last token is only predicted

    def _answer(self, prompts: Sequence[npt.NDArray[np.int32]]) -> Sequence[Any]:
        return self._model.score_many(prompts)

    def _nothing(self) -> npt.NDArray[np.float32]:
        return np.empty(0, np.float32)


class ContinuePrompts(_PromptMapper):
    """Callable that adds a column with the greedy continuation of each prompt, as text.

    Parameters
    ----------
    max_tokens
        Maximum length of a continuation in tokens.
    stop
        Strings that end a continuation and are not part of it.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        output: str = "continuation",
        max_tokens: int = 64,
        stop: str | Sequence[str] = (),
        **options: Any,
    ) -> None:
        super().__init__(model, output=output, **options)
        self._max_tokens = max_tokens
        self._stop = stop

    def _answer(self, prompts: Sequence[npt.NDArray[np.int32]]) -> Sequence[str]:
        answers = [""] * len(prompts)
        for i, piece in self._model.generate_many(prompts, self._max_tokens, stop=self._stop):
            answers[i] += str(piece)
        return answers

    def _nothing(self) -> str:
        return ""


class EmbedTexts(_PromptMapper):
    """Callable that adds a column with the vector of each text; see :meth:`metal_prefill.Model.embed`.

    Parameters
    ----------
    dimensions, pooling, instruction, normalize, truncate, unicode
        See :meth:`metal_prefill.Model.embed`.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        column: str = "text",
        output: str = "embedding",
        dimensions: int | None = None,
        pooling: TextPooling | None = None,
        instruction: str | None = None,
        normalize: bool = True,
        truncate: Literal["error", "end"] = "error",
        unicode: Literal["NFC"] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(model, column=column, output=output, **options)
        self._embedding: dict[str, Any] = {
            "dimensions": dimensions,
            "pooling": pooling,
            "instruction": instruction,
            "normalize": normalize,
            "truncate": truncate,
            "unicode": unicode,
        }
        self._rules = PromptRules(truncate, unicode).checked()

    def _encode(self, prompt: Any) -> Any:
        return prompt

    @cached_property
    def _form(self) -> PromptForm:
        return prompt_form(self._model.engine, self._embedding["instruction"])

    @cached_property
    def _role(self) -> TextRole:
        pooling = check_pooling(self._model.engine, self._embedding["pooling"])
        return role_of(self._model.engine, pooling, self._embedding["instruction"])

    def _check(self, prompt: Any) -> Any:
        encode_texts(self._model.engine, [prompt], self._form, self._rules, self._role)
        return prompt

    def _answer(self, prompts: Sequence[Any]) -> Sequence[Any]:
        return list(self._model.embed(prompts, **self._embedding))

    def _nothing(self) -> npt.NDArray[np.float32]:
        return np.empty(0, np.float32)


class RerankPairs:
    """Callable that adds a column with the score of each pair of a query and a document.

    For rows of a batch with the same query, the query is computed once; for the largest gain, sort the data
    set by query. See :meth:`metal_prefill.Model.rerank`.

    Parameters
    ----------
    query, document
        Columns of the queries and documents.
    output
        Column to write.
    instruction, template, truncate, unicode
        See :meth:`metal_prefill.Model.rerank`.
    options
        Options of :class:`metal_prefill.Model`. `threads` defaults to the number of CPUs of the actor.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        query: str = "query",
        document: str = "document",
        output: str = "score",
        instruction: str | None = None,
        template: str | None = None,
        truncate: Literal["error", "end"] = "error",
        unicode: Literal["NFC"] | None = None,
        **options: Any,
    ) -> None:
        options.setdefault("threads", _assigned_cpus())
        self._model = Model(None if model is None else resolve_model(model), **options)
        self._query, self._document, self._output = query, document, output
        self._reranking: dict[str, Any] = {
            "instruction": instruction,
            "template": template,
            "truncate": truncate,
            "unicode": unicode,
        }

    def __call__(self, batch: Batch) -> Batch:
        """Add the column of scores to a batch, keeping the order of its rows."""
        queries = [str(query) for query in batch[self._query]]
        documents = [str(document) for document in batch[self._document]]
        scores = np.empty(len(queries), np.float64)
        for query in dict.fromkeys(queries):
            rows = [row for row, other in enumerate(queries) if other == query]
            ranked = self._model.rerank(query, [documents[row] for row in rows], **self._reranking)
            for item in ranked:
                scores[rows[item.index]] = item.score
        return {**batch, self._output: scores}


def serve_app(
    model: str | os.PathLike[str] | None = None,
    *,
    replicas: int = 1,
    cpus: float = 1,
    limits: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Create a Ray Serve application that runs the server of :mod:`metal_prefill.serve` on several machines.

    Requests whose prompts share a prefix are routed to the same replica, which has computed it, while that
    replica has capacity. If a replica dies before it answers a request, another one answers it; a stream that
    has started ends with an error. Needs the extras ``ray`` and ``serve``.

    Parameters
    ----------
    model
        As for :class:`ScorePrompts`.
    replicas
        Number of replicas, each with its own model.
    cpus
        CPUs of each replica, and its number of threads unless `threads` is given.
    limits
        Fields of :class:`metal_prefill.serve.Settings` for each replica.
    options
        Options of :class:`metal_prefill.Model`.

    Returns
    -------
    ray.serve.Application
        Application for ``ray.serve.run``.

    Examples
    --------
    >>> from ray import serve
    >>> serve.run(serve_app("/models/smol.gguf", replicas=4, cpus=8))
    """
    replicas = integer("replicas", replicas, 1)
    from metal_prefill.integrations._ray_serve import application
    from metal_prefill.serve import Settings

    options.setdefault("threads", max(int(cpus), 1))
    name = None if model is None else os.fspath(model)
    return application(name, replicas, cpus, Settings(**(limits or {})), options)


def _assigned_cpus() -> int | None:
    """Return the number of CPUs of the current actor; None outside an actor."""
    if not ray.is_initialized():
        return None
    cpus = ray.get_runtime_context().get_assigned_resources().get("CPU", 1)
    return max(int(cpus), 1)
