"""Sessions: KV caches and positions over shared weights."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from metal_prefill import _core
from metal_prefill._support.arguments import (
    Logits,
    Progress,
    TokenIds,
    check_prompt_options,
    integer,
    token_array,
    token_id,
)
from metal_prefill._support.interruptions import whole_interruptions
from metal_prefill.engine import Engine
from metal_prefill.errors import ClosedError, ContextOverflowError, DeviceError
from metal_prefill.generation._sampling import TextOptions
from metal_prefill.generation._speculation import RunAhead
from metal_prefill.generation._text_generation import Continuation, NextTokens, Piece
from metal_prefill.storage import _session_file

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from metal_prefill.gpu._trace import Dispatch

__all__ = ["Logits", "Piece", "Progress", "Session", "TokenIds"]


# One for each generator: see `Claim` in cpp/engine/engine.h.
_claims = itertools.count(1)


class Session:
    """A KV cache with a position; many sessions share the weights of one model.

    :meth:`metal_prefill.Model.session` creates sessions. All methods may be called from several threads.
    Calls on one session that compute, change it or copy its cache run one after another; calls on different
    sessions may overlap. :attr:`position`, :attr:`tokens`, :meth:`stats` and ``repr`` never wait: while a
    prompt is computed, they describe the state after its finished chunks. The GIL is released during compute.

    Attributes
    ----------
    notes : str
        Text for the caller's own use, which is saved and loaded with the session.
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
        """Convert token ids, the last `unread` of which need no room in the cache."""
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
        """Number of tokens in the cache, which is the position of the next token."""
        return self.native.position

    @property
    def max_context(self) -> int:
        """Maximum number of tokens in the cache."""
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
            Token ids, ``[n]``, of any integer dtype, which are appended at :attr:`position`.
        reuse
            Treat `tokens` as the whole context instead. The longest prefix that is already in the cache is
            kept, the rest of the cache is dropped, and only the remaining tokens are computed.
        progress
            Called after each chunk with the number of tokens done and their total. An exception that it
            raises stops the prompt; finished chunks stay in the cache, up to :attr:`position`. The function
            may read, :meth:`fork` and :meth:`save` this session in the state after the finished chunks, but
            not change it.

        Returns
        -------
        int
            Id of the largest logit after the last token; the lowest id wins a tie.

        Raises
        ------
        ValueError
            The prompt is empty, or an id is outside the vocabulary.
        TypeError
            An id is not an integer.
        ContextOverflowError
            The tokens do not fit the context.
        KVMemoryError
            The KV caches of the model would exceed its `kv_memory`.
        DeviceError
            The device failed.
        NumericalError
            All logits are NaN; or one is, if logits or log probabilities are returned.
        SessionBusyError
            Called from the progress callback of another call on this session.

        Notes
        -----
        After any of these errors, position and cache are as before the call; with `reuse`, a KVMemoryError, a
        NumericalError and a failed device leave the common prefix, of which :attr:`position` is the length.
        Ctrl-C stops a prompt between chunks.
        """
        check_prompt_options(reuse, progress)
        request = _core.Request.greedy(self.native, self._checked(tokens), reuse=reuse)
        return int(request.run(progress, "forward_prompt")[0])

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
        return self._logits(self._checked(tokens), "forward_prompt_logits", reuse, progress)

    def _logits(
        self, ids: npt.NDArray[np.int32], call: str, reuse: bool = False, progress: Progress | None = None
    ) -> Logits:
        return _core.Request.logits(self.native, ids, reuse=reuse).run(progress, call)

    def score(self, tokens: TokenIds, *, progress: Progress | None = None) -> Logits:
        """Return the log probability of each token, given the tokens before it.

        All tokens except the last, which is only predicted, are appended to the cache. Errors are those of
        :meth:`forward_prompt`.

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
        ids = self._checked(tokens, unread=1)
        return _core.Request.log_probs(self.native, ids, len(ids) - 1).run(progress, "score")

    def forward_token(self, token: int) -> Logits:
        """Append one token and return the logits after it, float32 ``[vocab_size]``.

        Errors are those of :meth:`forward_prompt`.
        """
        return self._logits(self._one(token), "forward_token")

    def forward_token_greedy(self, token: int) -> int:
        """Append one token and return the id of the largest logit after it.

        Errors are those of :meth:`forward_prompt`.
        """
        request = _core.Request.greedy(self.native, self._one(token))
        return int(request.run(None, "forward_token_greedy")[0])

    def _one(self, token: int) -> npt.NDArray[np.int32]:
        return np.array([token_id(token, self._engine.config.vocab_size)], np.int32)

    def reset(self) -> None:
        """Remove all tokens, so that the position is 0."""
        self.rewind(0)

    def rewind(self, position: int) -> None:
        """Remove the tokens from `position` on.

        In a model with recurrent layers, the next call recomputes the tokens between the last snapshot and
        `position`. Its results are those of a session that never had the removed tokens.

        Raises
        ------
        ValueError
            `position` is negative or beyond the current one.
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
        """Return a new session with the same tokens.

        The two share the pages of the cache; a page is copied when one of them writes to it.
        """
        return Session(self._engine, self.native.fork(), self._prefix_namespace)

    @whole_interruptions()
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the cache and its tokens to a file for :meth:`metal_prefill.Model.load_session`.

        An existing file is replaced atomically: `path` has either the old state or the new one.

        Raises
        ------
        OutputError
            `path` is a device, a FIFO or a socket.
        OSError
            The file cannot be written.
        TypeError
            :attr:`notes` is not a str.
        """
        if not isinstance(self.notes, str):
            raise TypeError(f"notes must be a str, got {type(self.notes).__name__}")
        _session_file.save(self.native, path, self._engine.state_owner, self.notes)

    def _inspector(self) -> _core.SessionInspector:
        inspector = self.native.inspector()
        if inspector is None:
            raise DeviceError(
                f"the engine '{self._engine.core.backend}' makes no dispatches to list or to time; "
                "use device='metal'"
            )
        return inspector

    def plan(self, tokens: int) -> list[Dispatch]:
        """Return the dispatches of a prompt of `tokens` tokens at the current position.

        Nothing is computed, and the position does not change.

        Raises
        ------
        DeviceError
            The engine is that of the CPU, which makes no dispatches.
        ContextOverflowError
            The tokens do not fit the context.
        ValueError
            `tokens` is less than 1.
        """
        inspector, count = self._inspector(), integer("tokens", tokens, 1)
        if count > self.max_context:
            raise ContextOverflowError(
                f"position {self.position} + {count} tokens exceeds the context of {self.max_context}"
            )
        from metal_prefill.gpu._trace import from_core

        return from_core(inspector.plan(count))

    def trace(self, tokens: TokenIds, *, progress: Progress | None = None) -> tuple[int, list[Dispatch]]:
        """Process a prompt with each dispatch in its own command buffer, and return the dispatches' times.

        This takes longer than :meth:`forward_prompt`, and no two dispatches overlap. Parameters and errors
        are those of :meth:`forward_prompt`.

        Returns
        -------
        token : int
            Greedy next token.
        dispatches : list of Dispatch
            Dispatches in the order of execution, with start and end in seconds.

        Raises
        ------
        DeviceError
            The device failed, or the engine is that of the CPU, which makes no dispatches.
        """
        ids = self._checked(tokens)
        token, dispatches = self._inspector().trace(ids, progress)
        from metal_prefill.gpu._trace import from_core

        return token, from_core(dispatches)

    def stats(self) -> dict[str, float]:
        """Return counters of the last call, and sizes in bytes.

        ``position``, ``kv_cache_bytes``, ``tokens_reused`` (of the last prompt with ``reuse=True``) and
        ``tokens_recomputed`` are always present. Engines add others, such as ``dispatches``,
        ``command_buffers`` and ``allocations`` on Metal. ``tokens_recomputed`` is the number of tokens before
        the current position that the last call recomputed to restore the states of recurrent layers.
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
        """Continue a prompt and yield text as it is generated.

        The prompt is the whole context; the prefix that is already in the cache is reused. The native core
        selects tokens, so that sampling takes little longer than greedy decoding.

        Parameters
        ----------
        prompt
            Text, which the model's tokenizer encodes, or token ids.
        max_tokens
            Maximum number of tokens to generate.
        progress
            As in :meth:`forward_prompt`, for the prompt.
        temperature, top_k, top_p, min_p, repeat_penalty, typical_p, frequency_penalty, presence_penalty, \
logit_bias
            See :class:`metal_prefill.generation.Options`; temperature 0, the default, is greedy decoding.
        seed
            Non-negative seed of the random numbers; None draws a new one. The random number of a token is a
            function of the seed and the token's position, so that a text depends only on its seed and logits.
        stop
            Strings and token ids that end the text, and are not part of it.
        min_tokens
            Minimum number of tokens. Until then, only `max_tokens`, a full context and the end of a
            constraint end the text: end-of-text and stop tokens are excluded, and stop strings are part of
            the text.
        echo
            Start the text with the prompt.
        speculate
            Source of drafts. ``"lookup"`` drafts the tokens that followed an earlier occurrence of the last
            tokens. A :class:`metal_prefill.Model` with the same vocabulary generates drafts. A function
            receives all ids so far and returns draft ids. ``"off"`` disables drafts. One pass verifies
            several drafts, of which there are only as many as save time. The text, greedy or sampled, is
            token for token that of ``"off"``. Between pieces, the session may be ahead by accepted drafts.
        json_schema, regex, grammar
            Constraint, at most one (extra ``guide``): a JSON schema that the text conforms to, as a mapping
            or JSON; a regular expression that the whole text matches; or a Lark grammar with the rule
            `start`. Forced tokens are not sampled, and are computed together.

        Yields
        ------
        str
            Pieces of text that contain no incomplete character. The text ends at an end-of-text token, at a
            stop string or token, after `max_tokens`, or when the context is full.

        Raises
        ------
        SessionBusyError
            Another call, such as a second generator, has changed the session since the last piece. Generators
            that overlap need separate sessions. The session stays as the other call left it.
        NumericalError
            A logit is NaN.
        ValueError
            An option is out of range, or every token is excluded, such as by `logit_bias`.
        ConstraintError
            A constraint is invalid or cannot be satisfied; or the context was full before it was satisfied,
            which is raised after the last piece. If `max_tokens` ends a text, no error is raised, and its
            `finish_reason` is ``"length"``.
        """
        if options.get("logprobs") is not None:
            raise ValueError("generate yields text alone; stream also returns logprobs")
        text = self._continuation(prompt, max_tokens, options)
        if max_tokens == 0:
            return iter([text.echo] if text.echo else [])
        return (piece.text for piece in self._pieces(text, progress) if piece.text)

    def stream(
        self,
        prompt: str | TokenIds,
        max_tokens: int = 128,
        *,
        progress: Progress | None = None,
        **options: Unpack[TextOptions],
    ) -> Iterator[Piece]:
        """Continue a prompt and yield each token with its text and, on request, log probabilities.

        Parameters and errors are those of :meth:`generate`.

        Parameters
        ----------
        prompt, max_tokens, progress, options
            As in :meth:`generate`.
        logprobs
            One of the options. Number of most probable tokens, 0 to 1000, whose log probabilities are
            returned together with that of the chosen token. None returns neither.
        prompt_logprobs
            One of the options. If True, first yield the tokens of the prompt, except the first, with their
            log probabilities and, unless `echo` is set, without text. They do not count towards `max_tokens`,
            which may be 0. The whole prompt is computed, regardless of the cache.

        Yields
        ------
        Piece
            One for each token; the last one has a `finish_reason`.
        """
        text = self._continuation(prompt, max_tokens, options)
        return self._pieces(text, progress) if text.wanted else iter(())

    def _continuation(self, prompt: str | TokenIds, max_tokens: int, options: TextOptions) -> Continuation:
        engine = self._engine
        engine.check_generates()
        return Continuation(
            engine,
            self._checked(engine.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt),
            integer("max_tokens", max_tokens, 0),
            self.max_context,
            options,
            prompt=prompt if isinstance(prompt, str) else None,
            prefix_namespace=self._prefix_namespace,
        )

    def _pieces(self, text: Continuation, progress: Progress | None) -> Iterator[Piece]:
        claim = next(_claims)  # ends when another call changes the session

        core, ahead = self.native, RunAhead(self._engine)
        continues = ahead.begin(text.can_run_ahead)
        prompt = NextTokens(text.ids, 0, 0.0)
        request = text.request(core, prompt, continues=continues, claim=claim, reuse=True)
        chosen = request.run(progress, "generate")
        ahead.end(0, core)
        computed = len(text.ids)  # position of the session
        position = computed - 1  # of the last piece
        for piece in text.take(chosen):
            position += 1
            yield piece
        while text.writer.ended is None:
            following = text.next_tokens(self._engine.exact_rows, sent=ahead.sent)
            core, continues = self.native, ahead.begin(text.can_run_ahead)
            chosen = text.request(core, following, continues=continues, claim=claim).run(None, "generate")
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
        """Free the cache. Calls in flight finish; later ones raise :class:`ClosedError`."""
        self._core = None

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()

    def __repr__(self) -> str:
        core = self._core  # another thread may close the session now
        if core is None:
            return "<metal_prefill.Session closed>"
        return f"<metal_prefill.Session position={core.position} of {core.max_context}>"
