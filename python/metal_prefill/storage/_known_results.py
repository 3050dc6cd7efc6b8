"""Results that are stored by key in a JSON file of the cache folder."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from metal_prefill._support.atomic_write import replacing

Known = dict[str, list[str]]


def read_known(path: Path) -> Known:
    """Return the stored results; none if the file is missing or damaged."""
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def write_known(path: Path, known: Known) -> None:
    """Replace the stored results. Without a cache folder nothing happens, and they are found again."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as part:
            part.write_text(json.dumps(known), encoding="utf-8")
