"""Requests of native sessions."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from metal_prefill import _core
from metal_prefill.generation._text_generation import Continuation, NextTokens


def choose(
    core: _core.Session,
    ids: Sequence[int] | npt.NDArray[np.int32],
    drafts: int = 0,
    sampler: _core.Sampler | None = None,
) -> list[int]:
    """Append tokens, the last of which are drafts; return the chosen tokens, greedy without a sampler."""
    tokens = np.asarray(ids, np.int32)
    if sampler is None:
        request = _core.Request.greedy(core, tokens, drafts + 1, drafts=True)
    else:
        request = _core.Request.sampled(core, tokens, sampler, drafts + 1)
    return request.run()


def passes_of_texts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return a list to which each request for a text after its prompt appends its rows and drafts."""
    passes: list[tuple[int, int]] = []
    request = Continuation.request

    def noting(text: Continuation, session: _core.Session, tokens: NextTokens, **options: Any) -> Any:
        if not options.get("reuse"):
            passes.append((len(tokens.ids), tokens.drafts))
        return request(text, session, tokens, **options)

    monkeypatch.setattr(Continuation, "request", noting)
    return passes
