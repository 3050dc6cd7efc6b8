"""Numbers of tokens that go through a model in batches."""

from __future__ import annotations

from typing import Any

import pytest

from metal_prefill.generation._batch_call import BatchCall


class ComputedTokens:
    """Counts the tokens that batches of all models append to sessions from now on.

    Attributes
    ----------
    counts : list of int
        Appended tokens, by batch and session.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts: list[int] = []
        take_requests, results = BatchCall.take_requests, BatchCall.results
        before: dict[int, list[tuple[Any, int]]] = {}

        def noting(call: BatchCall, *, reuse: bool = False) -> Any:
            before[id(call)] = [(session, session.position) for session in call.sessions]
            return take_requests(call, reuse=reuse)

        def counting(call: BatchCall, *arguments: Any, **named: Any) -> Any:
            self.counts += [session.position - n for session, n in before.pop(id(call))]
            return results(call, *arguments, **named)

        monkeypatch.setattr(BatchCall, "take_requests", noting)
        monkeypatch.setattr(BatchCall, "results", counting)

    @property
    def count(self) -> int:
        """Appended tokens in all."""
        return sum(self.counts)
