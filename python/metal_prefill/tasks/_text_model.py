"""The part of a model that embedding, reranking and classification need."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from metal_prefill import _core
from metal_prefill.files._architecture import ModelConfig
from metal_prefill.files._gguf_file import GGUFFile
from metal_prefill.files._pooled_head import PooledHead
from metal_prefill.session import Session

if TYPE_CHECKING:
    from metal_prefill.text._tokenizer import Tokenizer


class TextModel(Protocol):
    """A model that texts go through, each on its own."""

    @property
    def config(self) -> ModelConfig:
        """Hyperparameters."""

    @property
    def path(self) -> Path:
        """The file."""

    @property
    def gguf(self) -> GGUFFile:
        """The opened file."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the file."""

    @property
    def max_context(self) -> int:
        """Most tokens of a text."""

    @property
    def _head(self) -> PooledHead:
        """Pooling and heads of the file."""

    def _core_engine(self) -> _core.Engine:
        """Return the native engine; raises ClosedError."""

    def session(self) -> Session:
        """Make a session."""

    def forward_batch(
        self,
        sessions: Sequence[Session],
        tokens: Sequence[Any],
        *,
        output: Any = "greedy",
        rows: Any = None,
        return_errors: bool = False,
    ) -> list[Any]:
        """Append tokens to several sessions, going through the model together."""
