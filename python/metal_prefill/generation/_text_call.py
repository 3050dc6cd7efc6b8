"""A batch of whole texts, each of which is computed from an empty context and then forgotten."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from metal_prefill import _core
from metal_prefill.files._pooled_head import Pooling


class TextCall:
    """Texts of one pass, whose requests and sessions are made by the native engine.

    Attributes
    ----------
    count, rows : int
        Number of texts, and of their tokens.

    Parameters
    ----------
    core
        The native engine.
    texts
        Token ids of each text, int32 ``[n]``, at least one.
    pooling
        Result of a text: one vector of its hidden states, or with ``"none"`` all of them.
    expansions
        Number of last tokens of each text that expand a query; empty if no text has any.
    seen
        Whether tokens attend to those of the expansions.
    """

    def __init__(
        self,
        core: _core.Engine,
        texts: Sequence[npt.NDArray[np.int32]],
        pooling: Pooling,
        expansions: Sequence[int] = (),
        *,
        seen: bool = False,
    ) -> None:
        self._core = core
        self._pooling = pooling
        self._expansions = np.array(expansions, np.int32) if any(expansions) else None
        self._seen = seen
        self._tokens = np.concatenate(texts)
        self._lengths = np.fromiter(map(len, texts), np.int32, len(texts))
        self.count, self.rows = len(texts), len(self._tokens)

    def requests(self) -> list[_core.Request]:
        """Return a request for each text."""
        return self._core.text_requests(
            self._tokens, self._lengths, self._pooling, self._expansions, self._seen
        )

    def take_requests(self) -> list[_core.Request]:
        """Return the requests."""
        return self.requests()

    def results(self, computed: list[Any]) -> list[Any]:
        """Return float32 ``[dim]`` or ``[n, dim]`` for each text, or the exception that ended it."""
        if self._pooling != "none":
            return computed
        shapes = zip(computed, self._lengths.tolist(), strict=True)
        return [result if isinstance(result, Exception) else result.reshape(n, -1) for result, n in shapes]
