"""Counts the tokens that batches compute."""

from collections.abc import Sequence
from typing import Any

import pytest

from metal_prefill import _core


class ComputedTokens:
    """Records the rows of each request of all later batches, of all models."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts: list[int] = []  # rows of each request
        forward_batch = _core.Engine.forward_batch

        def counting(engine: _core.Engine, requests: Sequence[_core.Computation], *arguments: Any) -> Any:
            try:
                return forward_batch(engine, requests, *arguments)
            finally:
                self.counts += [request.computed for request in requests]

        monkeypatch.setattr(_core.Engine, "forward_batch", counting)

    @property
    def count(self) -> int:
        return sum(self.counts)
