"""Model files: GGUF, architectures, hyperparameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from metal_prefill._core import ModelConfig
from metal_prefill._support.lazy import lazy_names

if TYPE_CHECKING:
    from metal_prefill.files._gguf_file import GGUFFile, TensorInfo

__all__ = ["GGUFFile", "ModelConfig", "TensorInfo"]

__getattr__ = lazy_names(__name__, _gguf_file="GGUFFile TensorInfo")
