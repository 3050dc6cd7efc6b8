"""Typed access to the JSON files of a model folder.

Every getter raises a `GGUFError` that names the file and the field if the value is missing and has no
default, has another type, or is out of range.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from metal_prefill._support.messages import shortened
from metal_prefill.errors import GGUFError, UnsupportedModelError
from metal_prefill.files._metadata_keys import MAX_INT
from metal_prefill.files._other_formats import RECOGNIZED_BYTES, in_place_of_file

MAX_TEXT = 256 << 20  # bytes of a file of text; the largest tokenizers have about 35 MB
MAX_FLOAT = float(np.finfo(np.float32).max)
MAX_FILE_NAME = 255  # bytes; common file systems have no longer names
MAX_LAYERS = 4096  # published models have up to 126
_REQUIRED: Any = object()
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def read_text(path: Path) -> str:
    """Read a file of UTF-8 text, or raise a `GGUFError` that names it."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(size + 1) if size <= MAX_TEXT else b""
    if max(size, len(content)) > MAX_TEXT:
        raise GGUFError(f"{path}: has more than {MAX_TEXT} bytes")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise GGUFError(f"{path}: is not valid UTF-8 at byte {error.start}") from None


def read_json(path: Path) -> Any:
    """Read a file of JSON, or raise a `GGUFError` that names it."""
    text = read_text(path)
    try:
        values = json.loads(text)
        if _SURROGATE.search(text.encode()):  # halves of characters, which no file may contain alone
            json.dumps(values, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        found = in_place_of_file(text[:RECOGNIZED_BYTES].encode())
        kind = f"JSON, but {found}" if found else f"valid JSON: {error}"
        raise GGUFError(shortened(f"{path}: is not {kind}")) from None
    return values


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number in float32."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= MAX_FLOAT


class Fields:
    """An object in a JSON file."""

    def __init__(self, path: Path, values: dict[str, Any], inside: str = "") -> None:
        self.path = path
        self.values = values  # contents of the object
        self._inside = inside

    @classmethod
    def read(cls, path: Path) -> Fields:
        """Read a file that contains one object."""
        if not path.is_file():
            raise GGUFError(f"{path}: is missing")
        values = read_json(path)
        if not isinstance(values, dict):
            raise GGUFError(f"{path}: contains a {type(values).__name__}, expected an object")
        return cls(path, values)

    @classmethod
    def read_if_present(cls, path: Path) -> Fields:
        """Read a file, or return an object without fields if there is no such file."""
        return cls.read(path) if path.is_file() else cls(path, {})

    def error(self, message: str) -> GGUFError:
        """Return, without raising it, an error whose message starts with the path."""
        return GGUFError(shortened(f"{self.path}: {message}"))

    def unsupported(self, message: str) -> UnsupportedModelError:
        """Return, without raising it, an error whose message starts with the path."""
        return UnsupportedModelError(shortened(f"{self.path}: {message}"))

    def name(self, key: str) -> str:
        return f"{self._inside}.{key}" if self._inside else key

    def has(self, key: str) -> bool:
        """Return whether a field is present and not null."""
        return self.values.get(key) is not None

    def integer(self, *keys: str, default: int = _REQUIRED, least: int = 1, most: int = MAX_INT) -> int:
        """Read an integer under the first of several names that is present."""
        value = self._value(keys, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong_type(keys, value, "an integer")
        if not least <= value <= most:
            raise self.error(f"{self._names(keys)} is {value}, must be between {least} and {most}")
        return int(value)

    def layers(self) -> int:
        """Read the number of layers, for each of which lists are made before the tensors are known."""
        return self.integer("num_hidden_layers", "n_layer", most=MAX_LAYERS)

    def number(self, *keys: str, default: float = _REQUIRED) -> float:
        """Read a positive finite number under the first of several names that is present."""
        value = self._value(keys, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._wrong_type(keys, value, "a number")
        if not 0 < value <= MAX_FLOAT:
            raise self.error(f"{self._names(keys)} is {value}, must be positive and at most {MAX_FLOAT:.6g}")
        return float(value)

    def string(self, *keys: str, default: str = _REQUIRED) -> str:
        """Read a string under the first of several names that is present."""
        value = self._value(keys, default)
        if not isinstance(value, str):
            raise self._wrong_type(keys, value, "a string")
        return value

    def boolean(self, *keys: str, default: bool = _REQUIRED) -> bool:
        """Read a bool under the first of several names that is present."""
        value = self._value(keys, default)
        if not isinstance(value, bool):
            raise self._wrong_type(keys, value, "true or false")
        return value

    def sequence(self, key: str) -> list[Any]:
        """Read an array; a missing one is empty."""
        value = self._value((key,), [])
        if not isinstance(value, list):
            raise self._wrong_type((key,), value, "an array")
        return value

    def object(self, key: str) -> Fields:
        """Read an object; a missing one has no fields."""
        return self.as_object(key, self._value((key,), {}))

    def objects(self, key: str) -> list[Fields]:
        """Read an array of objects; a missing one is empty."""
        return [self.as_object(f"{key}[{i}]", value) for i, value in enumerate(self.sequence(key))]

    def as_object(self, name: str, value: Any) -> Fields:
        if not isinstance(value, dict):
            raise self._wrong_type((name,), value, "an object")
        return Fields(self.path, value, self.name(name))

    def require(self, key: str, accepted: Sequence[Any], default: Any) -> None:
        """Raise an UnsupportedModelError unless a field has one of the accepted values."""
        value = self.values.get(key)
        value = default if value is None else value
        if value not in accepted:
            known = ", ".join(map(repr, accepted))
            raise self.unsupported(f"{self.name(key)} is {value!r}; supported: {known}")

    def _value(self, keys: Sequence[str], default: Any) -> Any:
        for key in keys:
            if self.has(key):
                return self.values[key]
        if default is _REQUIRED:
            raise self.error(f"{self._names(keys)} is missing")
        return default

    def _names(self, keys: Sequence[str]) -> str:
        present = next((key for key in keys if self.has(key)), keys[0])
        return self.name(present)

    def _wrong_type(self, keys: Sequence[str], value: Any, expected: str) -> GGUFError:
        return self.error(f"{self._names(keys)} is {type(value).__name__}, expected {expected}")
