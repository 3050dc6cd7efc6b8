"""The environment of commands."""

import pytest


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run commands as without variables of the package, which may be set for a whole test run."""
    monkeypatch.delenv("METAL_PREFILL_TRACEBACK", raising=False)
    monkeypatch.delenv("METAL_PREFILL_DEVICE", raising=False)
