"""Files of the model that a user names: bundled models, the Hugging Face Hub, and converted folders."""

from __future__ import annotations

from typing import TYPE_CHECKING

from metal_prefill._support.lazy import lazy_names

if TYPE_CHECKING:
    from metal_prefill.hub._download import fetch, fetch_folder
    from metal_prefill.hub._local_file import default_model_path, resolve_model

__all__ = ["default_model_path", "fetch", "fetch_folder", "resolve_model"]

__getattr__ = lazy_names(
    __name__, _download="fetch fetch_folder", _local_file="default_model_path resolve_model"
)
