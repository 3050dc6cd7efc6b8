"""Conversion of chosen tokens to text, and the conditions that end a text."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict

import numpy as np
import numpy.typing as npt

from metal_prefill import _core
from metal_prefill._support.arguments import integer, token_id
from metal_prefill.engine import RowCost
from metal_prefill.errors import ConstraintError
from metal_prefill.generation import _sampling
from metal_prefill.generation._constraint import Constraint, Step
from metal_prefill.generation._speculation import MOST_DRAFTS, Speculate, Speculation, make_drafter
from metal_prefill.text._reasoning import ReasoningGate, begins_after

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from metal_prefill.text._tokenizer import Tokenizer

    _Report = tuple[float, list[tuple[int, float]]]

FinishReason = Literal["stop", "length", "context", "cancelled", "error"]

MOST_LOGPROBS = 1000  # of a token
# Maximum number of forced tokens of a text in a pass. Like drafts, they delay every text of the pass, and
# texts can be cancelled only between passes.
MOST_FORCED = MOST_DRAFTS


class SamplingOptions(TypedDict, total=False):
    """How to choose tokens: the fields of :class:`metal_prefill.generation.Options`."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    typical_p: float
    frequency_penalty: float
    presence_penalty: float
    logit_bias: Mapping[int, float]


class TextOptions(SamplingOptions, total=False):
    """Options of a text, as :meth:`metal_prefill.Session.generate` explains them."""

    seed: int | None
    stop: str | int | Sequence[str | int]
    min_tokens: int
    reasoning: bool
    echo: bool
    prompt_logprobs: bool
    speculate: Speculate
    json_schema: Mapping[str, Any] | str | None
    regex: str | None
    grammar: str | None


@dataclass(frozen=True)
class Piece:
    """A generated token, and the text that is complete with it.

    Attributes
    ----------
    token : int
        Id of the token.
    text : str
        Text that is complete with this token, which may include that of earlier tokens. It is empty while a
        character is incomplete or the text may be part of a stop string. End-of-text and stop tokens have no
        text.
    logprob : float or None
        Log probability of the token in nats, from the model's logits before bias, penalties, filters and
        temperature. None unless `logprobs` is set.
    top_logprobs : tuple of (int, float)
        Ids and log probabilities of the `logprobs` most probable tokens, best first.
    finish_reason : str or None
        None unless this is the last token: ``"stop"``, ``"length"`` or ``"context"``, as for
        :class:`metal_prefill.generation.Stream`.
    """

    token: int
    text: str
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    finish_reason: FinishReason | None = None


def split_stops(stop: str | int | Sequence[str | int], vocab_size: int) -> tuple[list[str], list[int]]:
    """Check the conditions that end a text, and return their strings and token ids.

    Raises
    ------
    ValueError
        If a string is empty, or an id outside the vocabulary.
    TypeError
        If something is neither a string nor an integer.
    """
    if isinstance(stop, (str, int, np.integer)):
        stop = [stop]
    try:
        stops = list(stop)
    except TypeError:
        kind = type(stop).__name__
        raise TypeError(f"stop must be a str, a token id or a sequence of them, got {kind}") from None
    strings = [s for s in stops if isinstance(s, str)]
    if any(not s for s in strings):
        raise ValueError("a stop string is empty")
    return strings, [token_id(s, vocab_size) for s in stops if not isinstance(s, str)]


class _StopString:
    """A stop string and its Knuth-Morris-Pratt automaton, built as far as a text needs it."""

    def __init__(self, string: str) -> None:
        self.string = string
        self.length = len(string)
        self._borders = [0, 0]  # by n: length of the longest proper prefix of string[:n] that also ends it

    def step(self, matched: int, text: str) -> tuple[int, int | None]:
        """Read text after `matched` characters of the string, which the text before it ends with.

        Returns
        -------
        matched : int
            Characters of the string that the text ends with now, all of them where it was found.
        end : int or None
            Where in `text` the first occurrence of the string ends; None if there is none yet.
        """
        for end, char in enumerate(text, 1):
            matched = self._follow(matched, char)
            if matched == self.length:
                return matched, end
            if matched == len(self._borders):
                self._borders.append(self._follow(self._borders[-1], char))
        return matched, None

    def _follow(self, matched: int, char: str) -> int:
        """Return the length of the longest prefix that a character after `matched` others completes."""
        while (expected := self.string[matched]) != char and matched:
            matched = self._borders[matched]
        return matched + (expected == char)


class StopFilter:
    """Pass text up to the first stop string, and hold back what may be the start of one.

    Time is linear in the text for each stop string, memory in the length of the strings.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [_StopString(stop) for stop in stops]
        self._matched = [0] * len(stops)
        self._pending: deque[str] = deque()  # characters
        self.stop: str | None = None  # the one that was found

    @property
    def found(self) -> bool:
        """Whether a stop string was found."""
        return self.stop is not None

    def copy(self) -> StopFilter:
        """Return an independent filter in the same state."""
        other = copy(self)
        other._matched, other._pending = self._matched.copy(), self._pending.copy()
        return other

    def step(self, piece: str) -> str:
        """Take a piece and return what is certain to come before a stop string."""
        if not self._stops:
            return piece
        before = len(self._pending)
        self._pending.extend(piece)
        starts = []
        for i, stop in enumerate(self._stops):
            self._matched[i], end = stop.step(self._matched[i], piece)
            if end is not None:
                starts.append((before + end - stop.length, stop.string))
        if starts:
            start, self.stop = min(starts)
            ready = self._take(start)
            self._pending.clear()
            self._matched = [0] * len(self._stops)
            return ready
        return self._take(len(self._pending) - max(self._matched, default=0))

    def flush(self) -> str:
        """Return what was held back: it did not become a stop string."""
        self._matched = [0] * len(self._stops)
        return self._take(len(self._pending))

    def _take(self, count: int) -> str:
        return "".join(self._pending.popleft() for _ in range(count))


class NextTokens(NamedTuple):
    """Tokens of a text for a pass."""

    ids: npt.NDArray[np.int32]
    drafts: int  # drafts among them, which are the last ones
    expected: float  # drafts that are expected to be accepted

    @property
    def forced(self) -> int:
        """Number of forced tokens. No token is chosen after them, so they take less time than drafts."""
        return len(self.ids) - self.drafts - 1


class _AdvanceRequest(TypedDict):
    """Arguments of :meth:`Constraint.advance`."""

    tokens: list[int]
    most_forced: int
    room: int


class Continuation:
    """The text after one prompt, token by token.

    Parameters
    ----------
    tokenizer
        Of the model.
    vocab_size
        Of the model: ids in the options are below it.
    ids
        Ids of the prompt, ``[n]``.
    max_tokens
        Maximum number of generated tokens, at least 1.
    context
        Maximum number of tokens of prompt and text, the limit of the session.
    prompt
        Text of the prompt; None if it was passed as ids.
    logprobs
        Number of most probable tokens in each piece; None omits all log probabilities.
    answer
        Index of the text among those of one prompt and seed.
    prefix_namespace
        Namespace of the session, for a draft model.
    seed
        Seed of the random numbers; see :class:`metal_prefill.generation.Sampler`.
    stop
        Strings and token ids that end the text.
    min_tokens
        Smallest number of tokens. Until then, end-of-text and stop tokens are not chosen, and stop strings
        are part of the text.
    reasoning
        Whether the text may begin with reasoning. Its tags are then part of the text even if they are control
        tokens, and stop strings end the answer only.
    echo
        Whether the text begins with the prompt.
    prompt_logprobs
        Whether there are pieces for the tokens of the prompt, except the first. They are computed like a text
        whose tokens are known.
    speculate
        Source of drafts of the next tokens.
    json_schema, regex, grammar
        A constraint on the text; see :class:`metal_prefill.generation._constraint.Constraint`.
    how
        Sampling options; see :class:`metal_prefill.generation.Options`.

    Attributes
    ----------
    ids : numpy.ndarray
        Ids to compute before the first piece, int32 ``[n]``: those of the prompt, or with `prompt_logprobs`
        its first id.
    prompt : numpy.ndarray
        Ids of the prompt, int32 ``[n]``.
    echo : str
        Part of the text that is not generated, until it is returned with the first token.
    sampler : _core.Sampler or None
        Chooses the tokens; None if the engine's argmax does.
    ended : str or None
        Reason for the end of the text; None while it continues.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        ids: npt.NDArray[np.int32],
        max_tokens: int,
        context: int,
        *,
        prompt: str | None = None,
        logprobs: int | None = None,
        answer: int = 0,
        prefix_namespace: str = "",
        seed: int | None = None,
        stop: str | int | Sequence[str | int] = (),
        min_tokens: int = 0,
        reasoning: bool = False,
        echo: bool = False,
        prompt_logprobs: bool = False,
        speculate: Speculate = "lookup",
        json_schema: Mapping[str, Any] | str | None = None,
        regex: str | None = None,
        grammar: str | None = None,
        **how: Unpack[SamplingOptions],
    ) -> None:
        strings, stop_ids = split_stops(stop, vocab_size)
        if how.get("logit_bias") is None:
            how.pop("logit_bias", None)
        options = _sampling.Options(**how)
        for token in options.logit_bias:
            token_id(token, vocab_size)
        if seed is not None:
            integer("seed", seed, 0)
        min_tokens = min(integer("min_tokens", min_tokens, 0), context)
        if logprobs is not None:
            logprobs = integer("logprobs", logprobs, 0, MOST_LOGPROBS)
        if prompt_logprobs and logprobs is None:
            raise ValueError("prompt_logprobs returns log probabilities and therefore requires logprobs")
        self.prompt = ids
        self._given = (
            ids[1:].tolist() if prompt_logprobs else []
        )  # tokens of the prompt that pieces are made of
        self.ids = ids[:1] if prompt_logprobs else ids
        self.echo = ""
        if echo:
            self.echo = tokenizer.decode(ids.tolist()) if prompt is None else prompt
        self._decoder = tokenizer.decoder(shown=tokenizer.reasoning_tags if reasoning else ())
        self._stop_ids = frozenset({*tokenizer.stop_ids, *stop_ids})
        self._filter = StopFilter(strings)
        given = len(self._given)
        self._made, self._least, self._most = 0, given + min_tokens, given + max_tokens
        self._context = context
        self._reports = logprobs is not None
        self._constraint: Constraint | None = None
        if json_schema is not None or regex is not None or grammar is not None:
            self._constraint = Constraint(tokenizer, json_schema=json_schema, regex=regex, grammar=grammar)
        # A constraint holds for the whole text, which ends reasoning only if the constraint mentions it.
        begun = reasoning and self._constraint is None and begins_after(tokenizer, ids.tolist())
        self._gate = ReasoningGate(begun=begun) if reasoning else None
        self.sampler: _core.Sampler | None = None
        if not options.is_greedy or self._reports or min_tokens or self._constraint is not None:
            self.sampler = _sampling.core_sampler(options, seed, self.ids.tolist(), answer)
            self.sampler.report(-1 if logprobs is None else logprobs)
            self.sampler.follow(self._given)
            if min_tokens:
                self.sampler.forbid(sorted(self._stop_ids), len(ids) + min_tokens)
            self._allow()
        drafter = make_drafter(speculate, vocab_size, self._constraint is not None, prefix_namespace)
        may_draft = drafter is not None and max_tokens > 2
        self._speculation = Speculation(drafter, ids) if drafter is not None and may_draft else None
        self._next: list[int] = []  # tokens of the text that are not computed
        self._forced: list[int] = []  # tokens that must follow those
        self._step: Step | None = None  # what the constraint answered to the tokens of the latest pass
        self.ended: FinishReason | None = None

    def next_tokens(
        self, room: int, cost: RowCost, rows: int = 1, tokens: float = 1.0, *, sent: bool = False
    ) -> NextTokens:
        """Return the tokens to compute next, with drafts of those after them.

        Parameters
        ----------
        room
            Tokens that the pass may have of this text, if drafts are to be among them.
        cost
            Of passes.
        rows, tokens
            Of the pass without drafts and forced tokens: its rows, and the expected number of tokens that
            it generates.
        sent
            The engine was told that this token follows (`can_run_ahead`), and may have submitted its pass,
            which then has no drafts. Drafting starts a token later, and no pass is discarded.
        """
        forced = max(len(self._next) - 1, 0)
        most = min(room - 1 - forced, self._most - self._made - 1, self._context - self._position - 1)
        if self._made < len(self._given):
            known = self._given[self._made : self._made + max(most, 0)]
            return NextTokens(np.array([*self._next, *known], np.int32), len(known), len(known))
        most = min(most, MOST_DRAFTS)
        if self._speculation is None:
            return NextTokens(np.array(self._next, np.int32), 0, 0.0)
        allow = None if self._constraint is None else self._allow
        drafts = self._speculation.drafts(max(most, 0), cost, rows + forced, tokens, allow, sent)
        expected = self._speculation.expected()
        return NextTokens(np.array([*self._next, *drafts], np.int32), len(drafts), expected)

    @property
    def most_pieces(self) -> int:
        """Number of pieces that the text has at most; the last one needs no room in the context."""
        return min(self._most, self._context - len(self.ids) + 1)

    @property
    def scored_rows(self) -> int:
        """Number of rows that are left to compute for log probabilities of the prompt."""
        left = len(self._given) - self._made
        return max(min(left + 1, self._most - self._made), 0) if left > 0 else 0

    def _allow(self, drafts: Sequence[int] = ()) -> int:
        """Let the sampler choose what the constraint allows, also after the drafts that it allows.

        Returns
        -------
        int
            How many of the drafts it allows.
        """
        if self._constraint is None or self.sampler is None:
            return len(drafts)
        ahead = self._constraint.ahead(drafts)
        self.sampler.allow_bits([self._constraint.mask(), *ahead])
        return len(ahead)

    def take(self, chosen: Sequence[int]) -> Iterator[Piece]:
        """Take the tokens that a pass chose, and forced ones, up to the end of the text.

        Raises
        ------
        ConstraintError
            The context is full, and the constraint is not met, or following it exceeded a limit.
        ConstraintPending
            The constraint has not answered yet, and nothing has changed.
        """
        free = chosen[max(len(self._given) - self._made, 0) :]
        self._step = self._advance(chosen, free)
        if self._speculation is not None and free:
            self._speculation.learn(free)
        reports = self.sampler.reports if self._reports and self.sampler is not None else []  # copies all
        for row, token in enumerate(chosen):
            yield self._take(token, reports[row] if reports else None)
            if self.ended is not None:
                break
        self._next = [chosen[-1]]
        if self._constraint is None or self.sampler is None:
            return
        forced, self._forced = self._forced[:MOST_FORCED], self._forced[MOST_FORCED:]
        for token in forced if self.ended is None else ():
            self.sampler.accept(token)
            self._next.append(token)
            if self._speculation is not None:
                self._speculation.follow(token)
            yield self._take(token)
            if self.ended is not None:
                break
        if self.ended is None:
            self._allow()
        elif self.ended == "context" and not (self._step is not None and self._step.met):
            raise ConstraintError(
                f"the context of {self._context} tokens is full before the text meets its constraint"
            )
        if self.ended is not None:
            self.release()

    def send(self, chosen: Sequence[int]) -> None:
        """Send what a pass chose to the constraint, whose answer :meth:`take` waits for."""
        request = self._request(chosen, chosen[max(len(self._given) - self._made, 0) :])
        if request is not None and self._constraint is not None:
            self._constraint.send_advance(**request)

    def wait_until(self, deadline: float) -> None:
        """Let :meth:`take` and :meth:`next_tokens` wait for the constraint until then, see `Constraint`."""
        if self._constraint is not None:
            self._constraint.deadline = deadline

    @property
    def pending(self) -> Future[Any] | None:
        """The answer of the constraint that the text waits for."""
        return None if self._constraint is None else self._constraint.pending

    def _request(self, chosen: Sequence[int], free: Sequence[int]) -> _AdvanceRequest | None:
        """Return what to advance the constraint by: tokens of a pass that were not given, and forced ones.

        New forced tokens are computed once the text has taken the earlier ones.
        """
        if self._constraint is None or not free:
            return None
        n = len(chosen)
        most = min(self._most, self._context - len(self.ids) + 1)
        room = most - self._made - (n - len(free))
        if stops := [i for i, token in enumerate(free) if token in self._stop_ids]:
            room = min(room, stops[0])
        if room <= 0:
            return None
        forced = self._forced_after(chosen)
        asks = not forced and not self._reports
        return {
            "tokens": [*free, *forced[:MOST_FORCED]],
            "most_forced": MOST_FORCED if asks else 0,
            "room": room,
        }

    def _forced_after(self, chosen: Sequence[int]) -> list[int]:
        """Return the forced tokens that are left after those of a pass."""
        n = len(chosen)
        return self._forced[n:] if self._forced[:n] == list(chosen) else []

    def _advance(self, chosen: Sequence[int], free: Sequence[int]) -> Step | None:
        request = self._request(chosen, free)
        step = None
        if request is not None and self._constraint is not None:
            step = self._constraint.advance(**request)
        if self._constraint is not None and free:
            self._forced = self._forced_after(chosen) or (step.forced if step is not None else [])
        return step

    def release(self) -> None:
        """Release the resources of the text in other processes; it cannot continue afterwards."""
        if self._constraint is not None:
            self._constraint.close()

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text."""
        return self._filter.stop

    @property
    def wanted(self) -> bool:
        """Whether anything is left to compute."""
        return self._most > 0

    @property
    def can_run_ahead(self) -> bool:
        """Whether the next pass chooses the largest logit's token, and one without drafts may follow it.

        This is known when the tokens of the next pass are: without a draft for it, there will be none for the
        pass after it.
        """
        drafting = self._speculation is not None and self._speculation.has_drafts
        return self.sampler is None and not drafting and self._made + 1 < self._most

    @property
    def _position(self) -> int:
        """Position of the last generated token."""
        return len(self.ids) + self._made - 1

    def _take(self, token: int, report: _Report | None = None) -> Piece:
        """Take one token; `report`: its log probability, and ids and those of the most probable tokens."""
        self._made += 1
        text, self.echo = self.echo, ""
        if self._made <= len(self._given):
            if self._made >= self._most:
                self.ended = "length"
            return self._piece(token, text, report)
        complete = self._step is not None and token not in self._stop_ids and self._step.take()
        if token in self._stop_ids:
            text += self.end("stop")
        else:
            made = self._decoder.step(token)
            if self._gate is not None:
                thought, made = self._gate.step(made)
                text += thought
            text += self._filter.step(made) if self._made > self._least else made
            if self._filter.found:
                self.ended = "stop"
            elif complete:
                text += self.end("stop")
            elif self._made >= self._most:
                text += self.end("length")
            elif self._position >= self._context:
                text += self.end("context")
        return self._piece(token, text, report)

    def _piece(self, token: int, text: str, report: _Report | None) -> Piece:
        if report is None:
            return Piece(token, text, finish_reason=self.ended)
        logprob, best = report
        return Piece(token, text, logprob, tuple(best), self.ended)

    def end(self, reason: FinishReason) -> str:
        """End the text and return the part that was held back."""
        self.ended = reason
        thought, made = "", self._decoder.flush()
        if self._gate is not None:
            thought, made = self._gate.step(made)
            made += self._gate.flush()
        return thought + self._filter.step(made) + ("" if self._filter.found else self._filter.flush())
