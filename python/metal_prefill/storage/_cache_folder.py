"""Cache folder: location, keys and eviction of files that can be regenerated, and stored results."""

import hashlib
import json
import logging
import os
import platform
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from metal_prefill import _core
from metal_prefill._support.atomic_write import replacing

PIPELINE_LIMIT = 256 << 20  # bytes of all compiled pipelines; those of a model take a few megabytes
SLOWEST, FASTEST = 0.05, 20.0  # times float32: anything else is not a measurement of a speed

_log = logging.getLogger("metal_prefill")
_lock = threading.Lock()
_settled = False


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


def remove_old_pipelines(folder: str) -> None:
    """Delete the least recently used compiled pipelines beyond `PIPELINE_LIMIT`.

    The limit includes files for other devices, OS builds and package versions. A process that has a deleted
    file open can continue to use it. `folder` is a result of `pipeline_folder`, which may be empty.
    """
    if not folder:
        return
    for path in beyond_limit(stored_files("pipelines/*/*.pipelines"), PIPELINE_LIMIT):
        with suppress(OSError):
            path.unlink()
            path.parent.rmdir()  # fails if the folder contains other files


class StoredFile(NamedTuple):
    """A file in the cache folder; a later use makes it larger."""

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


def remove_oldest(pattern: str, limit: int, keep: Path) -> None:
    """Delete the least recently used files until all but one to keep have at most `limit` bytes."""
    for path in beyond_limit([file for file in stored_files(pattern) if file.path != keep], limit):
        path.unlink(missing_ok=True)


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
    """Replace the stored results. Without a cache folder nothing happens, and they are found again."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as part:
            part.write_text(json.dumps(known), encoding="utf-8")


def kernel_set() -> str:
    """Return the name of the kernel set that the CPU engine uses."""
    settle_pair_speed()
    return os.environ.get("METAL_PREFILL_CPU_ISA") or _core.cpu.kernel_sets()[0]


def settle_pair_speed() -> float:
    """Return the speed of products of bfloat16 pairs relative to float32, 0 without such products.

    It is stored if it was measured now: sets of kernels are chosen by it and round differently, so a process
    that measured anew on a busy machine could get other bits than the one before. This comes before
    `_core.cpu.kernel_sets` and before the engine.
    """
    global _settled
    with _lock:
        if not _settled and "avx512bf16" in _core.cpu.built_sets():
            path = cache_folder() / "processors" / hashlib.sha256(_processor().encode()).hexdigest()[:16]
            if known := _read_speed(path):
                _core.cpu.use_pair_speedup(known)
            elif (speedup := _core.cpu.pair_speedup()) > 0:
                _write_speed(path, speedup)
        _settled = True
        speed: float = _core.cpu.pair_speedup()
        return speed


def _processor() -> str:
    """Return the identity of the processor: family, model and stepping, or the type of the machine."""
    wanted = ("vendor_id", "cpu family", "model", "model name", "stepping")
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0]
    except OSError:
        return platform.processor() or platform.machine()
    lines = (line.partition(":") for line in text.splitlines())
    return "; ".join(value.strip() for name, _, value in lines if name.strip() in wanted)


def _read_speed(path: Path) -> float:
    try:
        speedup = float(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0.0
    return speedup if SLOWEST <= speedup <= FASTEST else 0.0


def _write_speed(path: Path, speedup: float) -> None:
    """Store a measurement; without a writable cache folder each process measures."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_text(repr(speedup), encoding="ascii")
    except OSError as error:
        _log.debug("the speed of bfloat16 products was not stored: %s", error)
