"""On-disk cache of the CPU engine's packed weights, which avoids packing them each time a model is opened.

An entry is a header of one page and the bytes that the engine packed. It is mapped, so that a model opens
before it is read; the first pass copies it to memory with large pages, which decodes faster.
The header is a hash of all inputs of the bytes, of the size and the modification time of the
file, which any later write changes, and of 64 samples of 4 KiB of the bytes, from the first to the last.
Opening therefore reads 272 KiB, regardless of the size of the model. An entry that belongs to another user,
or whose header differs, is rebuilt. Truncating an entry before the first pass has copied it terminates the
process (SIGBUS), as with a model file; deleting or replacing an entry is safe.
"""

import hashlib
import json
import logging
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from metal_prefill import _core
from metal_prefill._support.atomic_write import replacing
from metal_prefill.files._gguf_file import GGUFFile
from metal_prefill.storage._cache_folder import cache_folder, remove_oldest, sample_starts, version
from metal_prefill.storage._kernel_set import kernel_set
from metal_prefill.storage._session_file import fingerprint

Bytes: TypeAlias = npt.NDArray[np.uint8]

LIMIT = 8 << 30  # bytes of all entries, unless METAL_PREFILL_PACK_CACHE_BYTES is set

_MAGIC = b"metal_prefill packed weights 2\n"
_HEADER_BYTES = 16384  # a multiple of every system's page size, so that the weights are page-aligned
_SAMPLES, _SAMPLE_BYTES = 64, 4096
PATTERN = "packed/*.packed"  # of all entries in the cache folder
_KEY_DIGITS = 32
_NAME_BYTES = 128  # of the model's name in that of a file

_log = logging.getLogger("metal_prefill")


def build(builder: _core.ModelBuilder, options: _core.EngineOptions, gguf: GGUFFile) -> _core.Engine:
    """Build the CPU engine of a model from its cache entry, packing the weights if there is none."""
    key = identify(gguf, options.compute)
    name = os.fsencode(gguf.path.name)[:_NAME_BYTES].decode("utf-8", "ignore")
    path = cache_folder() / f"packed/{name}-{key[:_KEY_DIGITS]}.packed"
    known = _load(path, key)
    if known is not None:
        builder.use_packed(known, known)
    engine = builder.build("cpu", options)
    packed = engine.packed_weights()
    if packed.nbytes:
        _store(path, key, packed)
    return engine


def identify(gguf: GGUFFile, compute: str) -> str:
    """Return a hash of all inputs of the packed weights of a model.

    Sizes and modification times reveal changes that samples of the model file miss, and other builds of the
    native module.
    """
    status = [os.stat(part) for part in (*map(str, gguf.parts), _core.__file__)]
    parts = [fingerprint(gguf), version(), kernel_set(), compute]
    parts += [f"{file.st_size} {file.st_mtime_ns}" for file in status]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _load(path: Path, key: str) -> Bytes | None:
    """Map the packed weights of a model; return None if there is no valid entry."""
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            data = _core.map_file(file.fileno(), status.st_size)
        weights = data[_HEADER_BYTES:]
        if status.st_uid not in (0, os.geteuid()):
            raise ValueError("it belongs to another user")
        if data[:_HEADER_BYTES].tobytes() != _header(key, status.st_mtime_ns, weights):
            raise ValueError("it is damaged, or was modified after it was written")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        _log.warning("rebuilding packed weights in %s: %s", path, error)
        return None
    with suppress(OSError):  # a read-only file system cannot record the time of use
        os.utime(path, ns=(time.time_ns(), status.st_mtime_ns))
    return weights


def _store(path: Path, key: str, packed: Bytes) -> None:
    """Store the packed weights of a model, and evict the least recently used entries.

    A failure, such as a full disk, is logged and leaves the cache unchanged; the engine does not need the
    entry.
    """
    size, most = _HEADER_BYTES + packed.nbytes, limit()
    try:
        if size > most:
            raise OSError(f"{size} bytes exceed the cache limit of {most} bytes")
        remove_oldest(PATTERN, most - size, keep=path)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Some file systems store times with a resolution of two seconds.
        modified = int(time.time()) // 2 * 2 * 10**9
        with replacing(path) as part:
            with open(part, "wb") as file:
                file.write(_header(key, modified, packed))
                file.write(packed.data)
            os.utime(part, ns=(time.time_ns(), modified))
        remove_oldest(PATTERN, most - size, keep=path)  # other processes may have added entries meanwhile
    except OSError as error:
        _log.warning("cannot store packed weights in %s: %s", path, error)


def _header(key: str, modified: int, weights: Bytes) -> bytes:
    """Return the header of an entry with these bytes, last modified at a time in nanoseconds."""
    digest = hashlib.sha256(f"{key} {modified} {weights.nbytes}".encode())
    for start in sample_starts(weights.nbytes, _SAMPLES, _SAMPLE_BYTES):
        digest.update(weights[start : start + _SAMPLE_BYTES].data)
    return (_MAGIC + digest.digest()).ljust(_HEADER_BYTES, b"\0")


def limit() -> int:
    stated = os.environ.get("METAL_PREFILL_PACK_CACHE_BYTES")
    if not stated:
        return LIMIT
    if not stated.isdecimal():
        raise ValueError(f"METAL_PREFILL_PACK_CACHE_BYTES must be a number of bytes, got {stated!r}")
    return int(stated)
