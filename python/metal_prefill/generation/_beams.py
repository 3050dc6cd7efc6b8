"""Beam search for the most probable texts after a prompt.

The algorithm is that of Hugging Face transformers. Each pass extends every beam, a partial text, by each
token; the most probable extensions are the beams of the next pass. Beams are rows of one batch, and forks
that share the pages of their common prefix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import numpy as np

from metal_prefill import _core
from metal_prefill._support.arguments import MOST_ANSWERS, TokenIds, integer, length_of, number, token_array
from metal_prefill.engine import Engine
from metal_prefill.errors import ContextOverflowError
from metal_prefill.generation import _sampling
from metal_prefill.generation._text_generation import FinishReason, StopFilter, split_stops

if TYPE_CHECKING:
    from metal_prefill.text._tokenizer import Tokenizer

EarlyStopping: TypeAlias = bool | Literal["never"]

_ENDING_BY_TEXT = 4  # extensions of a beam that may complete a stop string without leaving a beam idle


@dataclass(frozen=True)
class Beam:
    """Text found by beam search.

    Attributes
    ----------
    text : str
        The text without the token or string that ends it, and without the prompt unless `echo` is set.
    tokens : list of int
        Token ids, including those that end the text.
    score : float
        `logprob` divided by the number of tokens to the power of the length penalty.
    logprob : float
        Log probability of the tokens, in nats.
    finish_reason : str
        ``"stop"``, ``"length"`` or ``"context"``, as for :class:`metal_prefill.Piece`.
    """

    text: str
    tokens: list[int]
    score: float
    logprob: float
    finish_reason: FinishReason


class Hypothesis(NamedTuple):
    """Complete or partial text, with the sum of the log probabilities of its tokens."""

    tokens: tuple[int, ...]
    logprob: float


class Search:
    """State of a beam search: the running beams and the best finished texts.

    Parameters
    ----------
    num_beams, length_penalty, early_stopping
        As for :func:`generate_beams`.
    max_tokens
        Maximum number of tokens of a text, at least 1.
    stop_ids
        Ids of tokens that end a text.
    min_tokens
        Minimum number of tokens before a stop token may end a text.
    stops
        Function that returns whether a stop string ends a text with these tokens; None for no stop strings.

    Attributes
    ----------
    running : list of Hypothesis
        Partial texts to extend, most probable first; empty once the search is over.
    finished : list of (float, Hypothesis)
        Scores and texts of the best finished hypotheses, best first.
    width : int
        Number of extensions of a beam that can affect the result.
    """

    def __init__(
        self,
        num_beams: int,
        length_penalty: float,
        early_stopping: EarlyStopping,
        max_tokens: int,
        stop_ids: frozenset[int],
        min_tokens: int = 0,
        stops: Callable[[tuple[int, ...]], bool] | None = None,
    ) -> None:
        self._num_beams, self._length_penalty = num_beams, length_penalty
        self._early_stopping, self._most, self._least = early_stopping, max_tokens, min_tokens
        self._stop_ids, self._stops = stop_ids, stops
        ending = len(stop_ids) + (0 if stops is None else _ENDING_BY_TEXT)
        self._looked_at = max(2, 1 + ending) * num_beams
        self.width = self._looked_at + len(stop_ids)
        self.running = [Hypothesis((), 0.0)]
        self.finished: list[tuple[float, Hypothesis]] = []

    def advance(self, following: Sequence[Sequence[tuple[int, float]]]) -> list[int]:
        """Extend each beam by its most probable tokens.

        Parameters
        ----------
        following
            For each of `running`, the `width` most probable tokens with their log probabilities.

        Returns
        -------
        list of int
            For each beam of the new `running`, the index of its parent in the old one.
        """
        made = len(self.running[0].tokens) + 1
        candidates = [
            (-(beam.logprob + logprob), parent, token)
            for parent, (beam, tokens) in enumerate(zip(self.running, following, strict=True))
            for token, logprob in tokens
            if made > self._least or token not in self._stop_ids
        ]
        candidates.sort()
        running: list[Hypothesis] = []
        parents: list[int] = []
        for rank, (cost, parent, token) in enumerate(candidates[: self._looked_at]):
            text = Hypothesis((*self.running[parent].tokens, token), -cost)
            if made < self._most and token not in self._stop_ids and not self._is_stopped(text):
                if len(running) < self._num_beams:
                    running.append(text)
                    parents.append(parent)
            elif rank < self._num_beams:
                self.finished.append((text.logprob / made**self._length_penalty, text))
        self.finished.sort(key=lambda scored: -scored[0])
        del self.finished[self._num_beams :]
        self.running = running
        if running and self._is_over(running[0].logprob, made):
            self.running, parents = [], []
        return parents

    def _is_stopped(self, text: Hypothesis) -> bool:
        return self._stops is not None and self._stops(text.tokens)

    def _is_over(self, best: float, made: int) -> bool:
        """Whether no running beam can improve on the worst finished text, by the `early_stopping` rule."""
        if len(self.finished) < self._num_beams:
            return False
        if self._early_stopping is True:
            return True
        longest = self._early_stopping == "never" and self._length_penalty > 0
        length = self._most if longest else made
        return bool(best / length**self._length_penalty <= self.finished[-1][0])


class _Text:
    """Text of a beam, up to a stop string."""

    def __init__(self, tokenizer: Tokenizer, strings: Sequence[str], min_tokens: int) -> None:
        self._decoder, self._filter = tokenizer.decoder(), StopFilter(strings)
        self._left, self._words = min_tokens, ""  # tokens before stop strings apply

    def after(self, *tokens: int) -> _Text:
        """Return a copy of the text, extended by tokens."""
        text = copy(self)
        text._decoder, text._filter = self._decoder.copy(), self._filter.copy()
        for token in tokens:
            made = text._decoder.step(token)
            text._words += made if text._left > 0 else text._filter.step(made)
            text._left -= 1
        return text

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the text."""
        return self._filter.found

    def end(self) -> str:
        """Return the complete text."""
        rest = self._filter.step(self._decoder.flush())
        return self._words + rest + ("" if self.stopped else self._filter.flush())


class _Texts:
    """Texts of the running beams of a search."""

    def __init__(self, empty: _Text) -> None:
        self._running: dict[tuple[int, ...], _Text] = {(): empty}
        self._next: dict[tuple[int, ...], _Text] = {}

    def stops(self, tokens: tuple[int, ...]) -> bool:
        """Whether a stop string ends a running beam extended by a token."""
        self._next[tokens] = self._running[tokens[:-1]].after(tokens[-1])
        return self._next[tokens].stopped

    def keep(self, running: Sequence[Hypothesis]) -> None:
        """Drop all texts except those of these beams, each already passed to :meth:`stops`."""
        self._running, self._next = {beam.tokens: self._next[beam.tokens] for beam in running}, {}


def generate_beams(
    engine: Engine,
    prompt: str | TokenIds,
    max_tokens: int = 128,
    *,
    num_beams: int = 4,
    length_penalty: float = 1.0,
    early_stopping: EarlyStopping = False,
    min_tokens: int = 0,
    stop: str | int | Sequence[str | int] = (),
    echo: bool = False,
) -> list[Beam]:
    """Find the most probable texts; see :meth:`metal_prefill.Model.generate_beams`."""
    engine.check_generates()
    max_tokens, min_tokens = integer("max_tokens", max_tokens, 1), integer("min_tokens", min_tokens, 0)
    num_beams = integer("num_beams", num_beams, 1, MOST_ANSWERS)
    if early_stopping not in (True, False, "never"):
        raise ValueError(f"early_stopping must be True, False or 'never', got {early_stopping!r}")
    if not math.isfinite(number("length_penalty", length_penalty)):
        raise ValueError(f"length_penalty must be finite, got {length_penalty}")
    vocab_size, context = engine.config.vocab_size, engine.max_context
    strings, stops = split_stops(stop, vocab_size)
    ids = engine.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    if length_of(ids) > context:
        raise ContextOverflowError(f"a prompt of {length_of(ids)} tokens exceeds the context of {context}")
    ids = token_array(ids, vocab_size)
    engine.core.check_fits(len(ids))
    room = context - len(ids) + 1  # the last token is not written to the cache
    stop_ids = engine.tokenizer.stop_ids | frozenset(stops)
    empty = _Text(engine.tokenizer, strings, min_tokens)
    texts = _Texts(empty) if strings else None
    search = Search(
        num_beams,
        length_penalty,
        early_stopping,
        min(max_tokens, room),
        stop_ids,
        min_tokens,
        None if texts is None else texts.stops,
    )
    samplers = [_sampling.core_sampler(_sampling.Options(), 0, ()) for _ in range(num_beams)]
    for sampler in samplers:
        sampler.report(min(search.width, vocab_size))
    sessions, tokens, reuse = [engine.session(context)], [ids], True
    try:
        while search.running:
            used = samplers[: len(sessions)]
            requests = map(partial(_core.Request.sampled, reuse=reuse), sessions, tokens, used)
            for result in engine.core.forward_batch(list(requests)):
                if isinstance(result, Exception):
                    raise result
            parents = search.advance([sampler.reports[0][1] for sampler in used])
            if texts is not None:
                texts.keep(search.running)
            kept = {
                parent: parents.index(parent) for parent in parents
            }  # the first child takes over the session
            sessions[:] = [
                sessions[parent] if kept[parent] == i else sessions[parent].fork()
                for i, parent in enumerate(parents)
            ]
            tokens, reuse = [np.array(beam.tokens[-1:], np.int32) for beam in search.running], False
    finally:
        sessions.clear()  # frees them even if a traceback keeps the frame alive
    begin = ""
    if echo:
        begin = prompt if isinstance(prompt, str) else engine.tokenizer.decode(ids.tolist())
    beams: list[Beam] = []
    for score, found in search.finished:
        ended = found.tokens[-1] in stop_ids
        text = empty.after(*found.tokens[: -1 if ended else None])
        reason: FinishReason = (
            "stop" if ended or text.stopped else "length" if len(found.tokens) == max_tokens else "context"
        )
        beams.append(Beam(begin + text.end(), list(found.tokens), score, found.logprob, reason))
    return beams
