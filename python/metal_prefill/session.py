"""Sessions: a KV cache and a position over shared weights."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from metal_prefill import _state, sampling
from metal_prefill._arguments import Logits, Progress, TokenIds, integer, token_array, token_id
from metal_prefill._continuation import Continuation, stop_strings
from metal_prefill._dispatches import Dispatch, from_core
from metal_prefill.architecture import ModelConfig
from metal_prefill.errors import ClosedError, ContextOverflowError, DeviceError

if TYPE_CHECKING:
    from metal_prefill import _core
    from metal_prefill.tokenizer import Tokenizer

__all__ = ["Logits", "Progress", "Session", "TokenIds", "token_array", "token_id"]


class _SharedModel(Protocol):
    """The part of a model that its sessions need."""

    @property
    def config(self) -> ModelConfig:
        """Hyperparameters."""

    @property
    def backend(self) -> str:
        """``cpu`` or ``metal``."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the file."""

    @property
    def _state_owner(self) -> _state.Owner:
        """Identity that saved sessions of the model carry."""


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

    def __init__(self, model: _SharedModel, core: _core.Session) -> None:
        self._model = model
        self._core: _core.Session | None = core
        self.notes = ""

    def _open(self) -> _core.Session:
        core = self._core
        if core is None:
            raise ClosedError("the session is closed")
        return core

    def _checked(self, tokens: TokenIds, unread: int = 0) -> npt.NDArray[np.int32]:
        """Convert token ids, of which the last `unread` need no room in the cache."""
        core = self._open()
        return token_array(
            tokens,
            self._model.config.vocab_size,
            context=core.max_context,
            position=core.position,
            unread=unread,
        )

    @property
    def position(self) -> int:
        """Number of tokens in the cache; the next token stands at this position."""
        return self._open().position

    @property
    def max_context(self) -> int:
        """Largest position this session may reach."""
        return self._open().max_context

    @property
    def tokens(self) -> list[int]:
        """Ids of the tokens in the cache, oldest first."""
        return self._open().tokens()

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
        ids = self._checked(tokens)
        return self._open().forward_prompt(ids, reuse, progress)

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
        ids = self._checked(tokens)
        return self._open().forward_prompt_logits(ids, reuse, progress)

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
        return self._open().score(self._checked(tokens, unread=1), progress)

    def forward_token(self, token: int) -> Logits:
        """Append one token and return the logits after it, float32 ``[vocab_size]``."""
        return self._open().forward_token(token_id(token, self._model.config.vocab_size))

    def forward_token_greedy(self, token: int) -> int:
        """Append one token and return the greedy next one."""
        return self._open().forward_token_greedy(token_id(token, self._model.config.vocab_size))

    def reset(self) -> None:
        """Forget all tokens: the position becomes 0."""
        self.rewind(0)

    def rewind(self, position: int) -> None:
        """Forget the tokens from `position` on.

        Raises
        ------
        ValueError
            If `position` is negative or beyond the current one.
        SessionBusyError
            Called from the progress callback of another call on this session.
        """
        core, target = self._open(), integer("position", position)
        if not 0 <= target <= core.max_context:
            raise ValueError(
                f"cannot rewind to position {target}: the position of the session is {core.position}"
            )
        core.rewind(target)

    def fork(self) -> Session:
        """Return a new session with a copy of this one's cache and position."""
        return Session(self._model, self._open().fork())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the cache and its tokens to a file, which :meth:`metal_prefill.Model.load_session` continues.

        An existing file is replaced in one step: whatever happens, `path` holds the old state or the new one.

        Raises
        ------
        OutputError
            A device, a FIFO or a socket is there.
        OSError
            The file cannot be written.
        """
        tokens, rows = self._open().export_state()
        _state.write(path, self._model._state_owner, _state.State(tokens, rows, self.notes))

    def _inspector(self) -> _core.SessionInspector:
        inspector = self._open().inspector()
        if inspector is None:
            raise DeviceError(
                f"the engine '{self._model.backend}' makes no dispatches to list or to time; "
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

        ``position``, ``kv_cache_bytes``, ``tokens_reused`` (of the last prompt with ``reuse=True``) and what
        the engine adds, such as ``dispatches``, ``command_buffers`` and ``allocations`` on Metal.
        """
        return self._open().stats()

    def generate(
        self,
        prompt: str | TokenIds,
        max_tokens: int = 128,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repeat_penalty: float = 1.0,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        progress: Progress | None = None,
    ) -> Iterator[str]:
        """Continue a prompt and yield text as it is made.

        The prompt is the whole context: what the cache already holds of it is reused.

        Parameters
        ----------
        prompt
            Text, encoded with the model's tokenizer, or token ids.
        max_tokens
            Upper bound on the number of tokens made.
        temperature, top_k, top_p, min_p, repeat_penalty
            See :func:`metal_prefill.sampling.sample`; temperature 0 is greedy.
        seed
            Of the random numbers; None draws a fresh one.
        stop
            Strings that end the text; they are not part of it.
        progress
            As in :meth:`forward_prompt`, for the prompt.

        Yields
        ------
        str
            Pieces of text, never an incomplete character. They end at an end-of-text token, at a stop
            string, after `max_tokens`, or where the context is full.

        Raises
        ------
        SessionBusyError
            Another call changed the session since the last piece, such as a second generator: each needs a
            session of its own while it lasts. The session stays as the other call left it.
        """
        stops = stop_strings(stop)
        max_tokens = integer("max_tokens", max_tokens, 0)
        options = sampling.Options(
            temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repeat_penalty=repeat_penalty
        )
        tokenizer = self._model.tokenizer
        ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        array = self._checked(ids)
        if max_tokens == 0:
            return iter(())
        text = Continuation(tokenizer, array.tolist(), max_tokens, options, seed, stops)
        return self._pieces(array, text, progress)

    def _pieces(
        self, ids: npt.NDArray[np.int32], text: Continuation, progress: Progress | None
    ) -> Iterator[str]:
        claim = next(_claims)  # ends when another call changes the session

        def following(tokens: npt.NDArray[np.int32], reuse: bool, progress: Progress | None) -> Any:
            core = self._open()
            compute = core.forward_prompt if text.greedy else core.forward_prompt_logits
            return compute(tokens, reuse, progress, claim)

        piece = text.take(following(ids, True, progress))
        while text.ended is None:
            if piece:
                yield piece
            if self.position >= self.max_context:
                piece = text.end("context")
                break
            piece = text.take(following(np.array([text.token], np.int32), False, None))
        if piece:
            yield piece

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
        if self._core is None:
            return "<metal_prefill.Session closed>"
        return f"<metal_prefill.Session position={self.position} of {self.max_context}>"
