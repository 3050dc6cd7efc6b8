"""Models that a peer reads in its own format: converted from a GGUF file once, and cached."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from metal_prefill.bench._errors import BenchError
from metal_prefill.storage._cache_folder import cache_folder

_SHOWN_LINES = 3  # of what a failed conversion printed


def folder_of(peer: str, version: str, path: Path) -> Path:
    """Return the folder of the conversion of a file, which exists after this call."""
    stat = path.stat()
    identity = f"{path.resolve()}:{stat.st_size}:{stat.st_mtime_ns}:{version}"
    folder = cache_folder() / f"{peer.lower()}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def convert_once(peer: str, path: Path, folder: Path, result: Path, arguments: Sequence[str]) -> None:
    """Run Python with these arguments, unless that wrote `result` into `folder` before.

    The conversion runs in its own process, so that its memory does not count as the engine's.

    Raises
    ------
    BenchError
        The conversion failed.
    """
    done = folder / "complete"
    if done.exists():
        return
    run = subprocess.run(
        [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if run.returncode != 0 or not result.exists():
        lines = run.stdout.strip().splitlines()[-_SHOWN_LINES:] or ["no message"]
        raise BenchError(f"{path} cannot be converted for {peer}: {' / '.join(lines)}")
    done.touch()
