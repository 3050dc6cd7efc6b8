"""Where files lie that can be made again, what they depend on, and which of them go."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

PIPELINE_LIMIT = 256 << 20  # bytes of all compiled pipelines; those of a model are some megabytes


def cache_folder() -> Path:
    """Return ``METAL_PREFILL_CACHE``, or the platform's folder of caches for this user."""
    chosen = os.environ.get("METAL_PREFILL_CACHE")
    if chosen:
        return Path(chosen)
    if platform.system() == "Darwin":
        return Path.home() / "Library" / "Caches" / "metal_prefill"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "metal_prefill"


def version() -> str:
    """Return the version of the package."""
    from importlib import metadata  # imports much that a model has no use for

    return metadata.version("metal_prefill")


def cache_key(parts: Iterable[object] = ()) -> str:
    """Return a key for the build of the OS, the version of the package, and `parts`, which JSON can hold."""
    system = f"{platform.system()} {platform.release()} {os.uname().version} {platform.mac_ver()[0]}"
    text = json.dumps([system, version(), *parts])
    return hashlib.sha256(text.encode()).hexdigest()


def pipeline_folder(emulated: bool) -> str:
    """Return where compiled pipelines of GPUs are kept.

    Those of the emulator cost nothing to make: they are kept only where ``METAL_PREFILL_CACHE`` names a
    folder. Empty: nowhere.
    """
    if emulated and not os.environ.get("METAL_PREFILL_CACHE"):
        return ""
    return str(cache_folder() / "pipelines" / cache_key()[:16])


def remove_old_pipelines(folder: str) -> None:
    """Keep compiled pipelines within `PIPELINE_LIMIT`.

    Files of other builds of the OS and versions of the package count, and those of other devices; the ones
    that were not used for longest are deleted. A process that has one open keeps it.

    Parameters
    ----------
    folder
        What `pipeline_folder` gave; nothing is deleted where it is empty.
    """
    if not folder:
        return
    files = []
    with suppress(OSError):
        for path in Path(folder).parent.glob("*/*.pipelines"):
            with suppress(OSError):
                status = path.stat()
                files.append((status.st_mtime, status.st_size, path))
    for path in beyond_limit(files, PIPELINE_LIMIT):
        with suppress(OSError):
            path.unlink()
            path.parent.rmdir()  # unless others are in it


def beyond_limit(files: Iterable[tuple[float, int, Path]], limit: int) -> Iterator[Path]:
    """Yield the files to delete so that the others have at most `limit` bytes, those used longest ago first.

    Parameters
    ----------
    files
        When each was used last, in any unit; its bytes; its path.
    """
    listed = sorted(files)
    total = sum(size for _, size, _ in listed)
    for _, size, path in listed:
        if total <= limit:
            return
        yield path
        total -= size
