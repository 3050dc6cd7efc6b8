"""On-disk cache of the CPU engine's packed weights, which avoids packing them each time a model is opened.

An entry consists of a header and the bytes that the engine packed. It is mapped, so that opening a model does
not wait for it to be read; the first pass copies it to memory with large pages, which decodes faster. The
file name is a hash of everything that the bytes depend on (`Identity`). An entry is valid if

* the header matches its checksum, and contains the same identity;
* the file belongs to this user or to root, has the length recorded in the header, and has the modification
  time that was set when it was written, which any later write changes;
* 64 samples of 4 KiB, spread from the first byte to the last, match their checksum.

Opening therefore reads 272 KiB, regardless of the size of the model. The header also contains a checksum of
all bytes, which ``metal-prefill cache --check`` verifies. An invalid entry is rebuilt. Truncating an entry
before the first pass has copied it terminates the process (SIGBUS), as with a model file; deleting or
replacing an entry is safe.
"""

import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from metal_prefill import _core
from metal_prefill._support.atomic_write import replacing
from metal_prefill.files._gguf_file import GGUFFile
from metal_prefill.storage._cache_folder import beyond_limit, cache_folder, version
from metal_prefill.storage._kernel_set import kernel_set
from metal_prefill.storage._session_file import fingerprint, sample_starts

Bytes: TypeAlias = npt.NDArray[np.uint8]

LIMIT = 8 << 30  # bytes of all entries, unless METAL_PREFILL_PACK_CACHE_BYTES is set

_MAGIC = b"metal_prefill packed weights 1\n\0"
_HEADER_BYTES = 16384  # a multiple of every system's page size, so that the weights are page-aligned
_HEADER: dict[str, type] = {
    "identity": dict,
    "name": str,
    "bytes": int,
    "modified": int,
    "samples": str,
    "checksum": str,
}
_CHECKSUM_BYTES = 32
_SAMPLES, _SAMPLE_BYTES = 64, 4096
_SUFFIX = ".packed"
_SECOND = 10**9  # in nanoseconds

_log = logging.getLogger("metal_prefill")


class _NotBelieved(Exception):
    """The entry is damaged, or does not belong to this user, model or version."""


@dataclass(frozen=True)
class Identity:
    """All inputs that packed weights depend on."""

    # Fingerprint of the model file, computed from samples; its size; and its modification time in
    # nanoseconds, which reveals changes that the samples miss.
    model: str
    model_bytes: int
    model_modified: int
    # Version of the package, and size and modification time of its native module, which identify local
    # builds.
    version: str
    core_bytes: int
    core_modified: int
    instruction_set: str  # instruction set of the engine
    compute: str  # numbers that products multiply

    @property
    def path(self) -> Path:
        """Path of the entry."""
        digest = hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()
        return _folder() / (digest[:32] + _SUFFIX)


@dataclass(frozen=True)
class Entry:
    """A file in the cache."""

    # Path of the file and its size in bytes.
    path: Path
    size: int
    used: float  # time at which an engine last opened it, in seconds since 1970

    @property
    def name(self) -> str | None:
        """Name of the model file, or None if the entry is damaged."""
        try:
            with _use_not_noted(self.path):
                return str(_map(self.path)[1]["name"])
        except (OSError, ValueError, _NotBelieved):
            return None


def build(builder: _core.ModelBuilder, options: _core.EngineOptions, gguf: GGUFFile) -> _core.Engine:
    """Build the CPU engine of a model from its cache entry, packing the weights if there is none."""
    identity = identify(gguf, options.compute)
    known = load(identity)
    if known is not None:
        builder.use_packed(known, known)
    engine = builder.build("cpu", options)
    packed = engine.packed_weights()
    if packed.nbytes:
        store(identity, gguf.path, packed)
    return engine


def identify(gguf: GGUFFile, compute: _core.Compute) -> Identity:
    """Return the inputs that the packed weights of a model depend on."""
    files, core = [os.stat(part) for part in gguf.parts], os.stat(_core.__file__)
    return Identity(
        model=fingerprint(gguf),
        model_bytes=sum(file.st_size for file in files),
        model_modified=max(file.st_mtime_ns for file in files),
        version=version(),
        core_bytes=core.st_size,
        core_modified=core.st_mtime_ns,
        instruction_set=kernel_set(),
        compute=compute.name,
    )


def load(identity: Identity) -> Bytes | None:
    """Map the packed weights of a model; return None if there is no valid entry."""
    path = identity.path
    try:
        data, header = _map(path)
        if header["identity"] != asdict(identity):
            raise _NotBelieved("it belongs to another model or version")
        if _sampled(data) != header["samples"]:
            raise _NotBelieved("its contents are damaged")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, _NotBelieved) as error:
        _log.warning("rebuilding packed weights in %s: %s", path, error)
        return None
    with suppress(OSError):  # a read-only file system cannot record the time of use
        os.utime(path, ns=(time.time_ns(), header["modified"] * _SECOND))
    return data


def store(identity: Identity, model: Path, packed: Bytes) -> None:
    """Store the packed weights of a model, and evict the least recently used entries.

    A failure, such as a full disk, is logged and leaves the cache unchanged; the engine does not need the
    entry.
    """
    size = _HEADER_BYTES + packed.nbytes
    try:
        if size > limit():
            raise OSError(f"{size} bytes exceed the cache limit of {limit()} bytes")
        path = identity.path
        path.parent.mkdir(parents=True, exist_ok=True)
        _evict(limit() - size, keep=path)
        # Some file systems store times with a resolution of two seconds.
        modified = int(time.time()) // 2 * 2
        header = {
            "identity": asdict(identity),
            "name": model.name,
            "bytes": packed.nbytes,
            "modified": modified,
            "samples": _sampled(packed),
            "checksum": hashlib.sha256(packed.data).hexdigest(),
        }
        with replacing(path) as part:
            with open(part, "wb") as file:
                file.write(_encoded(header))
                file.write(packed.data)
            os.utime(part, ns=(time.time_ns(), modified * _SECOND))
        _evict(limit(), keep=path)  # other processes may have added entries meanwhile
    except OSError as error:
        _log.warning("cannot store packed weights of %s: %s", model, error)


def entries() -> list[Entry]:
    """Return all entries, most recently used first."""
    return sorted(_entries(), key=lambda entry: (-entry.used, entry.path))


def is_whole(entry: Entry) -> bool:
    """Return whether all bytes of an entry match its checksum."""
    try:
        with _use_not_noted(entry.path):
            data, header = _map(entry.path)
            return bool(hashlib.sha256(data.data).hexdigest() == header["checksum"])
    except (OSError, ValueError, _NotBelieved):
        return False


def remove(entry: Entry) -> None:
    """Delete an entry. Engines that have mapped it keep their weights."""
    entry.path.unlink(missing_ok=True)


def limit() -> int:
    """Return the maximum total size of all entries in bytes."""
    stated = os.environ.get("METAL_PREFILL_PACK_CACHE_BYTES")
    if not stated:
        return LIMIT
    if not stated.isdecimal():
        raise ValueError(f"METAL_PREFILL_PACK_CACHE_BYTES must be a number of bytes, got {stated!r}")
    return int(stated)


def _folder() -> Path:
    return cache_folder() / "packed"


def _entries() -> Iterator[Entry]:
    for path in _folder().glob("*" + _SUFFIX):
        with suppress(FileNotFoundError):
            status = path.stat()
            yield Entry(path, status.st_size, status.st_atime)


@contextmanager
def _use_not_noted(path: Path) -> Iterator[None]:
    """Restore an entry's access time afterwards, because the file system may update it on any read."""
    status = path.stat()
    try:
        yield
    finally:
        with suppress(OSError):
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def _evict(most: int, keep: Path) -> None:
    """Delete the least recently used entries until the rest have at most `most` bytes in total."""
    others = [(entry.used, entry.size, entry.path) for entry in _entries() if entry.path != keep]
    for path in beyond_limit(others, most):
        path.unlink(missing_ok=True)


def _map(path: Path) -> tuple[Bytes, dict[str, Any]]:
    """Map the bytes of an entry and read its header, checking it against its checksum and the file."""
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        header = _decoded(file.read(_HEADER_BYTES))
        if os.name == "posix" and status.st_uid not in (0, os.geteuid()):
            raise _NotBelieved("it belongs to another user")
        if status.st_size != _HEADER_BYTES + header["bytes"]:
            raise _NotBelieved(f"it has {status.st_size} bytes instead of {_HEADER_BYTES + header['bytes']}")
        if status.st_mtime_ns != header["modified"] * _SECOND:
            raise _NotBelieved("it was modified after it was written")
        return _core.map_file(file.fileno(), status.st_size)[_HEADER_BYTES:], header


def _encoded(header: dict[str, Any]) -> bytes:
    content = _MAGIC + json.dumps(header).encode()
    content = content.ljust(_HEADER_BYTES - _CHECKSUM_BYTES, b"\0")
    return content + hashlib.sha256(content).digest()


def _decoded(header: bytes) -> dict[str, Any]:
    content, checksum = header[:-_CHECKSUM_BYTES], header[-_CHECKSUM_BYTES:]
    if not content.startswith(_MAGIC) or hashlib.sha256(content).digest() != checksum:
        raise _NotBelieved("its header is damaged")
    try:
        decoded: dict[str, Any] = json.loads(content[len(_MAGIC) :].rstrip(b"\0"))
    except RecursionError:
        raise _NotBelieved("its header is damaged") from None
    # The checksum only detects accidental damage, so a header with a valid checksum is parsed defensively.
    if not isinstance(decoded, dict) or {k: type(v) for k, v in decoded.items()} != _HEADER:
        raise _NotBelieved("its header is damaged")
    return decoded


def _sampled(data: Bytes) -> str:
    digest = hashlib.sha256()
    for start in sample_starts(data.nbytes, _SAMPLES, _SAMPLE_BYTES):
        digest.update(data[start : start + _SAMPLE_BYTES].data)
    return digest.hexdigest()
