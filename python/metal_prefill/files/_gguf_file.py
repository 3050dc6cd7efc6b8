"""Validating, zero-copy reader of GGUF model files.

The file is mapped into memory, or read into memory with ``mmap=False``; tensors are views of that memory.
The parts of a split model are read into memory, one after another.
Opening a mapped file reads only the header. All sizes and offsets in the header are checked against the file
size before use, so that a damaged or hostile file raises a `GGUFError` with the field and its position, and
never causes a large allocation or an out-of-bounds read.

The format is specified in ggml's ``docs/gguf.md``; little-endian files of versions 2 and 3 are supported.
"""

from __future__ import annotations

import copy
import io
import itertools
import math
import mmap as mmap_module
import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from metal_prefill import _core
from metal_prefill._support.messages import Located
from metal_prefill.errors import ClosedError, GGUFError
from metal_prefill.files._gguf_metadata import MIN_METADATA_BYTES, Cursor, Metadata
from metal_prefill.files._other_formats import RECOGNIZED_BYTES, recognized

MAGIC = b"GGUF"
VERSIONS = (2, 3)
_ALIGNMENT = "general.alignment"
DEFAULT_ALIGNMENT = 32
MIN_ALIGNMENT = 8  # the specification requires a multiple of 8
MAX_TENSOR_NAME_BYTES = 64
MAX_DIMS = 4
MAX_ELEMENTS = 2**63 - 1
_READ_BYTES = 16 << 20  # per read, so that Ctrl-C takes effect between reads
_PAGE = 16384  # bytes, the largest of all systems
# Keys of split models, and names of their parts.
_NUMBER, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf\Z")
MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8  # name length, one character, n_dims, one dimension, type, offset


class TensorType(NamedTuple):
    """Name of a tensor type and the size of its blocks."""

    name: str
    block_values: int
    block_bytes: int


SUPPORTED_TYPES = {number: TensorType(*kind) for number, kind in _core.tensor_types().items()}
# Every type of the specification, so that the extent of any tensor can be checked.
TENSOR_TYPES = SUPPORTED_TYPES | {
    9: TensorType("Q8_1", 32, 40),
    15: TensorType("Q8_K", 256, 292),
    19: TensorType("IQ1_S", 256, 50),
    24: TensorType("I8", 1, 1),
    25: TensorType("I16", 1, 2),
    26: TensorType("I32", 1, 4),
    27: TensorType("I64", 1, 8),
    28: TensorType("F64", 1, 8),
    29: TensorType("IQ1_M", 256, 56),
    41: TensorType("Q1_0", 128, 18),
}

FloatArray: TypeAlias = npt.NDArray[np.float32]


@dataclass(frozen=True)
class TensorInfo:
    """Name, type, shape and location of a tensor in the file.

    Attributes
    ----------
    name : str
    type : int
        Number of the tensor type in the specification.
    type_name : str
        Name of the tensor type, such as ``"Q4_0"``.
    shape : tuple of int
        In NumPy order: the last dimension is contiguous. A matrix is ``(rows, cols)``.
    offset : int
        Position of the first byte, counted from the start of the file.
    nbytes : int
        Size in bytes.
    """

    name: str
    type: int
    type_name: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def as_matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the number of rows of a tensor, of all its matrices, and their length; a vector is a row."""
    *rows, columns = shape
    return math.prod(rows), columns


class GGUFFile(Located):
    """An open GGUF file.

    Parameters
    ----------
    path : str or os.PathLike
        A file, or the first part of a split one (``model-00001-of-00003.gguf``), which opens all parts.
    mmap : bool
        Map the file into memory. False reads the whole file instead, for files that other programs may change
        in place.

    Attributes
    ----------
    path : pathlib.Path
    parts : tuple of pathlib.Path
        The files of a split model, or `path` alone.
    version : int
    metadata : Metadata
    tensors : dict of str to TensorInfo
        Tensors by name, in file order.
    data_offset : int
        Start of the tensor data, in bytes from the start of the file.

    Raises
    ------
    GGUFError
        The file is not a valid GGUF file, is not the first part of a split one, or other parts do not fit it.
    OSError
        The file cannot be opened: `FileNotFoundError`, `IsADirectoryError`, `PermissionError`.

    Notes
    -----
    Views remain valid after `close`; the mapping is released with the last view. As with any mapped file, the
    process is terminated (SIGBUS) if another program truncates the file in place while it is in use, and
    writes by other programs are visible in the data. Replacing the file by renaming is safe. With
    ``mmap=False``, later changes to the file have no effect.
    """

    def __init__(self, path: str | os.PathLike[str], *, mmap: bool = True) -> None:
        self.path = Path(path)
        data = _map_file(self.path) if mmap else _read_files([self.path])[0]
        self.version, self.metadata, self.tensors, self.data_offset = _read_header(self.path, data)
        self.parts = _parts_of(self.path, self.metadata)
        if len(self.parts) > 1:
            data, starts = _read_files(self.parts)
            for i in range(1, len(starts)):
                self._add_part(i, data[starts[i] :], starts[i])
            if (wanted := self.metadata.get(_TENSORS, len(self.tensors))) != len(self.tensors):
                raise self.error(f"{_TENSORS} is {wanted}, but the parts have {len(self.tensors)}")
        self._mapping: npt.NDArray[np.uint8] | None = np.frombuffer(data, np.uint8)
        self._mapping.flags.writeable = False

    def _add_part(self, index: int, data: memoryview, start: int) -> None:
        """Add the tensors of another part, which begins at byte `start` of the mapping."""
        path, count = self.parts[index], len(self.parts)
        header = _read_header(path, data)
        found = header.metadata.get(_NUMBER), header.metadata.get(_COUNT)
        if found != (index, count):
            raise GGUFError(f"{path}: is not part {index + 1} of {count}: {_NUMBER}, {_COUNT} are {found}")
        if same := header.tensors.keys() & self.tensors.keys():
            raise GGUFError(f"{path}: tensor {min(same)} is in another part, too")
        for name, tensor in header.tensors.items():
            self.tensors[name] = replace(tensor, offset=start + tensor.offset)

    @property
    def mapping(self) -> npt.NDArray[np.uint8]:
        """Contents of the whole file, ``uint8 [file size]``: a page-aligned, read-only view.

        Each part of a split file begins at a page.
        """
        mapping = self._mapping  # another thread may close the file now
        if mapping is None:
            raise ClosedError(f"{self.path} is closed")
        return mapping

    def tensor(self, name: str) -> npt.NDArray[np.uint8]:
        """Return the bytes of a tensor as a view of `mapping`, ``uint8 [nbytes]``.

        Raises
        ------
        GGUFError
            The file has no tensor of this name.
        """
        info = self.tensors.get(name)
        if info is None:
            raise self.error(f"has no tensor {name}")
        return self.mapping[info.offset : info.offset + info.nbytes]

    def inner(self, prefix: str) -> GGUFFile:
        """Return the model that this file has within it: metadata and tensors with a prefix, without it."""
        found = copy.copy(self)
        found.metadata = self.metadata.inner(prefix)
        found.tensors = {
            (name := full.removeprefix(prefix)): replace(tensor, name=name)
            for full, tensor in self.tensors.items()
            if full.startswith(prefix)
        }
        return found

    def close(self) -> None:
        """Release the mapping. Decoded metadata stays available, and existing views stay valid."""
        self._mapping = None
        self.metadata.close()

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"GGUFFile({str(self.path)!r}, version={self.version}, "
            f"{len(self.metadata)} metadata entries, {len(self.tensors)} tensors)"
        )


@contextmanager
def _opened(path: Path) -> Iterator[tuple[io.FileIO, int]]:
    """Open a regular file without buffering, and yield it with its size in bytes."""

    # Size and contents are read through one descriptor, so that they belong to the same file even if the path
    # is replaced meanwhile. Without O_NONBLOCK, opening a named pipe would block.
    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))

    with open(path, "rb", buffering=0, opener=opener) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise GGUFError(f"{path}: not a regular file")
        if status.st_size == 0:
            raise GGUFError(f"{path}: the file is empty")
        yield file, status.st_size


def _map_file(path: Path) -> memoryview:
    with _opened(path) as (file, size):
        try:
            return _core.map_file(file.fileno(), size).data
        except ValueError as error:  # the file was truncated after its size was read
            raise GGUFError(f"{path}: cannot be mapped: {error}") from None


def _read_files(paths: Sequence[Path]) -> tuple[memoryview, list[int]]:
    """Read files into memory, each from a page on; return the memory and where each file begins."""
    with ExitStack() as stack:
        files = [stack.enter_context(_opened(path)) for path in paths]
        ends = list(itertools.accumulate(-(-size // _PAGE) * _PAGE for _, size in files))
        starts = [0, *ends[:-1]]
        data = mmap_module.mmap(-1, starts[-1] + files[-1][1])  # page-aligned, like a mapped file
        for path, (file, size), start in zip(paths, files, starts, strict=True):
            with memoryview(data)[start : start + size] as view:
                done = 0
                while done < size:
                    count = file.readinto(view[done : done + _READ_BYTES])
                    if not count:
                        raise GGUFError(f"{path}: was truncated while being read, at byte {done} of {size}")
                    done += count
    return memoryview(data), starts


def part_names(name: str) -> list[str]:
    """Return the names of all parts of a split file, given the first one's; else only the name."""
    found = _PART.search(name)
    if found is None or int(found[1]) != 1:
        return [name]
    return [f"{name[: found.start()]}-{i + 1:05d}-of-{found[2]}.gguf" for i in range(int(found[2]))]


def is_later_part(name: str) -> bool:
    """Return whether a file name belongs to a part of a split file other than the first."""
    found = _PART.search(name)
    return found is not None and int(found[1]) != 1


def _parts_of(path: Path, metadata: Metadata) -> tuple[Path, ...]:
    count, number = metadata.get(_COUNT, 1), metadata.get(_NUMBER, 0)
    if count in (0, 1):
        return (path,)
    names = part_names(path.name)
    if number != 0 or len(names) != count:
        first = _PART.sub(r"-00001-of-\2.gguf", path.name)
        rest = f"open {first}" if first != path.name else "its name must end in -00001-of-<count>.gguf"
        raise GGUFError(f"{path}: is a part of a split model ({_NUMBER} {number}, {_COUNT} {count}); {rest}")
    for i, name in enumerate(names):
        if not path.with_name(name).exists():
            raise GGUFError(f"{path}: part {i + 1} of {count} is missing: {name}")
    return tuple(path.with_name(name) for name in names)


class _Header(NamedTuple):
    version: int
    metadata: Metadata
    tensors: dict[str, TensorInfo]
    data_offset: int


def _read_header(path: Path, data: memoryview) -> _Header:
    cursor = Cursor(path, data)
    version = _read_version(cursor)
    n_tensors = cursor.count("tensors", MIN_TENSOR_BYTES)
    n_metadata = cursor.count("metadata entries", MIN_METADATA_BYTES)
    metadata = Metadata(path, data)
    metadata.read(cursor, n_metadata)
    alignment: int = metadata.typed(_ALIGNMENT, "uint32", default=DEFAULT_ALIGNMENT)
    if alignment < MIN_ALIGNMENT or alignment & (alignment - 1):
        raise cursor.error(f"{_ALIGNMENT} is {alignment}, must be a power of two of at least {MIN_ALIGNMENT}")
    return _Header(version, metadata, *_read_tensors(cursor, n_tensors, alignment))


def _read_version(cursor: Cursor) -> int:
    magic = cursor.data[: len(MAGIC)]
    if magic != MAGIC:
        if found := recognized(bytes(cursor.data[:RECOGNIZED_BYTES])):
            raise cursor.error(f"not a GGUF file, but {found}")
        raise cursor.error(f"not a GGUF file: begins with {bytes(magic)!r}, not {MAGIC!r}")
    cursor.pos = len(MAGIC)
    version = cursor.u32("the version")
    if version in VERSIONS:
        return version
    if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
        raise cursor.error("is a big-endian GGUF file; only little-endian files are supported")
    raise cursor.error(f"GGUF version {version} is not one of {', '.join(map(str, VERSIONS))}")


def _read_tensors(cursor: Cursor, count: int, alignment: int) -> tuple[dict[str, TensorInfo], int]:
    """Read the tensor list; return it and the offset of the tensor data."""
    tensors: dict[str, TensorInfo] = {}
    for index in range(count):
        tensor = _read_tensor(cursor, f"the name of tensor {index} of {count}", alignment)
        if tensor.name in tensors:
            raise cursor.error(f"duplicate tensor {tensor.name}")
        tensors[tensor.name] = tensor

    data_offset = (cursor.pos + alignment - 1) & ~(alignment - 1)
    tensors = {name: replace(tensor, offset=data_offset + tensor.offset) for name, tensor in tensors.items()}
    before: TensorInfo | None = None
    for tensor in sorted(tensors.values(), key=lambda t: t.offset):
        end = tensor.offset + tensor.nbytes
        if end > cursor.size:
            raise cursor.error(
                f"tensor {tensor.name} of {tensor.nbytes} bytes ends at byte {end}, "
                f"past the end of the file at byte {cursor.size}"
            )
        if before is not None and tensor.offset < before.offset + before.nbytes:
            raise cursor.error(f"tensors {before.name} and {tensor.name} overlap at byte {tensor.offset}")
        before = tensor
    return tensors, data_offset


def _read_tensor(cursor: Cursor, what: str, alignment: int) -> TensorInfo:
    """Read one entry of the tensor list; its offset is relative to the start of the tensor data."""
    name = cursor.name(what, MAX_TENSOR_NAME_BYTES)
    n_dims = cursor.u32(f"the number of dimensions of tensor {name}")
    if not 1 <= n_dims <= MAX_DIMS:
        raise cursor.error(f"tensor {name} has {n_dims} dimensions, must have 1 to {MAX_DIMS}")
    # The file lists the contiguous dimension first.
    shape = tuple(cursor.u64(f"the shape of tensor {name}") for _ in range(n_dims))[::-1]
    elements = math.prod(shape)
    if not 0 < elements <= MAX_ELEMENTS:
        raise cursor.error(f"tensor {name} has shape {shape}, must have 1 to 2^63 - 1 elements")

    number = cursor.u32(f"the type of tensor {name}")
    kind = TENSOR_TYPES.get(number)
    if kind is None:
        raise cursor.error(f"tensor {name} has unknown type {number}")
    if shape[-1] % kind.block_values:
        raise cursor.error(
            f"tensor {name} has rows of {shape[-1]} values, "
            f"must be a multiple of the {kind.name} block size {kind.block_values}"
        )
    offset = cursor.u64(f"the offset of tensor {name}")
    if offset % alignment:
        raise cursor.error(
            f"tensor {name} has offset {offset}, must be a multiple of the alignment {alignment}"
        )
    return TensorInfo(
        name, number, kind.name, shape, offset, elements // kind.block_values * kind.block_bytes
    )


def dequantized(gguf: GGUFFile, tensor: TensorInfo, rows: slice | None = None) -> FloatArray:
    data = gguf.tensor(tensor.name).reshape(tensor.shape[0] if len(tensor.shape) == 2 else 1, -1)
    data = data if rows is None else data[rows]
    values = _core.dequantize(tensor.type, np.ascontiguousarray(data).ravel(), len(data) * tensor.shape[-1])
    return values.reshape(len(data), -1) if len(tensor.shape) == 2 else values
