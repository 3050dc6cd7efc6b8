"""A batch of whole texts, each of which is computed from an empty context and then forgotten."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from metal_prefill import _core
from metal_prefill.files._task_config import Pooling


class TextCall:
    """Texts of one pass, whose requests and sessions are made by the native engine.

    Attributes
    ----------
    count : int
        Number of results of the native engine: one for all texts.
    rows : int
        Number of tokens.

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
        self.count, self.rows = 1, len(self._tokens)

    def requests(self) -> list[_core.Computation]:
        """Return the request of all texts."""
        return [
            _core.Texts(self._core, self._tokens, self._lengths, self._pooling, self._expansions, self._seen)
        ]

    def take_requests(self) -> list[_core.Computation]:
        """Return the request."""
        return self.requests()

    def results(self, computed: list[Any]) -> Any:
        """Return the vectors of the texts, float32 ``[texts, dim]``, or what they are made of.

        With pooling ``"none"``, that is a list with float32 ``[n, dim]`` for each text. If a text failed, it
        is a list with an exception in its place.
        """
        ((values, errors),) = computed
        if self._pooling != "none":
            vectors = values.reshape(len(self._lengths), -1)
            return [errors.get(i, vector) for i, vector in enumerate(vectors)] if errors else vectors
        states = values.reshape(self.rows, -1)
        ends = np.cumsum(self._lengths).tolist()
        return [
            errors.get(i, states[end - n : end])
            for i, (end, n) in enumerate(zip(ends, self._lengths.tolist(), strict=True))
        ]
