"""Typed access to the metadata of a vocabulary.

Every function raises a `GGUFError` that names the key if the value has another type or is out of range.
"""

from typing import Any

import numpy.typing as npt

from metal_prefill.errors import GGUFError
from metal_prefill.files._gguf_file import GGUFFile


def numbers(gguf: GGUFFile, key: str, kind: str, length: int) -> npt.NDArray[Any]:
    """Read an array of numbers, one for each token."""
    values: npt.NDArray[Any] = gguf.metadata.typed(key, f"array[{kind}]")
    if len(values) != length:
        raise GGUFError(f"{gguf.path}: {key} has {len(values)} entries for {length} tokens")
    return values


def flag(gguf: GGUFFile, name: str, default: bool) -> bool:
    """Read a bool under ``tokenizer.ggml``."""
    return bool(gguf.metadata.typed(f"tokenizer.ggml.{name}", "bool", default=default))


def special_id(gguf: GGUFFile, name: str, vocab_size: int) -> int | None:
    """Read the id of a special token under ``tokenizer.ggml``; None if the file does not define it."""
    key = f"tokenizer.ggml.{name}_token_id"
    value: int | None = gguf.metadata.typed(key, "integer", default=None)
    if value is not None and not 0 <= value < vocab_size:
        raise GGUFError(f"{gguf.path}: {key} is {value}, must be a token id from 0 to {vocab_size - 1}")
    return value


def ids_under(gguf: GGUFFile, name: str, vocab_size: int) -> frozenset[int]:
    """Read an array of token ids under ``tokenizer.ggml``; a missing one is empty."""
    key = f"tokenizer.ggml.{name}"
    ids = frozenset(map(int, gguf.metadata.typed(key, "array[integer]", default=())))
    for i in ids:
        if not 0 <= i < vocab_size:
            raise GGUFError(f"{gguf.path}: {key} contains {i}, must be token ids from 0 to {vocab_size - 1}")
    return ids


def count(gguf: GGUFFile, name: str, default: int) -> int:
    """Read a number that is not negative under ``tokenizer.ggml``."""
    key = f"tokenizer.ggml.{name}"
    value: int = gguf.metadata.typed(key, "integer", default=default)
    if value < 0:
        raise GGUFError(f"{gguf.path}: {key} is {value}, must not be negative")
    return value
