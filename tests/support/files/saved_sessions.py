"""The saved prompt of the tests, and changes of its file."""

from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from metal_prefill.storage import _session_file

PROMPT = [int(t) for t in np.random.default_rng(7).integers(1, 500, 70)]


def rewrite(
    path: Path, *, arrays: dict[str, Any] | None = None, metadata: dict[str, str] | None = None
) -> None:
    """Change a state and update its checksum, as its author could."""
    with safe_open(path, framework="numpy") as file:
        stated = {**file.metadata(), **(metadata or {})}
    contents = {**load_file(path), **(arrays or {})}
    kept = {name: np.ascontiguousarray(a) for name, a in contents.items() if a is not None}
    stated["checksum"] = _session_file._checksum(
        {n: a.reshape(-1).view(np.uint8) for n, a in kept.items()}, stated
    )
    save_file(kept, path, stated)
