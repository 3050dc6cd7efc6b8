"""The part of a model that its schedulers need."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from metal_prefill import _core
from metal_prefill.files._architecture import ModelConfig
from metal_prefill.generation._speculation import RowCost

if TYPE_CHECKING:
    from metal_prefill.text._tokenizer import Tokenizer


class SharedEngine(Protocol):
    """A model whose engine several schedulers may use."""

    @property
    def config(self) -> ModelConfig:
        """Hyperparameters."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the file."""

    @property
    def max_context(self) -> int:
        """Largest position that a stream may reach."""

    @property
    def _row_cost(self) -> RowCost:
        """Seconds that passes of its engine take."""

    def _core_engine(self) -> _core.Engine:
        """Return the native engine; raises ClosedError."""
