"""Conversion of model folders of the Hugging Face Hub to GGUF files.

Functions raise `GGUFError` if a folder is damaged or lacks something, and `UnsupportedModelError` if it
describes a model that GGUF or the engines cannot express.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from metal_prefill._support.lazy import lazy_names

if TYPE_CHECKING:
    from metal_prefill.conversion._writing import TENSOR_TYPES, convert

__all__ = ["TENSOR_TYPES", "convert"]

__getattr__ = lazy_names(__name__, _writing="TENSOR_TYPES convert")
