"""Cache folder: location, keys and eviction of files that can be regenerated, and stored results."""

import hashlib
import json
import os
import platform
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from metal_prefill._support.atomic_write import replacing

PIPELINES = "pipelines/*/*.pipelines"  # for all devices, OS builds and package versions
PIPELINE_LIMIT = 256 << 20  # bytes of all compiled pipelines; a model needs a few megabytes


def cache_folder() -> Path:
    """Return ``METAL_PREFILL_CACHE``, or the platform's cache folder for this user."""
    chosen = os.environ.get("METAL_PREFILL_CACHE")
    if chosen:
        return Path(chosen)
    if platform.system() == "Darwin":
        return Path.home() / "Library" / "Caches" / "metal_prefill"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "metal_prefill"


def version() -> str:
    from importlib import metadata  # slow to import, and not needed to run a model

    return metadata.version("metal_prefill")


def sample_starts(nbytes: int, count: int, size: int) -> list[int]:
    """Return the starts of at most `count` samples of `size` bytes, from the first byte to the last."""
    last = max(nbytes - size, 0)
    return sorted({last * i // (count - 1) for i in range(count)})


def cache_key(parts: Iterable[object] = ()) -> str:
    """Return a key for the OS build, the package version and `parts`, which are JSON values."""
    system = f"{platform.system()} {platform.release()} {os.uname().version} {platform.mac_ver()[0]}"
    text = json.dumps([system, version(), *parts])
    return hashlib.sha256(text.encode()).hexdigest()


def pipeline_folder(emulated: bool) -> str:
    """Return the folder for compiled GPU pipelines, or an empty string if they are not stored.

    Pipelines of the emulator are cheap to build and are stored only if ``METAL_PREFILL_CACHE`` is set.
    """
    if emulated and not os.environ.get("METAL_PREFILL_CACHE"):
        return ""
    return str(cache_folder() / "pipelines" / cache_key()[:16])


class StoredFile(NamedTuple):
    """A file in the cache folder; later uses sort after earlier ones."""

    used: float  # time at which it was last written or opened, in seconds since 1970
    size: int  # bytes
    path: Path


def stored_files(pattern: str) -> list[StoredFile]:
    """Return the files in the cache folder that match a pattern, most recently used first."""
    found = []
    for path in cache_folder().glob(pattern):
        with suppress(OSError):
            status = path.stat()
            found.append(StoredFile(max(status.st_atime, status.st_mtime), status.st_size, path))
    return sorted(found, reverse=True)


def remove_oldest(pattern: str, limit: int, keep: Path | None = None) -> None:
    """Delete the least recently used files until all except `keep` have at most `limit` bytes.

    A process that has a deleted file open can continue to use it.
    """
    for path in beyond_limit([file for file in stored_files(pattern) if file.path != keep], limit):
        with suppress(OSError):
            path.unlink()
            path.parent.rmdir()  # fails if the folder contains other files


def beyond_limit(files: Iterable[tuple[float, int, Path]], limit: int) -> Iterator[Path]:
    """Yield the least recently used files to delete so that the rest have at most `limit` bytes."""
    listed = sorted(files)
    total = sum(size for _, size, _ in listed)
    for _, size, path in listed:
        if total <= limit:
            return
        yield path
        total -= size


Known = dict[str, list[str]]


def read_known(path: Path) -> Known:
    """Return the stored results; none if the file is missing or damaged."""
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def write_known(path: Path, known: Known) -> None:
    """Replace the stored results. Without a cache folder, the next process computes them again."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as part:
            part.write_text(json.dumps(known), encoding="utf-8")
