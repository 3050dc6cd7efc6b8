"""The text after a prompt, token by token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import numpy as np
import numpy.typing as npt

from metal_prefill import _core
from metal_prefill._support.arguments import integer, token_id
from metal_prefill.engine import Engine, RowCost
from metal_prefill.errors import ConstraintError
from metal_prefill.generation import _sampling
from metal_prefill.generation._ending import Choosing, FinishReason, TextWriter, split_stops
from metal_prefill.generation._speculation import MOST_DRAFTS, Speculate, Speculation, make_drafter
from metal_prefill.text._reasoning import ReasoningGate

if TYPE_CHECKING:
    from concurrent.futures import Future

MOST_LOGPROBS = 1000  # of a token
LAST_TURNS = 3  # of a prompt, after which states are kept: a question, an answer, and what was before these


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
    calls: bool
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


@dataclass(frozen=True)
class _Rules:
    """The options of a text that are not those of sampling; see :meth:`metal_prefill.Session.generate`."""

    seed: int | None = None
    stop: str | int | Sequence[str | int] = ()
    min_tokens: int = 0
    reasoning: bool = False  # see `Continuation`
    calls: bool = False
    echo: bool = False
    prompt_logprobs: bool = False
    speculate: Speculate = "lookup"
    json_schema: Mapping[str, Any] | str | None = None
    regex: str | None = None
    grammar: str | None = None


def _divided(options: TextOptions) -> tuple[_Rules, _sampling.Options]:
    given: dict[str, Any] = dict(options)
    rules = _Rules(**{field.name: given.pop(field.name) for field in fields(_Rules) if field.name in given})
    if given.get("logit_bias") is None:
        given.pop("logit_bias", None)
    if unknown := given.keys() - SamplingOptions.__annotations__.keys():
        known = ", ".join(sorted(TextOptions.__annotations__))
        raise TypeError(f"{min(unknown)!r} is not an option of a text; options are {known}")
    return rules, _sampling.Options(**given)


class NextTokens(NamedTuple):
    """Tokens of a text for a pass."""

    ids: npt.NDArray[np.int32]
    drafts: int  # drafts among them, which are the last ones
    expected: float  # drafts that are expected to be accepted

    @property
    def forced(self) -> int:
        """Number of forced tokens. No token is chosen after them, so they take less time than drafts."""
        return len(self.ids) - self.drafts - 1


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
        # Number of most probable tokens in each piece; None omits all log probabilities.
        logprobs: int | None = None,
        answer: int = 0,  # index of the text among those of one prompt and seed
        prefix_namespace: str = "",  # namespace of the session, for a draft model
    ) -> None:
        tokenizer, vocab_size = engine.tokenizer, engine.config.vocab_size
        rules, how = _divided(options)
        strings, stop_ids = split_stops(rules.stop, vocab_size)
        for token in how.logit_bias:
            token_id(token, vocab_size)
        if rules.seed is not None:
            integer("seed", rules.seed, 0)
        least = min(integer("min_tokens", rules.min_tokens, 0), context)
        if logprobs is not None:
            logprobs = integer("logprobs", logprobs, 0, MOST_LOGPROBS)
        if rules.prompt_logprobs and logprobs is None:
            raise ValueError("prompt_logprobs returns log probabilities and therefore requires logprobs")
        self.prompt = ids  # ids of the prompt, int32 ``[n]``
        self._turn_ends = tokenizer.turn_ends
        # Tokens of the prompt that pieces are made of.
        self._given = ids[1:].tolist() if rules.prompt_logprobs else []
        # Ids to compute before the first piece, int32 ``[n]``: those of the prompt, or with `prompt_logprobs`
        # its first id.
        self.ids = ids[:1] if rules.prompt_logprobs else ids
        self.echo = ""  # part of the text that is not generated, until it is returned with the first token
        if rules.echo:
            self.echo = tokenizer.decode(ids.tolist()) if prompt is None else prompt
        given = len(self._given)
        self._context, self._most = context, given + max_tokens
        ends = frozenset({*tokenizer.stop_ids, *stop_ids})
        constraint, sampler = None, None
        if (rules.json_schema, rules.regex, rules.grammar) != (None, None, None):
            from metal_prefill.generation._constraint import Constraint  # imports multiprocessing: 10 ms

            constraint = Constraint(
                tokenizer, json_schema=rules.json_schema, regex=rules.regex, grammar=rules.grammar
            )
        # A constraint holds for the whole text, which ends reasoning only if the constraint mentions it.
        tags = tokenizer.reasoning_tags if rules.reasoning else None
        begun = tags is not None and constraint is None and tokenizer.ends_in_reasoning(ids.tolist())
        self._writer = TextWriter(
            tokenizer.decoder(shown=tokenizer.shown_tokens(reasoning=rules.reasoning, calls=rules.calls)),
            strings,
            ends,
            None if tags is None else ReasoningGate(begun=begun, tags=tags),
            given=given,
            least=given + least,
            most=self._most,
            room=context - len(self.ids) + 1,
        )
        self._reports = logprobs is not None
        if not how.is_greedy or self._reports or least or constraint is not None:
            sampler = _sampling.core_sampler(how, rules.seed, self.ids.tolist(), answer)
            sampler.report(-1 if logprobs is None else logprobs)
            sampler.follow(self._given)
            if least:
                sampler.forbid(sorted(ends), len(ids) + least)
        self._choosing = Choosing(sampler, constraint, ends, forces=not self._reports)
        drafter = make_drafter(rules.speculate, vocab_size, constraint is not None, prefix_namespace)
        may_draft = drafter is not None and max_tokens > 2
        self._speculation = Speculation(drafter, ids) if drafter is not None and may_draft else None
        self._next: list[int] = []  # tokens of the text that are not computed

    @property
    def sampler(self) -> _core.Sampler | None:
        """Chooses the tokens; None if the engine's argmax does."""
        return self._choosing.sampler

    @property
    def ended(self) -> FinishReason | None:
        """Reason for the end of the text; None while it continues."""
        return self._writer.ended

    def next_tokens(
        self,
        room: int,  # tokens that the pass may have of this text, if drafts are to be among them
        cost: RowCost,  # of passes
        # Of the pass without drafts and forced tokens: its rows, and the expected number of tokens that it
        # generates.
        rows: int = 1,
        tokens: float = 1.0,
        *,
        # The engine was told that this token follows (`can_run_ahead`), and may have submitted its pass,
        # which then has no drafts. Drafting starts a token later, and no pass is discarded.
        sent: bool = False,
    ) -> NextTokens:
        """Return the tokens to compute next, with drafts of those after them."""
        made, forced = self._writer.made, max(len(self._next) - 1, 0)
        most = max(min(room - 1 - forced, self.most_pieces - made - 1), 0)
        if made < len(self._given):
            known = self._given[made : made + most]
            return NextTokens(np.array([*self._next, *known], np.int32), len(known), len(known))
        if self._speculation is None:
            return NextTokens(np.array(self._next, np.int32), 0, 0.0)
        allow = None if self._choosing.constraint is None else self._choosing.allow
        drafts = self._speculation.drafts(min(most, MOST_DRAFTS), cost, rows + forced, tokens, allow, sent)
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
        """Number of pieces that the text has at most; the last one needs no room in the context."""
        return min(self._most, self._context - len(self.ids) + 1)

    @property
    def scored_rows(self) -> int:
        """Number of rows that are left to compute for log probabilities of the prompt."""
        left = len(self._given) - self._writer.made
        return max(min(left + 1, self._most - self._writer.made), 0) if left > 0 else 0

    def _free(self, chosen: Sequence[int]) -> tuple[Sequence[int], int]:
        """Return the tokens of a pass that were not given, and how many the text may still have."""
        made = self._writer.made
        known = min(max(len(self._given) - made, 0), len(chosen))
        return chosen[known:], self.most_pieces - made - known

    def take(self, chosen: Sequence[int]) -> Iterator[Piece]:
        """Take the tokens that a pass chose, and forced ones, up to the end of the text.

        Raises ConstraintError if the context is full before the constraint is met, or following it exceeded a
        limit. `ConstraintPending` changes nothing.
        """
        choosing, (free, room) = self._choosing, self._free(chosen)
        choosing.advance(chosen, free, room)
        if self._speculation is not None and free:
            self._speculation.learn(free)
        reports = self.sampler.reports if self._reports and self.sampler is not None else []  # copies all
        for row, token in enumerate(chosen):
            yield self._take(token, reports[row] if reports else None)
            if self.ended is not None:
                break
        self._next = [chosen[-1]]
        if choosing.constraint is None or self.sampler is None:
            return
        for token in choosing.take_forced() if self.ended is None else ():
            self.sampler.accept(token)
            self._next.append(token)
            if self._speculation is not None:
                self._speculation.follow(token)
            yield self._take(token)
            if self.ended is not None:
                break
        if self.ended is None:
            choosing.allow()
        elif self.ended == "context" and choosing.unmet:
            raise ConstraintError(
                f"the context of {self._context} tokens is full before the text meets its constraint"
            )
        if self.ended is not None:
            self.release()

    def _take(self, token: int, report: tuple[float, list[tuple[int, float]]] | None = None) -> Piece:
        """Take one token; `report`: its log probability, and ids and those of the most probable tokens."""
        echo, self.echo = self.echo, ""
        text = echo + self._writer.take(token, self._choosing.completes)
        if report is None:
            return Piece(token, text, finish_reason=self.ended)
        logprob, best = report
        return Piece(token, text, logprob, tuple(best), self.ended)

    def send(self, chosen: Sequence[int]) -> None:
        """Send the tokens that a pass chose to the constraint; :meth:`take` waits for its answer."""
        self._choosing.send(chosen, *self._free(chosen))

    def wait_until(self, deadline: float) -> None:
        """Let :meth:`take` and :meth:`next_tokens` wait for the constraint until then."""
        self._choosing.wait_until(deadline)

    @property
    def pending(self) -> Future[Any] | None:
        """The answer of the constraint that the text waits for."""
        return self._choosing.pending

    def release(self) -> None:
        """Release the resources of the text in other processes; it cannot continue afterwards."""
        self._choosing.close()

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text."""
        return self._writer.stop_string

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
        return self.sampler is None and not drafting and self._writer.made + 1 < self._most
