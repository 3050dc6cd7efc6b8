"""One prompt of many, and the text that follows it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from metal_prefill import _core
from metal_prefill._continuation import Continuation, FinishReason, Piece


class Stream:
    """One prompt and the text that follows it, made by :meth:`Scheduler.submit`.

    Attributes
    ----------
    finish_reason : str or None
        None while the stream is running. ``"stop"``: an end-of-text token or a stop string; ``"length"``:
        `max_tokens` were made; ``"context"``: the context is full; ``"cancelled"``; ``"error"``.
    error : Exception or None
        The error that ended it, if any.
    passes_waited : int
        Passes in which it got nothing although it was ready, since it last got something.
    prompt_tokens : int
        Tokens of the prompt.
    prompt : numpy.ndarray
        Ids of the prompt, int32 ``[prompt_tokens]``.
    scored_tokens : int
        Tokens of the prompt that are among its pieces: all but the first one, or none.
    reuses : bool
        Whether its prompt begins with what the cache has of it.
    """

    def __init__(self, text: Continuation, leader: Stream | None = None) -> None:
        self.finish_reason: FinishReason | None = None
        self.error: Exception | None = None
        self.passes_waited = 0
        self.prompt_tokens = len(text.prompt)
        self.scored_tokens = len(text.prompt) - len(text.ids)
        self.prompt = text.prompt
        self.reuses = leader is None and self.scored_tokens == 0
        self._computed = 0  # tokens of the prompt that went through the model for this stream
        self._ids = text.ids  # the prompt, and after that what was made
        self._made: list[int] = []
        self._text = text
        self._core: _core.Session | None = None
        self._writing = False  # the prompt is computed
        self._leader = leader  # computes the same prompt first; its cache is the beginning of this one's

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that were found in the cache; meaningful once the text begins."""
        return 0 if self.scored_tokens else max(self.prompt_tokens - self._computed, 0)

    @property
    def ready_tokens(self) -> int:
        """Tokens of the prompt that are computed, or were found in the cache."""
        if self._writing:
            return self.prompt_tokens
        return 0 if self._core is None else min(self._core.position, self.prompt_tokens)

    def cancel(self) -> None:
        """End the stream; its memory is given back before the next pass."""
        if self.finish_reason is None:
            self.finish_reason = "cancelled"

    def _take(self, chosen: list[int]) -> Iterator[Piece]:
        """Take what a pass chose."""
        self._writing = True
        for piece in self._text.take(chosen):
            self._made.append(piece.token)
            self.finish_reason = self.finish_reason or piece.finish_reason
            yield piece

    def _fail(self, error: Exception) -> None:
        """End it with an error."""
        self.error, self.finish_reason = error, "error"

    @property
    def _session(self) -> _core.Session:
        """The native session of a stream that is under way."""
        assert self._core is not None
        return self._core

    def _restart(self) -> None:
        """Give the memory back; what was made so far becomes part of the prompt."""
        self._ids = np.concatenate([self._ids, np.array(self._made, np.int32)])
        self._made = []
        self._core, self._writing = None, False
