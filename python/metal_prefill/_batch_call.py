"""Tokens for several sessions that go through the model together, checked, and what comes of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from metal_prefill import _core
from metal_prefill._arguments import TokenIds, integer, one_of
from metal_prefill.architecture import ModelConfig

if TYPE_CHECKING:
    from metal_prefill.session import Session

BatchOutput: TypeAlias = Literal["none", "greedy", "logits", "log_probs", "hidden", "residual"]
OutputRows: TypeAlias = int | Literal["all"] | None

_KINDS = {
    "none": _core.Output.NONE,
    "greedy": _core.Output.GREEDY,
    "logits": _core.Output.LOGITS,
    "log_probs": _core.Output.LOG_PROBS,
    "hidden": _core.Output.HIDDEN,
    "residual": _core.Output.RESIDUAL,
}


class BatchCall:
    """Arguments of :meth:`metal_prefill.Model.forward_batch`, which says what they are.

    Attributes
    ----------
    sessions, tokens, kinds, rows
        For each session itself, its ids, its output, and the number of rows with one, as the native engine
        takes them.

    Raises
    ------
    ValueError, TypeError
        Wrong arguments; the message names the session.
    """

    def __init__(
        self,
        config: ModelConfig,
        sessions: Sequence[Session],
        tokens: Sequence[TokenIds],
        output: BatchOutput | Sequence[BatchOutput],
        rows: OutputRows | Sequence[OutputRows],
    ) -> None:
        self._dim = config.dim
        outputs = [output] * len(sessions) if isinstance(output, str) else list(output)
        wanted = [rows] * len(sessions) if isinstance(rows, (str, int, np.integer, type(None))) else [*rows]
        if not len(sessions) == len(tokens) == len(outputs):
            raise ValueError(
                f"a batch needs tokens and an output for each session; got {len(sessions)} sessions, "
                f"{len(tokens)} lists of tokens and {len(outputs)} outputs"
            )
        if len(wanted) != len(sessions):
            raise ValueError(f"rows must be one word, or {len(sessions)}; got {len(wanted)}")
        self.tokens = []
        for i, (session, ids) in enumerate(zip(sessions, tokens, strict=True)):
            try:
                self.tokens.append(session._checked(ids, unread=int(outputs[i] == "log_probs")))
            except (TypeError, ValueError) as error:
                raise type(error)(f"session {i}: {error}") from None
        self.kinds = [one_of("output", name, _KINDS) for name in outputs]
        self.rows = [
            _row_count(i, *item)
            for i, item in enumerate(zip(outputs, map(len, self.tokens), wanted, strict=True))
        ]
        self.sessions = [session._open() for session in sessions]
        self._outputs, self._wanted = outputs, wanted

    def take_sessions(self) -> list[_core.Session]:
        """Return the sessions, once: an exception that somebody keeps must not hold their pages."""
        sessions, self.sessions = self.sessions, []
        return sessions

    def results(self, computed: list[Any], *, return_errors: bool) -> list[Any]:
        """Return what the engine computed, in the form that was asked for."""
        results = list(computed)
        for i, result in enumerate(results):
            if isinstance(result, list):
                results[i] = result[-1] if self._wanted[i] is None else np.array(result, np.int32)
            if (
                isinstance(result, np.ndarray)
                and self._outputs[i] in ("hidden", "residual")
                and self._wanted[i]
            ):
                results[i] = result.reshape(-1, self._dim)
        if not return_errors:
            for i, result in enumerate(results):
                if isinstance(result, Exception):
                    raise type(result)(f"session {i}: {result}") from result
        return results


def _row_count(session: int, output: str, tokens: int, rows: object) -> int:
    """Check of how many of the last tokens of a session the output is wanted."""
    most = tokens - 1 if output == "log_probs" else 1 if output in ("logits", "none") else tokens
    if rows is None:
        return most if output == "log_probs" else 1
    if rows == "all" and (most > 1 or tokens == 1):
        return most
    if isinstance(rows, str):
        raise ValueError(f"session {session}: rows {rows!r} of output {output!r} is not known")
    return integer(f"session {session}: rows of output {output!r}", rows, 1, most)
