"""The engine handle: what a model shares with its sessions, schedulers, tasks and servers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from metal_prefill import _core
from metal_prefill._support.arguments import integer
from metal_prefill._support.cached_property import cached_property
from metal_prefill._support.row_cost import RowCost
from metal_prefill.errors import ClosedError
from metal_prefill.files import _session_file
from metal_prefill.files._compute_mode import ComputeMode
from metal_prefill.files._gguf_file import GGUFFile
from metal_prefill.files._model_config import ModelConfig
from metal_prefill.files._pooled_head import PooledHead
from metal_prefill.files._text_lengths import TextLengths

if TYPE_CHECKING:
    from metal_prefill.text._tokenizer import Tokenizer


class Engine:
    """A native engine with its file, configuration, tokenizer, limits and measured times.

    Safe to use from several threads.

    Parameters
    ----------
    core
        The native engine.
    gguf, config, head
        The file and what was read from it.
    max_context
        Maximum position of sessions that set none.
    compute
        Compute mode; None on a GPU.
    kv_dtype
        ``f16``, ``f32`` or ``q8_0``.
    lengths
        Maximum number of tokens of each kind of text.

    Attributes
    ----------
    gguf : GGUFFile
    config : ModelConfig
    head : PooledHead
    max_context : int
    compute : str or None
    kv_dtype : str
    lengths : TextLengths
    row_cost : RowCost
        Measured times of passes, for all texts.
    exact_rows : int
        Maximum number of tokens of a sequence in a pass whose results are bit-identical to those of single
        tokens.
    runs_ahead : bool
        Whether the engine submits the pass of the next token before the host has seen the last one.
    """

    def __init__(
        self,
        core: _core.Engine,
        gguf: GGUFFile,
        config: ModelConfig,
        head: PooledHead,
        max_context: int,
        compute: ComputeMode | None,
        kv_dtype: str,
        lengths: TextLengths,
    ) -> None:
        self._core: _core.Engine | None = core
        self.gguf = gguf
        self.config = config
        self.head = head
        self.max_context = max_context
        self.compute = compute
        self.kv_dtype = kv_dtype
        self.lengths = lengths
        self.row_cost = RowCost()
        self.exact_rows = core.exact_rows
        self.runs_ahead = core.runs_ahead

    @property
    def core(self) -> _core.Engine:
        """The native engine.

        Raises
        ------
        ClosedError
            The model is closed.
        """
        core = self._core  # another thread may close the model now
        if core is None:
            raise ClosedError("the model is closed")
        return core

    @property
    def path(self) -> Path:
        """The GGUF file."""
        return self.gguf.path

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the file, built on first use."""
        from metal_prefill.text._tokenizer import Tokenizer

        return Tokenizer.from_gguf(self.gguf)

    @cached_property
    def state_owner(self) -> _session_file.Owner:
        """Identity of the model in saved sessions."""
        variant = "long contexts" if self.config.rope_long else ""
        return _session_file.Owner(
            self.config,
            self.kv_dtype,
            _session_file.fingerprint(self.gguf, variant),
            f"{self.path.name} for {variant}" if variant else self.path.name,
        )

    def session(self, max_context: int | None = None, prefix_namespace: str = "") -> _core.Session:
        """Make a native session; see :meth:`metal_prefill.Model.session`."""
        core, limit = self.core, self.config.context_length
        context = integer("max_context", self.max_context if max_context is None else max_context, 1)
        if context > limit:
            raise ValueError(f"max_context {context} is outside 1 to {limit}, the model's context length")
        if not isinstance(prefix_namespace, str):
            raise TypeError(f"prefix_namespace must be a str, got {type(prefix_namespace).__name__}")
        return core.session(context, prefix_namespace)

    def check_generates(self) -> None:
        """Raise ValueError if the model does not predict text, as encoders do not."""
        if self.config.generates:
            return
        if not self.head.labels:
            methods = "embed, or rerank" if self.head.per_token else "embed"
        elif self.head.pooling == "none":
            methods = "label_tokens"
        else:
            methods = "rerank or classify"
        raise ValueError(
            f"{self.path.name} is an encoder, which does not generate or score text: use {methods}"
        )

    def close(self) -> None:
        """Free weights and pools once calls in flight have finished."""
        core, self._core = self._core, None
        if core is not None:
            # So does the destructor, which in free-threaded Python runs in the thread that made `core`.
            core.finish()


@runtime_checkable
class EngineOwner(Protocol):
    """An object with an engine, such as a :class:`metal_prefill.Model`."""

    @property
    def engine(self) -> Engine:
        """The engine handle."""
