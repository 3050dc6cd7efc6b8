"""Packed weights of the CPU engine, kept in files, so that a model opens without packing them again.

An entry is a header and the bytes that the engine made. It is mapped, so opening a model does not wait for
it; the first pass copies it to memory on large pages, from which tokens are computed faster. The name of
the file is a hash of everything that the bytes depend on (`Identity`). An entry is believed if

* the header has its checksum, and the same identity;
* the file belongs to this user or to root, is as long as the header says, and has the time of modification
  that it was given when it was written, which a later write by any program changes;
* 64 samples of 4 KiB, from the first byte to the last, have their checksum.

So opening reads 272 KiB, however large the model is. A checksum of all bytes is in the header, too, and
``metal-prefill cache --check`` compares it. An entry that is not believed is made again. A program that
truncates an entry before the first pass has copied it ends this process (SIGBUS), as with a model's file;
deleting or replacing it does no harm.
"""

from __future__ import annotations

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
from metal_prefill._support.cache_folder import beyond_limit, cache_folder, version
from metal_prefill.files._gguf_file import GGUFFile
from metal_prefill.files._session_file import fingerprint, sample_starts

Bytes: TypeAlias = npt.NDArray[np.uint8]

LIMIT = 8 << 30  # bytes of all entries, unless METAL_PREFILL_PACK_CACHE_BYTES says otherwise

_MAGIC = b"metal_prefill packed weights 1\n\0"
_HEADER_BYTES = 16384  # whole pages of every system, so that weights lie as in memory of their own
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
    """An entry that is damaged, or not ours."""


@dataclass(frozen=True)
class Identity:
    """Everything that packed weights depend on.

    Attributes
    ----------
    model, model_bytes, model_modified
        Fingerprint of the model's file, which samples it; its size; and when it was modified, in nanoseconds,
        for what the samples do not see.
    version, core_bytes, core_modified
        Of the package, and size and time of its native module, for those who build it themselves.
    instruction_set
        Of the engine.
    """

    model: str
    model_bytes: int
    model_modified: int
    version: str
    core_bytes: int
    core_modified: int
    instruction_set: str

    @property
    def path(self) -> Path:
        """The file of the entry."""
        digest = hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()
        return _folder() / (digest[:32] + _SUFFIX)


@dataclass(frozen=True)
class Entry:
    """A file of the cache.

    Attributes
    ----------
    path, size
        Of the file, in bytes.
    used
        When it was last opened by an engine, in seconds since 1970.
    """

    path: Path
    size: int
    used: float

    @property
    def name(self) -> str | None:
        """Name of the model's file; None where the entry is damaged."""
        try:
            with _use_not_noted(self.path):
                return str(_map(self.path)[1]["name"])
        except (OSError, ValueError, _NotBelieved):
            return None


def build(builder: _core.ModelBuilder, options: _core.EngineOptions, gguf: GGUFFile) -> _core.Engine:
    """Make the CPU engine of a model, from its entry where there is one; else its weights become one."""
    identity = identify(gguf)
    known = load(identity)
    if known is not None:
        builder.use_packed(known, known)
    engine = builder.build("cpu", options)
    packed = engine.packed_weights()
    if packed.nbytes:
        store(identity, gguf.path, packed)
    return engine


def identify(gguf: GGUFFile) -> Identity:
    """Return what the packed weights of a model depend on."""
    file, core = os.stat(gguf.path), os.stat(_core.__file__)
    return Identity(
        model=fingerprint(gguf),
        model_bytes=file.st_size,
        model_modified=file.st_mtime_ns,
        version=version(),
        core_bytes=core.st_size,
        core_modified=core.st_mtime_ns,
        instruction_set=os.environ.get("METAL_PREFILL_CPU_ISA") or _core.cpu.kernel_sets()[0],
    )


def load(identity: Identity) -> Bytes | None:
    """Map the packed weights of a model; None where there are none, or none to believe."""
    path = identity.path
    try:
        data, header = _map(path)
        if header["identity"] != asdict(identity):
            raise _NotBelieved("it is of another model or version")
        if _sampled(data) != header["samples"]:
            raise _NotBelieved("its contents are damaged")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, _NotBelieved) as error:
        _log.warning("packed weights in %s are not used, they are made again: %s", path, error)
        return None
    with suppress(OSError):  # such as on a read-only file system: the order of use is not kept there
        os.utime(path, ns=(time.time_ns(), header["modified"] * _SECOND))
    return data


def store(identity: Identity, model: Path, packed: Bytes) -> None:
    """Keep the packed weights of a model, and let go of those that were not used for longest.

    A failure, such as a full disk, is logged: the cache is as before, and the engine has its weights anyway.
    """
    size = _HEADER_BYTES + packed.nbytes
    try:
        if size > limit():
            raise OSError(f"{size} bytes are more than the cache may have, {limit()}")
        path = identity.path
        path.parent.mkdir(parents=True, exist_ok=True)
        _evict(limit() - size, keep=path)
        # A file system may keep times to two seconds.
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
        _evict(limit(), keep=path)  # other processes may have written meanwhile
    except OSError as error:
        _log.warning("packed weights of %s are not kept: %s", model, error)


def entries() -> list[Entry]:
    """List all entries, the one that was used last first."""
    return sorted(_entries(), key=lambda entry: (-entry.used, entry.path))


def is_whole(entry: Entry) -> bool:
    """Compare all bytes of an entry with its checksum."""
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
    """Return how many bytes all entries together may have.

    Raises
    ------
    ValueError
        ``METAL_PREFILL_PACK_CACHE_BYTES`` is not a number of bytes.
    """
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
    """Keep the time at which an entry was last used: a file system may take any reading for a use."""
    status = path.stat()
    try:
        yield
    finally:
        with suppress(OSError):
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def _evict(most: int, keep: Path) -> None:
    """Delete entries until the others have at most `most` bytes, the one whose use is longest ago first."""
    others = [(entry.used, entry.size, entry.path) for entry in _entries() if entry.path != keep]
    for path in beyond_limit(others, most):
        path.unlink(missing_ok=True)


def _map(path: Path) -> tuple[Bytes, dict[str, Any]]:
    """Map the bytes of an entry, and read its header, which has its checksum and fits the file."""
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        header = _decoded(file.read(_HEADER_BYTES))
        if os.name == "posix" and status.st_uid not in (0, os.geteuid()):
            raise _NotBelieved("it belongs to another user")
        if status.st_size != _HEADER_BYTES + header["bytes"]:
            raise _NotBelieved(f"it has {status.st_size} bytes in place of {_HEADER_BYTES + header['bytes']}")
        if status.st_mtime_ns != header["modified"] * _SECOND:
            raise _NotBelieved("something wrote to it")
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
    # A checksum finds accidents; whoever wrote another header can give it one, too.
    if not isinstance(decoded, dict) or {k: type(v) for k, v in decoded.items()} != _HEADER:
        raise _NotBelieved("its header is damaged")
    return decoded


def _sampled(data: Bytes) -> str:
    digest = hashlib.sha256()
    for start in sample_starts(data.nbytes, _SAMPLES, _SAMPLE_BYTES):
        digest.update(data[start : start + _SAMPLE_BYTES].data)
    return digest.hexdigest()
