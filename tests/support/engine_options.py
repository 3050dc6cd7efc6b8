"""Options of engines without an argument of a model."""

from typing import Any

import pytest

from metal_prefill import _core


def set_engine_options(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
    """Set options of engines created later; those of Metal begin with ``metal_``."""

    class Changed(_core.EngineOptions):
        def __init__(self) -> None:
            super().__init__()
            for name, value in settings.items():
                of_metal = name.startswith("metal_")
                setattr(self.metal if of_metal else self, name.removeprefix("metal_"), value)

    monkeypatch.setattr(_core, "EngineOptions", Changed)
