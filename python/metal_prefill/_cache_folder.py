"""Where files lie that can be made again."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def cache_folder() -> Path:
    """Return ``METAL_PREFILL_CACHE``, or the platform's folder of caches for this user."""
    chosen = os.environ.get("METAL_PREFILL_CACHE")
    if chosen:
        return Path(chosen)
    if platform.system() == "Darwin":
        return Path.home() / "Library" / "Caches" / "metal_prefill"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "metal_prefill"
