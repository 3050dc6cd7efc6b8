"""Drafts of the next tokens, which a pass verifies all at once, and passes that are submitted ahead.

Drafts never change a text: a pass accepts drafts that equal its own choices, and drops the first wrong one
and all after it.
"""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from metal_prefill import _core
from metal_prefill._support.arguments import token_array
from metal_prefill.engine import Engine, EngineOwner, RowCost
from metal_prefill.errors import KVMemoryError

Speculate: TypeAlias = Literal["lookup", "off"] | EngineOwner | Callable[[list[int]], Sequence[int]]

MOST_DRAFTS = 31  # per pass: with the token before them as many rows as the head computes at once
LENGTHS = (1, 2, 3, 5, 7, 11, 15, 23, MOST_DRAFTS)  # of drafts: passes of full tiles cost least per row
_FORGET = 0.95  # a draft of 13 passes ago counts half
_PRIOR = 2.0  # weight of the first estimate, in drafts


class Acceptance:
    """Probability that a draft is accepted, estimated from the latest ones."""

    def __init__(self, prior: float) -> None:
        self._right, self._all = prior * _PRIOR, _PRIOR

    def note(self, right: int, wrong: int) -> None:
        self._right = self._right * _FORGET + right
        self._all = self._all * _FORGET + right + wrong

    @property
    def probability(self) -> float:
        return self._right / self._all


# Acceptance of drafts like the next one, and a function that drafts at most a number of tokens.
Best: TypeAlias = tuple[Acceptance, Callable[[int], list[int]]]


class LookupDrafter:
    """Drafts the tokens after an earlier occurrence of the last tokens, also with changes (`lookup.h`)."""

    free = True  # drafts take no time, and may be made only to learn whether they are right

    def __init__(self, constrained: bool = False) -> None:
        self._lookup = _core.Lookup()
        # By the number of tokens that matched: 1, 2, 3 to 4, 5 to 8, more. Under a constraint, short matches
        # mean little: much of what a text repeats is forced.
        priors = (0.1, 0.2, 0.5, 0.8, 0.9) if constrained else (0.3, 0.5, 0.7, 0.8, 0.9)
        self._after_match = [Acceptance(prior) for prior in priors]
        # By the number of tokens since the last change: 0, 1, 2 to 3, 4 to 7, more.
        self._after_change = [Acceptance(prior) for prior in (0.8, 0.9, 0.9, 0.9, 0.9)]

    def append(self, tokens: npt.NDArray[np.int32], forced: bool = False) -> None:
        """Append tokens of the text; `forced` tokens were not chosen."""
        self._lookup.append(tokens, forced)

    def best(self) -> Best:
        """Return the likelier of two places that may continue."""
        lookup = self._lookup
        matched, since_change = lookup.matched, lookup.since_change
        best = self._after_match[min(max(matched - 1, 0).bit_length(), 4)]
        if since_change is not None:
            changed = self._after_change[min(since_change.bit_length(), 4)]
            if not matched or changed.probability > best.probability:
                return changed, lookup.after_change
        return best, lookup.after_match


class TextDrafter:
    """Drafts by a function of the whole text and of the number of drafts."""

    free = False

    def __init__(self, function: Callable[[list[int], int], list[int]]) -> None:
        self._acceptance = Acceptance(0.5)
        self._function = function
        self._tokens: list[int] = []

    def append(self, tokens: npt.NDArray[np.int32], forced: bool = False) -> None:
        self._tokens += tokens.tolist()

    def best(self) -> Best:
        return self._acceptance, partial(self._function, self._tokens)


Drafter: TypeAlias = LookupDrafter | TextDrafter


def _drafts_of_caller(
    function: Callable[[list[int]], Sequence[int]], vocab_size: int, tokens: list[int], count: int
) -> list[int]:
    drafts = function(list(tokens))  # a copy, which the function may change
    if not isinstance(drafts, (Sequence, np.ndarray)):
        raise TypeError(f"a draft of speculate must be a sequence of ids, got {type(drafts).__name__}")
    if len(drafts) == 0:
        return []
    try:
        ids: list[int] = token_array(drafts, vocab_size)[:count].tolist()
    except (TypeError, ValueError) as error:
        raise type(error)(f"a draft of speculate: {error}") from None
    return ids


def _drafts_of_model(session: _core.Session, tokens: list[int], count: int) -> list[int]:
    """Return the greedy tokens of another model with the same vocabulary, as far as its memory suffices."""
    count = min(count, session.max_context - len(tokens))
    if count < 1:
        return []
    greedy = _core.Request.greedy
    drafts: list[int] = []
    with suppress(KVMemoryError):
        drafts += greedy(session, np.array(tokens, np.int32), reuse=True).run()
        while len(drafts) < count:
            drafts += greedy(session, np.array(drafts[-1:], np.int32)).run()
    return drafts


def make_drafter(
    speculate: Speculate, vocab_size: int, constrained: bool, prefix_namespace: str = ""
) -> Drafter | None:
    """Return a drafter for a text, which may be constrained; None for ``"off"``.

    A draft model finds prefixes of the text only in `prefix_namespace`. Raises TypeError or ValueError if
    `speculate` is an unknown name, a model with another vocabulary, or anything else.
    """
    if isinstance(speculate, str):
        if speculate not in ("lookup", "off"):
            raise ValueError(f"speculate must be 'lookup', 'off', a model or a function, got {speculate!r}")
        return LookupDrafter(constrained) if speculate == "lookup" else None
    if isinstance(speculate, EngineOwner):
        engine = speculate.engine
        if engine.config.vocab_size != vocab_size:
            raise ValueError(
                f"the draft model of speculate has a vocabulary of {engine.config.vocab_size} tokens, "
                f"this model one of {vocab_size}"
            )
        return TextDrafter(partial(_drafts_of_model, engine.session(prefix_namespace=prefix_namespace)))
    if callable(speculate):
        return TextDrafter(partial(_drafts_of_caller, speculate, vocab_size))
    kind = type(speculate).__name__
    raise TypeError(f"speculate must be 'lookup', 'off', a model or a function, got {kind}")


class Speculation:
    """Chooses the number of drafts for one text that saves the most time, which may be 0.

    Drafts that take time and do not save any are tried again after some tokens, each time after twice as
    many. Free ones are compared with the chosen tokens even while they are not used.
    """

    def __init__(self, drafter: Drafter, ids: npt.NDArray[np.int32]) -> None:
        self._drafter = drafter
        self._drafter.append(ids)
        self._acceptance, _ = drafter.best()
        self._drafts: list[int] = []  # of the current pass
        self._shadow: list[int] = []  # the first draft, used or not
        self._seconds = 0.0  # average per draft, with the constraint's check
        self._wait = self._patience = 8  # tokens until a draft is tried again
        # Whether there are, or may be, drafts of the next tokens that would save time.
        self.has_drafts = False

    def drafts(
        self,
        most: int,  # maximum number of drafts
        cost: RowCost,  # measured times of passes
        # Rows of the pass without drafts, and the expected number of tokens that it generates.
        rows: int,
        tokens: float,
        # Returns the number of drafts that a constraint allows; the next one is wrong.
        allow: Callable[[list[int]], int] | None = None,
        sent: bool = False,  # whether the pass is in flight without drafts; then none are returned
    ) -> list[int]:
        self._acceptance, draft = self._drafter.best()
        count = self._best_count(most, cost, rows, tokens)
        start = time.perf_counter()
        if self._drafter.free:
            drafted = draft(max(count, 1))
            self._shadow = drafted[:1]
        else:
            self._shadow = []
            if count == 0 and most > 0:
                self._wait -= 1
                if self._wait <= 0:
                    count = min(most, LENGTHS[2])
            drafted = draft(count) if count and not sent else []
        self.has_drafts = count > 0 and bool(drafted or (sent and not self._drafter.free))
        self._drafts = [] if sent else drafted[:count]
        allowed = allow(self._drafts) if self._drafts and allow is not None else count
        if self._drafts and (allow is not None or not self._drafter.free):
            seconds = (time.perf_counter() - start) / len(self._drafts)
            self._seconds = seconds if not self._seconds else 0.8 * self._seconds + 0.2 * seconds
        return self._drafts[:allowed]

    def _best_count(self, most: int, cost: RowCost, rows: int, tokens: float) -> int:
        """Return the number of drafts that generates the most tokens per second."""
        p = self._acceptance.probability
        best, best_rate = 0, tokens / cost.seconds(rows)
        for count in LENGTHS:
            if count > most:
                break
            expected = tokens + (p * (1 - p**count) / (1 - p) if p < 1 else count)
            rate = expected / (cost.seconds(rows + count) + count * self._seconds)
            if rate > best_rate:
                best, best_rate = count, rate
        return best

    def expected(self) -> float:
        """Return the expected number of accepted drafts."""
        p = self._acceptance.probability
        return math.fsum(p ** (i + 1) for i in range(len(self._drafts)))

    def learn(self, chosen: Sequence[int]) -> None:
        """Process the tokens that a pass chose: the accepted drafts, and one more."""
        right = len(chosen) - 1
        if self._drafts:
            self._acceptance.note(right, int(right < len(self._drafts)))
            if right:
                self._patience = 8
            elif self._wait <= 0:
                self._patience *= 2
            if self._wait <= 0:
                self._wait = self._patience
        elif self._shadow:
            self._acceptance.note(int(self._shadow[0] == chosen[0]), int(self._shadow[0] != chosen[0]))
        self._drafter.append(np.array(chosen, np.int32))

    def follow(self, token: int) -> None:
        self._drafter.append(np.array([token], np.int32), forced=True)


class RunAhead:
    """Times the passes of one text or one scheduler and notes them for all texts of the engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._next = False
        self._start = 0.0
        # Whether the engine may already be computing the next tokens, which then get no drafts.
        self.sent = False

    def begin(self, continues: bool) -> bool:
        """Start the clock of a pass; return whether the engine may submit the next pass at once.

        `continues`: the chosen tokens will be appended next, without drafts.
        """
        self._next = continues and self._engine.runs_ahead
        self._start = time.perf_counter()
        return self._next

    def end(self, rows: int, session: _core.Session | None) -> float:
        """Stop the clock and return the seconds that the host waited; `session` took part in the pass.

        `rows` is 0 if its time does not represent passes with as many rows.
        """
        seconds = time.perf_counter() - self._start
        if rows:
            # The host saw only the rest of a pass that was submitted ahead, so its time is the GPU's.
            known = session.stats()["gpu_seconds"] if self.sent and session is not None else 0.0
            self._engine.row_cost.note(rows, max(seconds, known))
        self.sent = self._next
        return seconds
