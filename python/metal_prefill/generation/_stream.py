"""A prompt in a batch, and the text that follows it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from metal_prefill import _core
from metal_prefill._support.arguments import MOST_ANSWERS, TokenIds, integer, length_of, token_array
from metal_prefill.engine import Engine, RowCost
from metal_prefill.errors import ContextOverflowError, KVMemoryError
from metal_prefill.generation._ending import FinishReason
from metal_prefill.generation._text_generation import Continuation, NextTokens, Piece, TextOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack


class StreamTimes:
    """Times of a stream, on the clock of :func:`time.perf_counter`; None until the event.

    Attributes
    ----------
    started : float or None
        Start of the first pass with tokens of the prompt.
    first_token, last_token : float or None
        End of the pass that chose the first token, and of the latest one that chose any.
    """

    def __init__(self) -> None:
        self.started: float | None = None
        self.first_token: float | None = None
        self.last_token: float | None = None

    def begin(self, now: float) -> None:
        """Note a pass with tokens of the prompt that starts now."""
        if self.started is None:
            self.started = now

    def note_tokens(self, now: float) -> None:
        """Note that a pass which chose tokens has ended now."""
        if self.first_token is None:
            self.first_token = now
        self.last_token = now


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
    passes_waited : int
        Number of passes without tokens for this stream since its last one, although it was ready.
    prompt_tokens : int
        Number of tokens of the prompt.
    prompt : numpy.ndarray
        Ids of the prompt, int32 ``[prompt_tokens]``.
    scored_tokens : int
        Number of tokens of the prompt that are among its pieces: all but the first one, or none.
    most_pieces : int
        Number of pieces that it has at most, including those of the prompt.
    reuses : bool
        Whether a cached prefix of its prompt is reused.
    prefix_namespace : str
        Namespace in which prefixes of its prompt are found; see :meth:`metal_prefill.Model.session`.
    times : StreamTimes
        When its prompt started and its tokens were chosen.

    Notes
    -----
    Other attributes and methods are for the scheduler.
    """

    def __init__(self, text: Continuation, leader: Stream | None = None, prefix_namespace: str = "") -> None:
        self.finish_reason: FinishReason | None = None
        self.error: Exception | None = None
        self.passes_waited = 0
        self.prompt_tokens = len(text.prompt)
        self.scored_tokens = len(text.prompt) - len(text.ids)
        self.most_pieces = text.most_pieces
        self.prompt = text.prompt
        self.reuses = leader is None and self.scored_tokens == 0
        self.prefix_namespace = prefix_namespace
        self.times = StreamTimes()
        self.computed = 0  # tokens of the prompt that went through the model for this stream
        self.ids = text.ids  # the prompt and the generated tokens
        self._made: list[int] = []
        self.text = text
        self.core: _core.Session | None = None
        self.writing = False  # the prompt is computed
        self.asked_by: object = None  # its request in a scheduler that several share
        self._leader = leader  # computes the same prompt first; this stream continues from its cache

    @property
    def cached_tokens(self) -> int:
        """Number of tokens of the prompt found in the cache; meaningful once the text begins."""
        return 0 if self.scored_tokens else max(self.prompt_tokens - self.computed, 0)

    @property
    def scoring(self) -> bool:
        """Whether further rows are those of the prompt, for its log probabilities."""
        return self.writing and self.text.scored_rows > 0

    def left(self) -> range:
        """Return the positions of the prompt that are left to compute.

        What other streams have computed since the last pass is not among them.
        """
        if self.scoring:
            at = self.session.position
            return range(at, at + self.text.scored_rows)
        return range(self.session.reuse(self.ids), len(self.ids))

    def note_computed(self, rows: int) -> None:
        """Count rows of the prompt, but not those that are computed again after its text has begun."""
        if len(self.ids) == len(self.text.ids):
            self.computed += rows + self._computed_again

    def prompt_rows(self, start: int, end: int, cost: RowCost) -> NextTokens:
        """Return the tokens at these positions, which are among those of :meth:`left`."""
        if self.scoring:
            return self.text.next_tokens(end - start, cost)
        return NextTokens(self.ids[start:end], 0, 0.0)

    @property
    def _computed_again(self) -> int:
        """Number of cached tokens that the last pass computed again, for the states of recurrent layers."""
        return 0 if self.core is None else int(self.core.stats()["tokens_recomputed"])

    @property
    def ready_tokens(self) -> int:
        """Number of tokens of the prompt that are computed or were found in the cache."""
        if self.writing and not self.scoring:
            return self.prompt_tokens
        core = self.core  # the engine loop may release it at any time
        return 0 if core is None else min(core.position, self.prompt_tokens)

    def cancel(self) -> None:
        """End the stream; its memory is released before the next pass."""
        if self.finish_reason is None:
            self.finish_reason = "cancelled"

    def take(self, chosen: list[int]) -> Iterator[Piece]:
        """Take the tokens that a pass chose."""
        if not self.writing:
            self.note_computed(0)
        self.writing = True
        for piece in self.text.take(chosen):
            self._made.append(piece.token)
            self.finish_reason = self.finish_reason or piece.finish_reason
            yield piece

    def fail(self, error: Exception) -> None:
        """End the stream with an error."""
        self.error, self.finish_reason = error, "error"

    @property
    def session(self) -> _core.Session:
        """The native session of an active stream."""
        assert self.core is not None
        return self.core

    def restart(self) -> None:
        """Release the memory; the generated tokens become part of the prompt."""
        self.ids = np.concatenate([self.ids, np.array(self._made, np.int32)])
        self._made = []
        self.core, self.writing = None, False

    def follows(self) -> bool:
        """Return whether another stream is computing its prompt; once that is done, continue from there."""
        leader = self._leader
        if leader is None:
            return False
        if leader.core is not None and not leader.writing and leader.finish_reason is None:
            return True
        self._leader = None
        if leader.core is not None and leader.writing:
            self.core = leader.core.fork()
            self.core.rewind(len(self.ids) - 1)  # the logits after the last token are wanted once more
        return False

    def agrees(self, other: Stream, n: int) -> int:
        """Return the length of the prefix that one of two prompts can take from the other, at most `n`."""
        if self.prefix_namespace != other.prefix_namespace:
            return 0
        if self.scoring or other.scoring:
            return 0
        different = np.flatnonzero(self.ids[:n] != other.ids[:n])
        return int(different[0]) if different.size else n

    def request(self, tokens: NextTokens, *, continues: bool) -> _core.Request:
        """Return the request for these tokens; `continues`: the chosen token will be appended next."""
        ids, rows = tokens.ids, tokens.drafts + 1
        if not self.writing and self.session.position + len(ids) < len(self.ids):
            return _core.Request.none(self.session, ids)
        if self.text.sampler is not None:
            return _core.Request.sampled(self.session, ids, self.text.sampler, rows)
        return _core.Request.greedy(self.session, ids, rows, drafts=True, continues=continues)


def check_size(engine: Engine, least: int) -> None:
    """Raise ContextOverflowError if a prompt of at least so many tokens does not fit."""
    if least > engine.max_context:
        raise ContextOverflowError(
            f"a prompt of at least {least} tokens exceeds the context of {engine.max_context}"
        )


def make_streams(
    engine: Engine,
    prompt: str | TokenIds,
    n: int,
    max_tokens: int,
    *,
    logprobs: int | None = None,
    prefix_namespace: str = "",
    **options: Unpack[TextOptions],
) -> list[Stream]:
    """Make `n` streams of one prompt for a scheduler to enter; all that can be wrong with them is checked.

    Any thread may call this while the scheduler computes. See :meth:`Scheduler.submit_answers`, and
    :meth:`Scheduler.submit` for what it raises.
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
            logprobs=logprobs,
            answer=answer,
            prefix_namespace=prefix_namespace,
        )
        # If a prompt has log probabilities, all of its tokens are computed for each stream.
        follows = streams and len(text.ids) == len(ids)
        streams.append(Stream(text, streams[0] if follows else None, prefix_namespace))
    return streams
