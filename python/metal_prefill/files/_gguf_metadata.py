"""The header of a GGUF file: a bounds-checked cursor, and the metadata.

Every count and length is checked against the file size before use. Arrays, such as the strings of a
vocabulary, are skipped and decoded on first access.
"""

from __future__ import annotations

import copy
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from metal_prefill import _core
from metal_prefill._support.messages import Located
from metal_prefill.errors import ClosedError

Scalar: TypeAlias = bool | int | float | str
# Numeric arrays are read-only NumPy arrays of the file's dtype; arrays of strings or of arrays are lists.
MetadataValue: TypeAlias = "Scalar | npt.NDArray[Any] | list[Any]"

MAX_KEY_BYTES = 65535
MAX_ARRAY_DEPTH = 4  # nesting of arrays; the specification sets no limit

# Smallest size of an entry of each list in the header, with which counts are checked before use.
MIN_METADATA_BYTES = 8 + 1 + 4 + 1  # key length, one character, type, one byte of value
MIN_STRING_BYTES = 8
MIN_ARRAY_BYTES = 4 + 8

BOOL, STRING, ARRAY = 7, 8, 9
# Metadata value types: name and, for numbers, the format character in `struct` and NumPy.
VALUE_TYPES: dict[int, tuple[str, str]] = {
    0: ("uint8", "B"),
    1: ("int8", "b"),
    2: ("uint16", "H"),
    3: ("int16", "h"),
    4: ("uint32", "I"),
    5: ("int32", "i"),
    6: ("float32", "f"),
    BOOL: ("bool", "?"),
    STRING: ("string", ""),
    ARRAY: ("array", ""),
    10: ("uint64", "Q"),
    11: ("int64", "q"),
    12: ("float64", "d"),
}

_INTEGERS = frozenset(name for name, _ in VALUE_TYPES.values() if "int" in name)
_FLOATS = frozenset(("float32", "float64"))
# Types of any width, as `Metadata.typed` names them, and in messages.
_WIDTHS = {
    "integer": _INTEGERS,
    "float": _FLOATS,
    "array[integer]": {f"array[{name}]" for name in _INTEGERS},
    "array[float]": {f"array[{name}]" for name in _FLOATS},
}
_WORDS = {"integer": "an integer", "float": "a float", "array[integer]": "an array of integers"}

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_SCALARS = {code: struct.Struct("<" + char) for code, (_, char) in VALUE_TYPES.items() if char} | {
    BOOL: struct.Struct("<B")  # "?" would accept any nonzero byte as true
}


class Array(NamedTuple):
    """An array in the header that is not decoded yet."""

    element_type: int
    length: int
    offset: int  # of the first element


class Cursor(Located):
    """Sequential reader of the header that checks every read against the end of the file."""

    def __init__(self, path: Path, data: memoryview) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.pos = 0

    def take(self, nbytes: int, what: str) -> int:
        """Advance by `nbytes` and return the position before."""
        start = self.pos
        if nbytes > self.size - start:
            raise self.error(
                f"truncated: {what} at byte {start} needs {nbytes} bytes, the file ends at byte {self.size}"
            )
        self.pos = start + nbytes
        return start

    def u32(self, what: str) -> int:
        return _U32.unpack_from(self.data, self.take(4, what))[0]

    def u64(self, what: str) -> int:
        return _U64.unpack_from(self.data, self.take(8, what))[0]

    def string(self, what: str) -> str:
        """Read a length and that many bytes of UTF-8."""
        start = self.take(self.u64(f"the length of {what}"), what)
        try:
            return str(self.data[start : self.pos], "utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"{what} at byte {start} is not valid UTF-8: {error.reason}") from None

    def name(self, what: str, limit: int) -> str:
        """Read a string of 1 to `limit` bytes."""
        start = self.pos
        length = self.u64(f"the length of {what}")
        if not 0 < length <= limit:
            raise self.error(f"{what} at byte {start} has {length} bytes, must have 1 to {limit}")
        self.pos = start
        return self.string(what)

    def count(self, what: str, entry_bytes: int) -> int:
        """Read a number of entries, which must fit in the rest of the file at `entry_bytes` or more each."""
        count = self.u64(f"the number of {what}")
        room = (self.size - self.pos) // entry_bytes
        if count > room:
            raise self.error(
                f"declares {count} {what} at byte {self.pos - 8}, "
                f"the rest of the file has room for at most {room}"
            )
        return count

    def value_type(self, what: str) -> int:
        """Read a metadata type number, a key of `VALUE_TYPES`."""
        value_type = self.u32(f"the type of {what}")
        if value_type not in VALUE_TYPES:
            raise self.error(f"{what} has unknown metadata type {value_type} at byte {self.pos - 4}")
        return value_type

    def value(self, value_type: int, what: str) -> Scalar | Array:
        """Read a metadata value; arrays are skipped."""
        if value_type == STRING:
            return self.string(what)
        if value_type == ARRAY:
            return self.skip_array(what)
        scalar = _SCALARS[value_type]
        value: int | float = scalar.unpack_from(self.data, self.take(scalar.size, what))[0]
        if value_type != BOOL:
            return value
        if value not in (0, 1):
            raise self.error(f"{what} at byte {self.pos - 1} is a bool of value {value}, must be 0 or 1")
        return bool(value)

    def skip_array(self, what: str, depth: int = 1) -> Array:
        """Skip an array without decoding it, and check that it ends inside the file."""
        if depth > MAX_ARRAY_DEPTH:
            raise self.error(f"{what} nests arrays more than {MAX_ARRAY_DEPTH} deep at byte {self.pos}")
        element_type = self.value_type(f"the elements of {what}")
        if element_type == STRING:
            array = Array(STRING, self.count(f"strings in {what}", MIN_STRING_BYTES), self.pos)
            self._skip_strings(array.length, what)
        elif element_type == ARRAY:
            array = Array(ARRAY, self.count(f"arrays in {what}", MIN_ARRAY_BYTES), self.pos)
            for _ in range(array.length):
                self.skip_array(what, depth + 1)
        else:
            itemsize = _SCALARS[element_type].size
            array = Array(element_type, self.count(f"elements in {what}", itemsize), self.pos)
            self.take(array.length * itemsize, what)
            if element_type == BOOL and array.length:
                worst = int(np.frombuffer(self.data, np.uint8, array.length, array.offset).max())
                if worst > 1:
                    raise self.error(f"{what} has a bool of value {worst}, must be 0 or 1")
        return array

    def _skip_strings(self, count: int, what: str) -> None:
        # A vocabulary has 10^5 strings; a loop in Python would take most of the time of opening a file.
        index, pos = _core.skip_strings(np.frombuffer(self.data, np.uint8), self.pos, count)
        if index < count and self.size - pos < MIN_STRING_BYTES:
            raise self.error(f"truncated: string {index} of {count} in {what} at byte {pos}")
        if index < count:
            raise self.error(f"truncated: string {index} of {count} in {what} runs past the end of the file")
        self.pos = pos

    def decode_array(self, array: Array, what: str) -> npt.NDArray[Any] | list[Any]:
        self.pos = array.offset
        if array.element_type == STRING:
            return self._decode_strings(array.length, what)
        if array.element_type == ARRAY:
            rows = [self.skip_array(what) for _ in range(array.length)]
            return [self.decode_array(row, what) for row in rows]
        dtype = np.dtype("<" + VALUE_TYPES[array.element_type][1])
        values: npt.NDArray[Any] = np.frombuffer(self.data, dtype, array.length, array.offset)
        values = values.copy()  # aligned, and independent of the mapping
        values.flags.writeable = False
        return values

    def _decode_strings(self, count: int, what: str) -> list[str]:
        # `_skip_strings` has checked the lengths.
        data, pos, unpack = self.data, self.pos, _U64.unpack_from
        strings: list[str] = []
        for index in range(count):
            start = pos + 8
            pos = start + unpack(data, pos)[0]
            try:
                strings.append(str(data[start:pos], "utf-8"))
            except UnicodeDecodeError as error:
                raise self.error(
                    f"string {index} of {what} at byte {start} is not valid UTF-8: {error.reason}"
                ) from None
        return strings


class Metadata(Mapping[str, MetadataValue], Located):
    """Key-value pairs of a file. Arrays are decoded on first access and kept.

    That access raises `GGUFError` if a string in the array is not valid UTF-8.
    """

    def __init__(self, path: Path, data: memoryview) -> None:
        self.path = path
        # Not the view: without the GIL, threads must not slice the same one (CPython 3.14 counts slices
        # without a lock, and a wrong count releases the buffer).
        self._data: npt.NDArray[np.uint8] | None = np.frombuffer(data, np.uint8)
        self._values: dict[str, MetadataValue | Array] = {}
        self._types: dict[str, str] = {}

    def __getitem__(self, key: str) -> MetadataValue:
        value = self._values[key]
        if not isinstance(value, Array):
            return value
        data = self._data  # another thread may close the file now
        if data is None:
            raise ClosedError(f"{self.path} is closed; {key} must be read before it is closed")
        decoded = Cursor(self.path, data.data).decode_array(value, key)
        self._values[key] = decoded
        return decoded

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def typed(self, key: str, *types: str, default: Any = ...) -> Any:
        """Return a value of one of these types, which may be ``"integer"`` or ``"float"`` of any width.

        Raises `GGUFError` if it has another type, or is missing and there is no default.
        """
        if key not in self._values:
            if default is ...:
                raise self.error(f"metadata {key} is missing")
            return default
        stated = self._types[key]
        if not any(stated in _WIDTHS.get(kind, (kind,)) for kind in types):
            expected = " or ".join(_WORDS.get(kind, kind) for kind in types)
            raise self.error(f"{key} has type {stated}, expected {expected}")
        return self[key]

    def integer(self, key: str, least: int, most: int, default: Any = ...) -> Any:
        """Return an integer of any width in a range, or the default; errors are those of `typed`."""
        value = self.typed(key, "integer", default=default)
        if value is not None and not least <= value <= most:
            raise self.error(f"{key} is {value}, must be between {least} and {most}")
        return value

    def numbers(self, key: str, kind: str, length: int) -> npt.NDArray[Any]:
        """Return an array of numbers, one for each token."""
        values: npt.NDArray[Any] = self.typed(key, f"array[{kind}]")
        if len(values) != length:
            raise self.error(f"{key} has {len(values)} entries for {length} tokens")
        return values

    def flag(self, name: str, default: bool) -> bool:
        """Return a bool under ``tokenizer.ggml``."""
        return bool(self.typed(f"tokenizer.ggml.{name}", "bool", default=default))

    def token_id(self, name: str, vocab_size: int) -> int | None:
        """Return the id of a special token under ``tokenizer.ggml``; None if the file does not define it."""
        return self.integer(f"tokenizer.ggml.{name}_token_id", 0, vocab_size - 1, default=None)

    def token_ids(self, name: str, vocab_size: int) -> frozenset[int]:
        """Return token ids under ``tokenizer.ggml``; a missing array is empty."""
        key = f"tokenizer.ggml.{name}"
        ids = frozenset(map(int, self.typed(key, "array[integer]", default=())))
        for i in ids:
            if not 0 <= i < vocab_size:
                raise self.error(f"{key} contains {i}, must be token ids from 0 to {vocab_size - 1}")
        return ids

    def type_name(self, key: str) -> str:
        """Return the type declared for a value: ``"uint32"``, ``"string"``, ``"array[float32]"``, ..."""
        return self._types[key]

    def length(self, key: str) -> int:
        """Return the number of elements of an array, without decoding it."""
        value = self._values[key]
        if isinstance(value, Array):
            return value.length
        if isinstance(value, (list, np.ndarray)):
            return len(value)
        raise self.error(f"{key} has type {self._types[key]}, expected an array")

    def inner(self, prefix: str) -> Metadata:
        """Return the pairs whose keys have a prefix, without it."""
        found = copy.copy(self)
        for name in ("_values", "_types"):
            pairs = getattr(self, name).items()
            setattr(found, name, {k.removeprefix(prefix): v for k, v in pairs if k.startswith(prefix)})
        return found

    def read(self, cursor: Cursor, count: int) -> None:
        for index in range(count):
            start = cursor.pos
            key = cursor.name(f"key {index} of {count}", MAX_KEY_BYTES)
            if key in self._values:
                raise cursor.error(f"duplicate key {key} at byte {start}")
            value_type = cursor.value_type(key)
            value = cursor.value(value_type, key)
            type_name = VALUE_TYPES[value_type][0]
            if isinstance(value, Array):
                type_name = f"array[{VALUE_TYPES[value.element_type][0]}]"
            self._values[key], self._types[key] = value, type_name

    def close(self) -> None:
        """Release the mapping. Arrays that are not decoded yet become unavailable."""
        self._data = None
