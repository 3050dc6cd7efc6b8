"""Sessions: a KV cache and a position over shared weights."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from metal_prefill._engine import Engine
from metal_prefill._support.arguments import (
    Logits,
    Progress,
    TokenIds,
    check_prompt_options,
    integer,
    token_array,
    token_id,
)
from metal_prefill._support.dispatches import Dispatch, from_core
from metal_prefill.errors import ClosedError, ContextOverflowError, DeviceError
from metal_prefill.files import _session_file
from metal_prefill.generation._run_ahead import RunAhead
from metal_prefill.generation._text_generation import Continuation, Piece, TextOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from metal_prefill import _core

__all__ = ["Logits", "Piece", "Progress", "Session", "TokenIds", "token_array", "token_id"]


# One for each generator: see `Claim` in cpp/engine.h.
_claims = itertools.count(1)


class Session:
    """A KV cache with a position; many sessions share one model's weights.

    Made by :meth:`metal_prefill.Model.session`. All methods may be called from several threads: calls on
    one session that compute, change it or copy its cache run one after another, calls on different sessions
    may overlap. :attr:`position`, :attr:`tokens`, :meth:`stats` and ``repr`` never wait: while a prompt is
    computed they tell what its finished chunks left. The GIL is released during compute.

    Attributes
    ----------
    notes : str
        The user's own; saved and loaded with the session.
    """

    def __init__(self, engine: Engine, core: _core.Session, prefix_namespace: str = "") -> None:
        self._engine = engine
        self._prefix_namespace = prefix_namespace
        self._core: _core.Session | None = core
        self.notes = ""

    @property
    def native(self) -> _core.Session:
        """The native session, for the package's own modules.

        Raises
        ------
        ClosedError
            The session is closed.
        """
        core = self._core  # another thread may close the session now
        if core is None:
            raise ClosedError("the session is closed")
        return core

    def _checked(self, tokens: TokenIds, unread: int = 0) -> npt.NDArray[np.int32]:
        """Convert token ids, of which the last `unread` need no room in the cache."""
        core = self.native
        return token_array(
            tokens,
            self._engine.config.vocab_size,
            context=core.max_context,
            position=core.position,
            unread=unread,
        )

    @property
    def position(self) -> int:
        """Number of tokens in the cache; the next token stands at this position."""
        return self.native.position

    @property
    def max_context(self) -> int:
        """Largest position this session may reach."""
        return self.native.max_context

    @property
    def tokens(self) -> list[int]:
        """Ids of the tokens in the cache, oldest first."""
        return self.native.tokens()

    def forward_prompt(
        self, tokens: TokenIds, *, reuse: bool = False, progress: Progress | None = None
    ) -> int:
        """Process a whole prompt and return the greedy next token.

        Parameters
        ----------
        tokens
            Token ids, ``[n]``, any integer dtype. They are appended at :attr:`position`.
        reuse
            Take `tokens` as the whole context instead: the longest prefix that the cache already holds is
            kept, what differs is dropped, and only the rest is computed.
        progress
            Called after each chunk with the number of tokens done and the number in all. An exception that
            it raises stops the prompt there; the finished chunks stay in the cache and :attr:`position` says
            where it stands. It may read, :meth:`fork` and :meth:`save` this session, which then has the
            finished chunks, but not change it.

        Returns
        -------
        int
            Id of the largest logit after the last token; the lowest id wins a tie.

        Raises
        ------
        ValueError
            Empty prompt, or an id outside the vocabulary.
        TypeError
            Ids that are not integers.
        ContextOverflowError
            More tokens than the context has room for.
        DeviceError
            The device failed.
        NumericalError
            No logit is a number; or, where logits or log probabilities are returned, one of them is not.
        SessionBusyError
            Called from the progress callback of another call on this session.

        Notes
        -----
        After any of these errors position and cache are as before the call; with `reuse`, a device failure
        leaves the common prefix. Ctrl-C is honoured between chunks.
        """
        check_prompt_options(reuse, progress)
        ids = self._checked(tokens)
        return self.native.forward_prompt(ids, reuse, progress)

    def forward_prompt_logits(
        self, tokens: TokenIds, *, reuse: bool = False, progress: Progress | None = None
    ) -> Logits:
        """Process a whole prompt and return the logits after its last token.

        Parameters and errors are those of :meth:`forward_prompt`.

        Returns
        -------
        numpy.ndarray
            float32, ``[vocab_size]``.
        """
        check_prompt_options(reuse, progress)
        ids = self._checked(tokens)
        return self.native.forward_prompt_logits(ids, reuse, progress)

    def score(self, tokens: TokenIds, *, progress: Progress | None = None) -> Logits:
        """Log probability of each token given those before it.

        `tokens` is appended to the cache, except its last element, which is only predicted.

        Parameters
        ----------
        tokens
            Token ids, ``[n]`` with n at least 2.
        progress
            As in :meth:`forward_prompt`.

        Returns
        -------
        numpy.ndarray
            float32, ``[n - 1]``; element i is ``log p(tokens[i + 1] | ..., tokens[i])`` in nats.
        """
        return self.native.score(self._checked(tokens, unread=1), progress)

    def forward_token(self, token: int) -> Logits:
        """Append one token and return the logits after it, float32 ``[vocab_size]``."""
        return self.native.forward_token(token_id(token, self._engine.config.vocab_size))

    def forward_token_greedy(self, token: int) -> int:
        """Append one token and return the greedy next one."""
        return self.native.forward_token_greedy(token_id(token, self._engine.config.vocab_size))

    def reset(self) -> None:
        """Forget all tokens: the position becomes 0."""
        self.rewind(0)

    def rewind(self, position: int) -> None:
        """Forget the tokens from `position` on.

        In a model with recurrent layers, the next call computes the tokens between the last snapshot and
        `position` again. Its results are those of a session that never had the tokens after `position`.

        Raises
        ------
        ValueError
            If `position` is negative or beyond the current one.
        SessionBusyError
            Called from the progress callback of another call on this session.
        """
        core, target = self.native, integer("position", position)
        if not 0 <= target <= core.max_context:
            raise ValueError(
                f"cannot rewind to position {target}: the position of the session is {core.position}"
            )
        core.rewind(target)

    def fork(self) -> Session:
        """Return a new session with a copy of this one's cache and position."""
        return Session(self._engine, self.native.fork(), self._prefix_namespace)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the cache and its tokens to a file, which :meth:`metal_prefill.Model.load_session` continues.

        An existing file is replaced in one step: whatever happens, `path` holds the old state or the new one.

        Raises
        ------
        OutputError
            A device, a FIFO or a socket is there.
        OSError
            The file cannot be written.
        TypeError
            :attr:`notes` is not a str.
        """
        if not isinstance(self.notes, str):
            raise TypeError(f"notes must be a str, got {type(self.notes).__name__}")
        state = _session_file.State(*self.native.export_state(), self.notes)
        _session_file.write(path, self._engine.state_owner, state)

    def _inspector(self) -> _core.SessionInspector:
        inspector = self.native.inspector()
        if inspector is None:
            raise DeviceError(
                f"the engine '{self._engine.core.backend}' makes no dispatches to list or to time; "
                "use device='metal'"
            )
        return inspector

    def plan(self, tokens: int) -> list[Dispatch]:
        """Return the dispatches that a prompt of `tokens` tokens would make from here.

        Nothing is computed, and the position stays.

        Raises
        ------
        DeviceError
            The engine makes no dispatches: it is the CPU's.
        ContextOverflowError
            More tokens than the context has room for.
        ValueError
            If `tokens` is less than 1.
        """
        inspector, count = self._inspector(), integer("tokens", tokens, 1)
        if count > self.max_context:
            raise ContextOverflowError(
                f"position {self.position} + {count} tokens exceeds the context of {self.max_context}"
            )
        return from_core(inspector.plan(count))

    def trace(self, tokens: TokenIds, *, progress: Progress | None = None) -> tuple[int, list[Dispatch]]:
        """Process a prompt with each dispatch in a command buffer of its own, and say when it ran.

        That takes longer than :meth:`forward_prompt`, and what could run at the same time does not.
        Parameters and errors are those of :meth:`forward_prompt`.

        Returns
        -------
        token : int
            The greedy next token.
        dispatches : list of Dispatch
            In the order in which they ran.

        Raises
        ------
        DeviceError
            Also where the engine makes no dispatches: it is the CPU's.
        """
        ids = self._checked(tokens)
        token, dispatches = self._inspector().trace(ids, progress)
        return token, from_core(dispatches)

    def stats(self) -> dict[str, float]:
        """Counters of the last call and sizes in bytes.

        ``position``, ``kv_cache_bytes``, ``tokens_reused`` (of the last prompt with ``reuse=True``),
        ``tokens_recomputed`` and what the engine adds, such as ``dispatches``, ``command_buffers`` and
        ``allocations`` on Metal. ``tokens_recomputed`` is the number of known tokens that the last call
        computed again, because the states of recurrent layers were not known after them.
        """
        return self.native.stats()

    def generate(
        self,
        prompt: str | TokenIds,
        max_tokens: int = 128,
        *,
        progress: Progress | None = None,
        **options: Unpack[TextOptions],
    ) -> Iterator[str]:
        """Continue a prompt and yield text as it is made.

        The prompt is the whole context: what the cache already holds of it is reused. Tokens are chosen where
        the logits are, so that sampling takes no longer than greedy choices.

        Parameters
        ----------
        prompt
            Text, encoded with the model's tokenizer, or token ids.
        max_tokens
            Upper bound on the number of tokens made.
        progress
            As in :meth:`forward_prompt`, for the prompt.
        temperature, top_k, top_p, min_p, repeat_penalty, typical_p, frequency_penalty, presence_penalty, \
logit_bias
            See :class:`metal_prefill.generation.Options`; temperature 0, the default, is greedy.
        seed
            Of the random numbers, not negative; None draws a fresh one. The random number of a token is a
            function of the seed and its position: a text depends on the seed and the logits alone.
        stop
            Strings and token ids that end the text; they are not part of it.
        min_tokens
            Smallest number of tokens. Until then, only `max_tokens` and a full context end the text:
            end-of-text and stop tokens are not chosen, and stop strings are part of the text.
        echo
            Let the text begin with the prompt.
        speculate
            Source of drafts of the next tokens: ``"lookup"`` finds what followed the same tokens before, a
            :class:`metal_prefill.Model` with the same vocabulary generates them, and a function takes all ids
            so far and returns some. ``"off"`` makes none. One pass verifies several drafts, and only as many
            are made as save time. They never change the text, greedy or sampled: token for token it equals
            that of ``"off"``. Between pieces the session may be ahead by accepted drafts.
        json_schema, regex, grammar
            A constraint, one at most: the text is JSON that the schema (a mapping, or its JSON) describes;
            the whole of it matches a regular expression; a Lark grammar makes it from its rule `start`.
            Tokens that leave no choice are not sampled, but computed together. Needs the extra ``guide``.

        Yields
        ------
        str
            Pieces of text, never an incomplete character. They end at an end-of-text token, at a stop
            string or token, after `max_tokens`, or where the context is full.

        Raises
        ------
        SessionBusyError
            Another call changed the session since the last piece, such as a second generator: each needs a
            session of its own while it lasts. The session stays as the other call left it.
        NumericalError
            A logit is NaN.
        ValueError
            An option is out of range; or no token may be chosen, such as where `logit_bias` excludes all.
        ConstraintError
            A constraint cannot be read, nothing satisfies it, or the context is full before it is met: then
            after the last piece. If `max_tokens` ends a text, its `finish_reason` is ``"length"``.
        """
        text = self._continuation(prompt, max_tokens, options)
        if max_tokens == 0:
            return iter([text.echo] if text.echo else [])
        return (piece.text for piece in self._pieces(text, progress) if piece.text)

    def stream(
        self,
        prompt: str | TokenIds,
        max_tokens: int = 128,
        *,
        logprobs: int | None = None,
        progress: Progress | None = None,
        **options: Unpack[TextOptions],
    ) -> Iterator[Piece]:
        """Continue a prompt and yield each token with its text and, if asked for, log probabilities.

        Parameters and errors are those of :meth:`generate`.

        Parameters
        ----------
        prompt, max_tokens, progress, options
            As in :meth:`generate`.
        logprobs
            Say the log probability of each token and of so many of the most probable ones, 0 to 1000; None
            says neither.
        prompt_logprobs
            One of the options. Yield the tokens of the prompt first, all but its first one, each with its log
            probability and, unless `echo`, without text. `max_tokens` does not count them, and may be 0.
            All of the prompt is computed, whatever the cache has.

        Yields
        ------
        Piece
            One for each token; the last has the reason for the end.
        """
        text = self._continuation(prompt, max_tokens, options, logprobs)
        return self._pieces(text, progress) if text.wanted else iter(())

    def _continuation(
        self, prompt: str | TokenIds, max_tokens: int, options: TextOptions, logprobs: int | None = None
    ) -> Continuation:
        engine = self._engine
        engine.check_generates()
        return Continuation(
            engine.tokenizer,
            engine.config.vocab_size,
            self._checked(engine.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt),
            integer("max_tokens", max_tokens, 0),
            self.max_context,
            prompt=prompt if isinstance(prompt, str) else None,
            logprobs=logprobs,
            prefix_namespace=self._prefix_namespace,
            **options,
        )

    def _pieces(self, text: Continuation, progress: Progress | None) -> Iterator[Piece]:
        claim = next(_claims)  # ends when another call changes the session

        core, ahead = self.native, RunAhead(self._engine)
        continues = ahead.begin(text.can_run_ahead)
        if text.sampler is None:
            token = core.forward_prompt(text.ids, True, progress, claim, continues)
        else:
            token = core.forward_prompt_sampled(text.ids, text.sampler, True, progress, claim)
        ahead.end(0, core)
        computed = len(text.ids)  # position of the session
        position = computed - 1  # of the last piece
        for piece in text.take([token]):
            position += 1
            yield piece
        while text.ended is None:
            following = text.next_tokens(self._engine.exact_rows, self._engine.row_cost, sent=ahead.sent)
            core, continues = self.native, ahead.begin(text.can_run_ahead)
            chosen = core.forward_drafts(following.ids, following.drafts, text.sampler, claim, continues)
            ahead.end(0 if following.forced else len(following.ids), core)
            computed += len(following.ids) - following.drafts + len(chosen) - 1
            try:
                for i, piece in enumerate(text.take(chosen)):
                    if i > 0:
                        core.check_claim(claim)
                    position += 1
                    yield piece
            finally:
                if position < computed:  # the text ended before the last draft
                    core.rewind(position, claim)

    def close(self) -> None:
        """Free the cache. Calls under way finish; later ones raise :class:`ClosedError`."""
        self._core = None

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        core = self._core  # another thread may close the session now
        if core is None:
            return "<metal_prefill.Session closed>"
        return f"<metal_prefill.Session position={core.position} of {core.max_context}>"
