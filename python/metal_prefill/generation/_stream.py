"""Tasks of a scheduler: prompts with the texts that follow them, and calls that compute other sessions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np

from metal_prefill import _core
from metal_prefill._support.arguments import MOST_ANSWERS, TokenIds, integer, length_of, token_array
from metal_prefill.engine import Engine
from metal_prefill.errors import ContextOverflowError, KVMemoryError
from metal_prefill.generation._sampling import TextOptions
from metal_prefill.generation._text_generation import Continuation, FinishReason, NextTokens, Piece

if TYPE_CHECKING:
    from typing_extensions import Unpack


# Errors of `make_streams` that concern one prompt only.
REFUSALS = (TypeError, ValueError, KVMemoryError)


class Stream:
    """A prompt and the text that follows it, made by :meth:`Scheduler.submit`.

    Attributes
    ----------
    finish_reason : str or None
        None while the stream is running. ``"stop"``: an end-of-text token or a stop string; ``"length"``:
        `max_tokens` were made; ``"context"``: the context is full; ``"cancelled"``; ``"error"``.
    error : Exception or None
        The error that ended it, if any.
    prompt_tokens : int
        Number of tokens of the prompt.
    prompt : numpy.ndarray
        Ids of the prompt, int32 ``[prompt_tokens]``.
    scored_tokens : int
        Number of tokens of the prompt that are among its pieces: all but the first one, or none.
    first : bool
        Whether it is the first text of its prompt.
    reuses : bool
        Whether it is, and a cached prefix of the prompt is reused.
    prefix_namespace : str
        Namespace in which prefixes of its prompt are found; see :meth:`metal_prefill.Model.session`.
    started, first_token, last_token : float or None
        When the first pass with tokens of the prompt started, and when the passes ended that chose the first
        token and the latest one, on the clock of :func:`time.perf_counter`; None until then.

    Notes
    -----
    Other attributes and methods are for the scheduler.
    """

    def __init__(self, text: Continuation, *, first: bool = True, prefix_namespace: str = "") -> None:
        self.finish_reason: FinishReason | None = None
        self.error: Exception | None = None
        self.prompt_tokens = len(text.prompt)
        self.scored_tokens = len(text.prompt) - len(text.ids)
        self.prompt = text.prompt
        self.first = first
        self.reuses = first and self.scored_tokens == 0
        self.prefix_namespace = prefix_namespace
        self.started: float | None = None
        self.first_token: float | None = None
        self.last_token: float | None = None
        self.computed = 0  # tokens of the prompt that went through the model for this stream
        self.ids = text.ids  # the prompt and the generated tokens
        self._made: list[int] = []
        self.text = text
        self.core: _core.Session | None = None
        self.request: _core.Request | None = None  # of the prompt, while it is active
        self._noted = 0  # rows that the request has had
        self._cached = 0  # tokens of the prompt that other sessions have computed
        self.writing = False  # the prompt is computed
        self.asked_by: object = None  # its request, in a scheduler with several users

    @property
    def cached_tokens(self) -> int:
        """Number of tokens of the prompt found in the cache; meaningful once the text begins."""
        return 0 if self.scored_tokens else max(self.prompt_tokens - self.computed, 0)

    @property
    def scoring(self) -> bool:
        """Whether further rows belong to the prompt, for its log probabilities."""
        return self.writing and self.text.scored_rows > 0

    @property
    def left(self) -> int:
        """Number of remaining rows of the prompt."""
        if self.request is None:
            return self.text.scored_rows
        return min(self.request.left, len(self.ids) - self._cached)

    def begin(self, engine: Engine) -> None:
        self.core = engine.session(prefix_namespace=self.prefix_namespace)
        self.request = self.text.request(self.core, NextTokens(self.ids, 0, 0.0), continues=False, reuse=True)
        self._noted = 0
        self._cached = engine.core.cached_tokens(self.prefix_namespace, self.ids)

    def note_pass(self, started: float) -> int:
        """Return the number of rows of the prompt in the last pass; count them unless its text has begun."""
        assert self.request is not None
        rows = self.request.computed - self._noted
        if rows and self.started is None:
            self.started = started
        self._noted += rows
        if len(self.ids) == len(self.text.ids):
            self.computed += rows
        return rows

    @property
    def ready_tokens(self) -> int:
        """Number of tokens of the prompt that are computed or were found in the cache."""
        if self.writing and not self.scoring:
            return self.prompt_tokens
        core = self.core  # the engine loop may release it at any time
        return 0 if core is None else min(core.position, self.prompt_tokens)

    def cancel(self) -> None:
        """End the stream; its memory is released before the next pass. Any thread may call this."""
        if self.finish_reason is None:
            self.finish_reason = "cancelled"

    def take(self, chosen: list[int]) -> Iterator[Piece]:
        self.writing, self.request = True, None
        for piece in self.text.take(chosen):
            self._made.append(piece.token)
            self.finish_reason = self.finish_reason or piece.finish_reason
            yield piece

    def fail(self, error: Exception) -> None:
        self.error, self.finish_reason = error, "error"

    @property
    def session(self) -> _core.Session:
        assert self.core is not None
        return self.core

    def release(self) -> None:
        self.core = self.request = None

    def restart(self) -> None:
        """Release the memory; the generated tokens become part of the prompt."""
        self.ids = np.concatenate([self.ids, np.array(self._made, np.int32)])
        self._made = []
        self.release()
        self.writing = False


def check_size(engine: Engine, least: int) -> None:
    """Raise ContextOverflowError if a prompt of at least this many tokens does not fit."""
    if least > engine.max_context:
        raise ContextOverflowError(
            f"a prompt of at least {least} tokens exceeds the context of {engine.max_context}"
        )


def make_streams(
    engine: Engine,
    prompt: str | TokenIds,
    n: int,
    max_tokens: int,
    /,
    *,
    prefix_namespace: str = "",
    **options: Unpack[TextOptions],
) -> list[Stream]:
    """Make `n` streams of one prompt for a scheduler to enter; raise all errors of their arguments.

    Any thread may call this while the scheduler computes. See :meth:`Scheduler.submit_answers`, and
    :meth:`Scheduler.submit` for errors.
    """
    engine.check_generates()
    n = integer("n", n, 1, MOST_ANSWERS)
    if isinstance(prompt, str):
        check_size(engine, engine.tokenizer.least_tokens(prompt))
    tokens = engine.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    if length_of(tokens) > engine.max_context:
        raise ContextOverflowError(
            f"a prompt of {length_of(tokens)} tokens exceeds the context of {engine.max_context}"
        )
    ids = token_array(tokens, engine.config.vocab_size)
    # The text may end after min_tokens, and the last token that is chosen needs no room.
    asked = len(ids) + max(integer("min_tokens", options.get("min_tokens", 0), 0) - 1, 0)
    engine.core.check_fits(min(asked, engine.max_context))
    least = 0 if options.get("prompt_logprobs") and len(ids) > 1 else 1
    max_tokens = integer("max_tokens", max_tokens, least)
    streams: list[Stream] = []
    for answer in range(n):
        text = Continuation(
            engine,
            ids,
            max_tokens,
            engine.max_context,
            options,
            prompt=prompt if isinstance(prompt, str) else None,
            answer=answer,
            prefix_namespace=prefix_namespace,
        )
        streams.append(Stream(text, first=answer == 0, prefix_namespace=prefix_namespace))
    return streams


class PendingCall:
    """Requests of sessions that the scheduler does not own, until passes have computed them.

    If the future is cancelled, the call is dropped before the next pass.
    """

    def __init__(self, requests: Sequence[_core.Computation]) -> None:
        self.requests = list(requests)
        self.results: Future[list[Any]] = Future()  # as the native engine returns them

    @property
    def done(self) -> bool:
        return self.results.done()

    @property
    def left(self) -> list[_core.Computation]:
        return [request for request in self.requests if not request.finished]

    def finish(self) -> None:
        """Set the result from all requests, which are finished."""
        if self.results.set_running_or_notify_cancel():
            self.results.set_result([request.take_result() for request in self.requests])
        self.requests = []

    def fail(self, error: Exception) -> None:
        if not self.done and self.results.set_running_or_notify_cancel():
            self.results.set_exception(error)
