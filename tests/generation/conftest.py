"""The bundled model, for tests of constraints, and texts with many drafts."""

import pytest

from metal_prefill import Model
from metal_prefill.engine import RowCost
from metal_prefill.generation import _constraint


@pytest.fixture
def model(bundled: Model) -> Model:
    """Return the bundled model, whose vocabulary has 1,024 tokens, without constraints.

    Tests share it because each model with constraints starts a fork server.
    """
    _constraint._vocabulary(bundled.tokenizer)._known.clear()
    return bundled


@pytest.fixture
def most_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make as many drafts as allowed, whether they pay or not."""
    monkeypatch.setattr(RowCost, "seconds", lambda self, rows: 1.0)
