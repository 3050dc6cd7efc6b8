"""Choice of the tokens of a text among those that may follow, their text, and the conditions that end it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import numpy as np

from metal_prefill import _core
from metal_prefill._support.arguments import token_id
from metal_prefill.generation._speculation import MOST_DRAFTS

if TYPE_CHECKING:
    from concurrent.futures import Future

    from metal_prefill.generation._constraint import Constraint, Step
    from metal_prefill.text._reasoning import ReasoningGate
    from metal_prefill.text._vocabulary import TokenDecoder

FinishReason = Literal["stop", "length", "context", "cancelled", "error"]


def split_stops(stop: str | int | Sequence[str | int], vocab_size: int) -> tuple[list[str], list[int]]:
    """Return the strings and the token ids that end a text; raise TypeError or ValueError for others."""
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
        return self.stop is not None

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
    """Decodes tokens, and ends the text."""

    def __init__(
        self,
        decoder: TokenDecoder,  # of the tokens
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

    def take(self, token: int, completes: Callable[[int], bool]) -> str:
        """Take the next token, and return the text that is complete with it.

        `completes` returns whether nothing can follow a token; it is called once for each that is neither
        given nor ends the text.
        """
        self.made += 1
        if self.made <= self._given:
            self.ended = "length" if self.made >= self._most else None
            return ""
        if token in self._stop_ids:
            return self._end("stop")
        complete = completes(token)
        text, answer = self._divided(self._decoder.step(token))
        text += self._filter.step(answer) if self.made > self._least else answer
        if self._filter.found:
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
        return text + self._filter.step(answer) + ("" if self._filter.found else self._filter.flush())

    def _divided(self, text: str) -> tuple[str, str]:
        """Divide text into reasoning and answer."""
        return ("", text) if self._gate is None else self._gate.step(text)

    @property
    def stop_string(self) -> str | None:
        return self._filter.stop


# Maximum number of forced tokens of a text in a pass. Like drafts, they delay every text of the pass, and
# texts can be cancelled only between passes.
MOST_FORCED = MOST_DRAFTS


class _AdvanceRequest(TypedDict):
    """Arguments of :meth:`Constraint.advance`."""

    tokens: list[int]
    most_forced: int
    room: int


class Choosing:
    """Choice of tokens by a sampler among those that a constraint allows."""

    def __init__(
        self,
        # None if the engine's argmax chooses tokens; there is no constraint then.
        sampler: _core.Sampler | None,
        constraint: Constraint | None,  # of the text, if any
        stop_ids: frozenset[int],  # ids that end the text, which the constraint does not receive
        # Whether to compute forced tokens. They are not sampled, and have no log probabilities.
        forces: bool,
    ) -> None:
        self.sampler, self.constraint = sampler, constraint
        self._stop_ids, self._forces = stop_ids, forces
        self._forced: list[int] = []  # tokens that must follow those of the latest pass
        self._step: Step | None = None  # the constraint's answer to those of the latest pass
        self.allow()

    def allow(self, drafts: Sequence[int] = ()) -> int:
        """Let the sampler choose what the constraint allows; return how many of the drafts that includes."""
        if self.constraint is None or self.sampler is None:
            return len(drafts)
        ahead = self.constraint.ahead(drafts)
        self.sampler.allow_bits([self.constraint.mask(), *ahead])
        return len(ahead)

    def send(self, chosen: Sequence[int], free: Sequence[int], room: int) -> None:
        """Send what :meth:`advance` waits for."""
        request = self._request(chosen, free, room)
        if request is not None and self.constraint is not None:
            self.constraint.send_advance(**request)

    def advance(
        self,
        # Tokens of the pass, and those of them that were not given.
        chosen: Sequence[int],
        free: Sequence[int],
        room: int,  # number of tokens that the text may still have
    ) -> None:
        """Advance the constraint by the tokens of a pass; `ConstraintPending` changes nothing."""
        request, step = self._request(chosen, free, room), None
        if request is not None and self.constraint is not None:
            step = self.constraint.advance(**request)
        if self.constraint is not None and free:
            self._forced = self._forced_after(chosen) or (step.forced if step is not None else [])
        self._step = step

    def _request(self, chosen: Sequence[int], free: Sequence[int], room: int) -> _AdvanceRequest | None:
        """Return what to advance the constraint by: tokens of a pass that were not given, and forced ones.

        New forced tokens are computed once the text has taken the earlier ones.
        """
        if self.constraint is None or not free:
            return None
        if stops := [i for i, token in enumerate(free) if token in self._stop_ids]:
            room = min(room, stops[0])
        if room <= 0:
            return None
        forced = self._forced_after(chosen)
        return {
            "tokens": [*free, *forced[:MOST_FORCED]],
            "most_forced": MOST_FORCED if self._forces and not forced else 0,
            "room": room,
        }

    def _forced_after(self, chosen: Sequence[int]) -> list[int]:
        """Return the forced tokens that are left after those of a pass."""
        n = len(chosen)
        return self._forced[n:] if self._forced[:n] == list(chosen) else []

    def completes(self, token: int) -> bool:
        """Take a token of the latest answer, and return whether nothing can follow it."""
        return self._step is not None and self._step.take()

    def take_forced(self) -> list[int]:
        """Return the tokens that must follow, as many as a pass may have."""
        forced, self._forced = self._forced[:MOST_FORCED], self._forced[MOST_FORCED:]
        return forced

    @property
    def unmet(self) -> bool:
        """Whether a text that ends now does not meet its constraint."""
        return self.constraint is not None and not (self._step is not None and self._step.met)

    def wait_until(self, deadline: float) -> None:
        """Wait for the constraint until then, see `Constraint`."""
        if self.constraint is not None:
            self.constraint.deadline = deadline

    @property
    def pending(self) -> Future[Any] | None:
        """The answer of the constraint that the text waits for."""
        return None if self.constraint is None else self.constraint.pending

    def close(self) -> None:
        """Release the resources of the constraint in other processes."""
        if self.constraint is not None:
            self.constraint.close()
