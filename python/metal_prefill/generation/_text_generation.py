"""The text after a prompt, token by token, and the conditions that end it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from metal_prefill import _core
from metal_prefill._support.arguments import integer, stops_of, token_id
from metal_prefill.engine import Engine
from metal_prefill.errors import ConstraintError
from metal_prefill.generation._guide import Guide
from metal_prefill.generation._sampling import TextOptions, core_sampler, sampling_of
from metal_prefill.generation._speculation import MOST_DRAFTS, Speculation, make_drafter
from metal_prefill.text._reasoning import ReasoningGate

if TYPE_CHECKING:
    from concurrent.futures import Future

    from metal_prefill.generation._constraint import Constraint
    from metal_prefill.text._vocabulary import TokenDecoder

FinishReason = Literal["stop", "length", "context", "cancelled", "error"]
MOST_LOGPROBS = 1000  # of a token
LAST_TURNS = 3  # of a prompt, after which states are kept: a question, an answer, and the turns before these


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


class NextTokens(NamedTuple):
    """Tokens of a text for a pass."""

    ids: npt.NDArray[np.int32]
    drafts: int  # drafts among them, which are the last ones
    expected: float  # drafts that are expected to be accepted

    @property
    def forced(self) -> int:
        """Number of forced tokens. No token is chosen after them, so they take less time than drafts."""
        return len(self.ids) - self.drafts - 1


def split_stops(stop: str | int | Sequence[str | int], vocab_size: int) -> tuple[list[str], list[int]]:
    """Return the strings and the token ids that end a text; raise TypeError or ValueError for others."""
    stops = stops_of(stop)
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
            Characters of the string that the text ends with now, all of them if it was found.
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
    """Passes text up to the first stop string, and holds back text that may be the start of one.

    Time is linear in the text for each stop string, memory in the length of the strings.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [_StopString(stop) for stop in stops]
        self._matched = [0] * len(stops)
        self._pending: deque[str] = deque()  # characters
        self.stop: str | None = None  # the one that was found

    def step(self, piece: str) -> str:
        """Add a piece; return the text that cannot belong to a stop string."""
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
        """Return the pending text at the end, which did not become a stop string."""
        return self._take(len(self._pending))

    def _take(self, count: int) -> str:
        return "".join(self._pending.popleft() for _ in range(count))


class TextWriter:
    """Decodes tokens and decides where the text ends."""

    def __init__(
        self,
        decoder: TokenDecoder,
        # Strings and ids that end the text and are not part of it.
        stops: Sequence[str],
        stop_ids: frozenset[int],
        # Divides reasoning, in which stop strings do not count, from the answer; None without reasoning.
        gate: ReasoningGate | None = None,
        *,
        given: int,  # number of first tokens that belong to the prompt and have no text
        least: int,  # number of tokens after which stop strings end the text
        most: int,  # number of tokens after which the text ends with ``"length"``
        # Number of tokens after which it ends with ``"context"``; the last one is not written to the cache.
        room: int,
    ) -> None:
        self._decoder, self._filter = decoder, StopFilter(stops)
        self._stop_ids, self._gate = stop_ids, gate
        self._given, self._least, self._most, self._room = given, least, most, room
        self.made = 0  # number of tokens so far
        self.ended: FinishReason | None = None  # reason for the end of the text; None while it continues

    def take(self, token: int, completes: Callable[[int], bool] | None) -> str:
        """Take the next token, and return the text that is complete with it.

        `completes` returns whether nothing can follow a token, if a constraint decides it; it is called once
        for each that is neither given nor ends the text.
        """
        self.made += 1
        if self.made <= self._given:
            self.ended = "length" if self.made >= self._most else None
            return ""
        if token in self._stop_ids:
            return self._end("stop")
        complete = completes is not None and completes(token)
        text, answer = self._divided(self._decoder.step(token))
        text += self._filter.step(answer) if self.made > self._least else answer
        if self._filter.stop is not None:
            self.ended = "stop"
        elif complete:
            text += self._end("stop")
        elif self.made >= self._most:
            text += self._end("length")
        elif self.made >= self._room:
            text += self._end("context")
        return text

    def _end(self, reason: FinishReason) -> str:
        """End the text and return the part that was held back."""
        self.ended = reason
        text, answer = self._divided(self._decoder.flush())
        if self._gate is not None:
            answer += self._gate.flush()
        text += self._filter.step(answer)
        return text if self._filter.stop is not None else text + self._filter.flush()

    def _divided(self, text: str) -> tuple[str, str]:
        """Divide text into reasoning and answer."""
        return ("", text) if self._gate is None else self._gate.step(text)

    @property
    def stop_string(self) -> str | None:
        return self._filter.stop


class Continuation:
    """The text after one prompt: decoding and its end, the choice of tokens, and drafts."""

    def __init__(
        self,
        engine: Engine,
        ids: npt.NDArray[np.int32],  # ids of the prompt, ``[n]``
        max_tokens: int,  # maximum number of generated tokens, at least 1
        context: int,  # maximum number of tokens of prompt and text, the limit of the session
        # See :meth:`metal_prefill.Session.generate`. With `reasoning`, the text may begin with reasoning. Its
        # tags are then part of the text even if they are control tokens, and stop strings end the answer
        # only. With `calls`, control tokens that mark calls of tools are part of the text.
        options: TextOptions,
        *,
        prompt: str | None = None,  # text of the prompt; None if it was passed as ids
        answer: int = 0,  # index of the text among those of one prompt and seed
        prefix_namespace: str = "",  # namespace of the session, for a draft model
    ) -> None:
        tokenizer, vocab_size = engine.tokenizer, engine.config.vocab_size
        how = sampling_of(options)
        strings, stop_ids = split_stops(options.get("stop", ()), vocab_size)
        for token in how.logit_bias:
            token_id(token, vocab_size)
        if (seed := options.get("seed")) is not None:
            integer("seed", seed, 0)
        least = min(integer("min_tokens", options.get("min_tokens", 0), 0), context)
        # Number of most probable tokens in each piece; None omits all log probabilities.
        if (logprobs := options.get("logprobs")) is not None:
            logprobs = integer("logprobs", logprobs, 0, MOST_LOGPROBS)
        prompt_logprobs = options.get("prompt_logprobs", False)
        if prompt_logprobs and logprobs is None:
            raise ValueError("prompt_logprobs returns log probabilities and therefore requires logprobs")
        self.prompt = ids  # ids of the prompt, int32 ``[n]``
        self._turn_ends = tokenizer.turn_ends
        # Tokens of the prompt that pieces are made of.
        self._given = ids[1:].tolist() if prompt_logprobs else []
        # Ids to compute before the first piece, int32 ``[n]``: those of the prompt, or with `prompt_logprobs`
        # its first id.
        self.ids = ids[:1] if prompt_logprobs else ids
        self.echo = ""  # part of the text that is not generated, until it is returned with the first token
        if options.get("echo"):
            self.echo = tokenizer.decode(ids.tolist()) if prompt is None else prompt
        given = len(self._given)
        self._context, self._most = context, given + max_tokens
        ends = frozenset({*tokenizer.stop_ids, *stop_ids})
        constraint: Constraint | None = None
        all_options: Mapping[str, Any] = options
        sources = {kind: all_options.get(kind) for kind in ("json_schema", "regex", "grammar")}
        if any(source is not None for source in sources.values()):
            from metal_prefill.generation._constraint import Constraint  # imports multiprocessing: 10 ms

            constraint = Constraint(tokenizer, **sources)
        # A constraint holds for the whole text, which ends reasoning only if the constraint mentions it.
        reasoning = options.get("reasoning", False)
        tags = tokenizer.reasoning_tags if reasoning else None
        begun = tags is not None and constraint is None and tokenizer.ends_in_reasoning(ids.tolist())
        self.writer = TextWriter(
            tokenizer.decoder(
                shown=tokenizer.shown_tokens(reasoning=reasoning, calls=options.get("calls", False))
            ),
            strings,
            ends,
            None if tags is None else ReasoningGate(begun=begun, tags=tags),
            given=given,
            least=given + least,
            most=self._most,
            room=context - len(self.ids) + 1,
        )
        self._reports = logprobs is not None
        self.sampler: _core.Sampler | None = None  # None if the engine's argmax chooses tokens
        self.guide: Guide | None = None  # None without a constraint
        if not how.is_greedy or self._reports or least or constraint is not None:
            self.sampler = sampler = core_sampler(how, seed, self.ids.tolist(), answer)
            sampler.report(-1 if logprobs is None else logprobs)
            sampler.follow(self._given)
            if least:
                sampler.forbid(sorted(ends), len(ids) + least)
            if constraint is not None:
                # Forced tokens are not sampled, and never end-of-text tokens. Options may exclude others.
                excluded = {token for token, bias in how.logit_bias.items() if bias == -math.inf}
                excluded.update(stop_ids if least else ())
                forces = not self._reports and excluded <= tokenizer.stop_ids
                self.guide = Guide(sampler, constraint, ends, forces)
        speculate = options.get("speculate", "lookup")
        drafter = make_drafter(speculate, vocab_size, constraint is not None, prefix_namespace)
        may_draft = drafter is not None and max_tokens > 2
        self._speculation = Speculation(drafter, ids) if drafter is not None and may_draft else None
        self._cost = engine.row_cost
        self._next: list[int] = []  # tokens of the text that are not computed

    def next_tokens(
        self,
        room: int,  # maximum number of tokens of this text in the pass, if it may have drafts
        # Of the pass without drafts and forced tokens: its rows, and the expected number of tokens that it
        # generates.
        rows: int = 1,
        tokens: float = 1.0,
        *,
        # The engine was told that this token follows (`can_run_ahead`), and may have submitted its pass,
        # which then has no drafts. Drafting starts a token later, and no pass is discarded.
        sent: bool = False,
        deadline: float | None = None,  # end of the wait for a constraint that checks drafts
    ) -> NextTokens:
        """Return the tokens to compute next, with drafts of those after them."""
        made, forced = self.writer.made, max(len(self._next) - 1, 0)
        most = max(min(room - 1 - forced, self.most_pieces - made - 1), 0)
        if made < len(self._given):
            known = self._given[made : made + most]
            return NextTokens(np.array([*self._next, *known], np.int32), len(known), len(known))
        if self._speculation is None:
            return NextTokens(np.array(self._next, np.int32), 0, 0.0)
        allow = None if self.guide is None else partial(self.guide.allow, deadline=deadline)
        drafts = self._speculation.drafts(
            min(most, MOST_DRAFTS), self._cost, rows + forced, tokens, allow, sent
        )
        expected = self._speculation.expected()
        return NextTokens(np.array([*self._next, *drafts], np.int32), len(drafts), expected)

    def request(
        self,
        session: _core.Session,
        tokens: NextTokens,
        *,
        continues: bool,
        claim: int = 0,
        reuse: bool = False,
    ) -> _core.Request:
        """Return the request for tokens; `continues`: the chosen token will be appended next."""
        rows = tokens.drafts + 1
        marks = self._last_turn_ends(tokens.ids) if reuse else []
        if self.sampler is not None:
            return _core.Request.sampled(session, tokens.ids, self.sampler, rows, claim, reuse, marks)
        return _core.Request.greedy(
            session, tokens.ids, rows, drafts=True, continues=continues, claim=claim, reuse=reuse, marks=marks
        )

    def _last_turn_ends(self, ids: npt.NDArray[np.int32]) -> list[int]:
        """Return the positions from which other prompts are likely to differ from this one.

        These are the ends of its first turn, often the system message, and of the last turns.
        """
        ends = self._turn_ends(ids)
        return ends[:1] + ends[1:][-LAST_TURNS:]

    @property
    def most_pieces(self) -> int:
        """Maximum number of pieces of the text; the last one needs no room in the context."""
        return min(self._most, self._context - len(self.ids) + 1)

    @property
    def scored_rows(self) -> int:
        """Number of remaining rows for log probabilities of the prompt."""
        left = len(self._given) - self.writer.made
        return max(min(left + 1, self._most - self.writer.made), 0) if left > 0 else 0

    def _free(self, chosen: Sequence[int]) -> tuple[Sequence[int], int]:
        """Return the tokens of a pass that were not given, and the limit of further tokens of the text."""
        made = self.writer.made
        known = min(max(len(self._given) - made, 0), len(chosen))
        return chosen[known:], self.most_pieces - made - known

    def take(self, chosen: Sequence[int]) -> Iterator[Piece]:
        """Add the tokens that a pass chose, and forced ones, up to the end of the text.

        Raises ConstraintError if the context is full before the constraint is met, or following it exceeded a
        limit.
        """
        guide, writer, (free, room) = self.guide, self.writer, self._free(chosen)
        if guide is not None:
            guide.advance(chosen, free, room)
        if self._speculation is not None and free:
            self._speculation.learn(free)
        reports = self.sampler.reports if self._reports and self.sampler is not None else []  # copies all
        for row, token in enumerate(chosen):
            yield self._take(token, reports[row] if reports else None)
            if writer.ended is not None:
                break
        self._next = [chosen[-1]]
        if guide is None:
            return
        for token in guide.take_forced() if writer.ended is None else ():
            guide.sampler.accept(token)
            self._next.append(token)
            if self._speculation is not None:
                self._speculation.follow(token)
            yield self._take(token)
            if writer.ended is not None:
                break
        if writer.ended is None:
            guide.allow()
        elif writer.ended == "context" and not guide.met:
            raise ConstraintError(
                f"the context of {self._context} tokens is full before the text meets its constraint"
            )
        else:
            guide.constraint.close()

    def _take(self, token: int, report: tuple[float, list[tuple[int, float]]] | None = None) -> Piece:
        """Add one token; `report`: its log probability, and the best tokens with theirs."""
        echo, self.echo = self.echo, ""
        text = echo + self.writer.take(token, None if self.guide is None else self.guide.completes)
        logprob, best = (None, ()) if report is None else report
        return Piece(token, text, logprob, tuple(best), self.writer.ended)

    def send(self, chosen: Sequence[int]) -> None:
        """Send the tokens that a pass chose to the constraint; :meth:`take` receives its answer."""
        if self.guide is not None:
            self.guide.send(chosen, *self._free(chosen))

    @property
    def pending(self) -> Future[Any] | None:
        """The constraint's answer to the tokens that were sent, for which :meth:`take` would wait."""
        return None if self.guide is None else self.guide.constraint.pending

    @property
    def is_slow(self) -> bool:
        """Whether the constraint's latest answer was late, so that passes do not wait for the next one."""
        return self.guide is not None and self.guide.constraint.slow

    def close(self) -> None:
        """Release the constraint's resources in other processes."""
        if self.guide is not None:
            self.guide.constraint.close()

    @property
    def wanted(self) -> bool:
        """Whether the text has tokens to compute."""
        return self._most > 0

    @property
    def can_run_ahead(self) -> bool:
        """Whether the next pass chooses the largest logit's token, and one without drafts may follow it.

        This is known when the tokens of the next pass are: without a draft for it, there will be none for the
        pass after it.
        """
        drafting = self._speculation is not None and self._speculation.has_drafts
        return self.sampler is None and not drafting and self.writer.made + 1 < self._most
