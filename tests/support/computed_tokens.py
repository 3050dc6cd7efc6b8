"""How many tokens go through a model."""

from __future__ import annotations

from typing import Any

import pytest

from metal_prefill import Model


class ComputedTokens:
    """Counts the tokens that all models are given in batches from now on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        forward = Model.forward_batch

        def counting(model: Model, sessions: Any, tokens: Any, **options: Any) -> list[Any]:
            self.count += sum(map(len, tokens))
            return forward(model, sessions, tokens, **options)

        monkeypatch.setattr(Model, "forward_batch", counting)
