"""Writes GGUF files byte by byte, so that a test can put any bytes anywhere."""

import struct
from collections.abc import Sequence

(U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64) = range(13)
SCALAR_FORMATS = {
    U8: "<B", I8: "<b", U16: "<H", I16: "<h", U32: "<I", I32: "<i",
    F32: "<f", BOOL: "<B", U64: "<Q", I64: "<q", F64: "<d",
}  # fmt: skip


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def text(value: str | bytes, *, length: int | None = None) -> bytes:
    """Encode a string; `length` replaces its length."""
    raw = value.encode() if isinstance(value, str) else value
    return u64(len(raw) if length is None else length) + raw


def scalar(kind: int, value: float) -> bytes:
    return struct.pack(SCALAR_FORMATS[kind], value)


def array(kind: int, items: Sequence[bytes], *, count: int | None = None) -> bytes:
    """Encode an array; `count` replaces its count."""
    return u32(kind) + u64(len(items) if count is None else count) + b"".join(items)


Value = tuple[int, bytes]  # of metadata: its type and its bytes
TRUE, FALSE = (BOOL, b"\1"), (BOOL, b"\0")


def integer(value: int) -> Value:
    return U32, u32(value)


def number(value: float) -> Value:
    return F32, scalar(F32, value)


def string(value: str) -> Value:
    return STRING, text(value)


def strings(*values: str) -> Value:
    return ARRAY, array(STRING, list(map(text, values)))


def numbers(kind: int, *values: float) -> Value:
    return ARRAY, array(kind, [scalar(kind, value) for value in values])


def entry(key: str | bytes, kind: int, value: bytes) -> bytes:
    """Encode a metadata entry."""
    return text(key) + u32(kind) + value


def tensor(
    name: str | bytes = "t",
    dims: Sequence[int] = (32,),
    kind: int = 0,
    offset: int = 0,
    n_dims: int | None = None,
) -> bytes:
    """Encode an entry of the tensor list; `dims` in the order of the file, the contiguous one first."""
    count = u32(len(dims) if n_dims is None else n_dims)
    return text(name) + count + b"".join(map(u64, dims)) + u32(kind) + u64(offset)


def gguf(
    metadata: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    n_tensors: int | None = None,
    n_metadata: int | None = None,
    alignment: int = 32,
) -> bytes:
    """Encode a file; given counts replace the lengths of the lists."""
    header = magic + u32(version)
    header += u64(len(tensors) if n_tensors is None else n_tensors)
    header += u64(len(metadata) if n_metadata is None else n_metadata)
    header += b"".join([*metadata, *tensors])
    return header + bytes(-len(header) % alignment) + data if data else header
