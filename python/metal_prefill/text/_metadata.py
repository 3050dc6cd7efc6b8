"""Typed access to the metadata of a vocabulary.

Every function raises a `GGUFError` that names the key if the value has another type or is out of range.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from metal_prefill.errors import GGUFError
from metal_prefill.files._gguf_file import GGUFFile


def _value(gguf: GGUFFile, key: str) -> Any:
    if key not in gguf.metadata:
        raise GGUFError(f"{gguf.path}: metadata {key} is missing")
    return gguf.metadata[key]


def string(gguf: GGUFFile, key: str) -> str:
    """Read a string."""
    value = _value(gguf, key)
    if not isinstance(value, str):
        raise GGUFError(f"{gguf.path}: {key} has type {gguf.metadata.type_name(key)}, expected string")
    return value


def strings(gguf: GGUFFile, key: str) -> list[str]:
    """Read an array of strings."""
    value = _value(gguf, key)
    if gguf.metadata.type_name(key) != "array[string]":
        raise GGUFError(f"{gguf.path}: {key} has type {gguf.metadata.type_name(key)}, expected array[string]")
    texts: list[str] = value
    return texts


def numbers(
    gguf: GGUFFile, key: str, kind: type[np.integer[Any]] | type[np.floating[Any]], length: int
) -> npt.NDArray[Any]:
    """Read an array of numbers, one for each token."""
    value = _value(gguf, key)
    if not isinstance(value, np.ndarray) or not np.issubdtype(value.dtype, kind):
        raise GGUFError(
            f"{gguf.path}: {key} has type {gguf.metadata.type_name(key)}, "
            f"expected an array of {kind.__name__} numbers"
        )
    if len(value) != length:
        raise GGUFError(f"{gguf.path}: {key} has {len(value)} entries for {length} tokens")
    return value


def boolean(gguf: GGUFFile, key: str) -> bool:
    """Read a bool that must be there."""
    value = _value(gguf, key)
    if not isinstance(value, bool):
        raise GGUFError(f"{gguf.path}: {key} has type {gguf.metadata.type_name(key)}, expected bool")
    return value


def integer(gguf: GGUFFile, key: str) -> int:
    """Read an integer that must be there."""
    value = _value(gguf, key)
    if isinstance(value, bool) or not isinstance(value, int):
        raise GGUFError(f"{gguf.path}: {key} has type {gguf.metadata.type_name(key)}, expected an integer")
    number: int = value
    return number


def flag(gguf: GGUFFile, name: str, default: bool) -> bool:
    """Read a bool under ``tokenizer.ggml``."""
    key = f"tokenizer.ggml.{name}"
    return boolean(gguf, key) if key in gguf.metadata else default


def special_id(gguf: GGUFFile, name: str, vocab_size: int) -> int | None:
    """Read the id of a special token under ``tokenizer.ggml``; None if the file does not define it."""
    key = f"tokenizer.ggml.{name}_token_id"
    if key not in gguf.metadata:
        return None
    value = integer(gguf, key)
    if not 0 <= value < vocab_size:
        raise GGUFError(f"{gguf.path}: {key} is {value}, must be a token id from 0 to {vocab_size - 1}")
    return value


def ids_under(gguf: GGUFFile, name: str, vocab_size: int) -> frozenset[int]:
    """Read an array of token ids under ``tokenizer.ggml``; a missing one is empty."""
    key = f"tokenizer.ggml.{name}"
    if key not in gguf.metadata:
        return frozenset()
    value = gguf.metadata[key]
    if not isinstance(value, np.ndarray) or not np.issubdtype(value.dtype, np.integer):
        raise GGUFError(f"{gguf.path}: {key} has type {gguf.metadata.type_name(key)}, expected token ids")
    for i in value:
        if not 0 <= i < vocab_size:
            raise GGUFError(f"{gguf.path}: {key} contains {i}, must be token ids from 0 to {vocab_size - 1}")
    return frozenset(map(int, value))


def count(gguf: GGUFFile, name: str, default: int) -> int:
    """Read a number that is not negative under ``tokenizer.ggml``."""
    key = f"tokenizer.ggml.{name}"
    value = integer(gguf, key) if key in gguf.metadata else default
    if value < 0:
        raise GGUFError(f"{gguf.path}: {key} is {value}, must not be negative")
    return value
