"""Checked arguments of a batch: tokens of several sessions that go through the model together."""

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from metal_prefill import _core
from metal_prefill._support.arguments import TokenIds, integer, one_of, token_array
from metal_prefill.files._model_config import ModelConfig

BatchOutput: TypeAlias = Literal["none", "greedy", "logits", "log_probs", "hidden", "residual"]
OutputRows: TypeAlias = int | Literal["all"] | None

_OUTPUTS: dict[str, BatchOutput] = {name: name for name in get_args(BatchOutput)}


class BatchCall:
    """Checked arguments of :meth:`metal_prefill.Model.forward_batch`, where they are documented.

    Attributes
    ----------
    count, rows : int
        Number of sessions, and of tokens of all of them.
    """

    def __init__(
        self,
        config: ModelConfig,
        sessions: Sequence[_core.Session],
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
        self.tokens = []  # token ids of each session, int32 ``[n]``
        for i, (session, ids) in enumerate(zip(sessions, tokens, strict=True)):
            try:
                self.tokens.append(
                    token_array(
                        ids,
                        config.vocab_size,
                        context=session.max_context,
                        position=session.position,
                        unread=int(outputs[i] == "log_probs"),
                    )
                )
            except (TypeError, ValueError) as error:
                raise type(error)(f"session {i}: {error}") from None
        self._outputs = [one_of("output", name, _OUTPUTS) for name in outputs]
        self._rows = [
            _row_count(i, *item)
            for i, item in enumerate(zip(outputs, map(len, self.tokens), wanted, strict=True))
        ]
        self.sessions = list(sessions)  # the native sessions
        self.count, self.rows = len(self.sessions), sum(map(len, self.tokens))
        self._wanted = wanted

    def requests(self, *, reuse: bool = False) -> list[_core.Request]:
        """Return a request for each session; the native engine computes each request once."""
        return [
            _request(output, session, ids, rows, reuse)
            for output, session, ids, rows in zip(
                self._outputs, self.sessions, self.tokens, self._rows, strict=True
            )
        ]

    def take_requests(self, *, reuse: bool = False) -> list[_core.Request]:
        """Return the requests and forget the sessions.

        The traceback of an exception may hold this object, which must not keep the pages of the sessions.
        """
        requests, self.sessions = self.requests(reuse=reuse), []
        return requests

    def results(self, computed: list[Any], *, return_errors: bool) -> list[Any]:
        """Return the results of the engine in the requested form."""
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


def _request(
    output: BatchOutput, session: _core.Session, ids: npt.NDArray[np.int32], rows: int, reuse: bool
) -> _core.Request:
    match output:
        case "none":
            return _core.Request.none(session, ids, reuse=reuse)
        case "greedy":
            return _core.Request.greedy(session, ids, rows, reuse=reuse)
        case "logits":
            return _core.Request.logits(session, ids, reuse=reuse)
        case "log_probs":
            return _core.Request.log_probs(session, ids, rows, reuse=reuse)
        case "hidden" | "residual":
            return _core.Request.hidden(session, ids, rows, normed=output == "hidden", reuse=reuse)


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
