"""Lengths after which sentence-transformers cuts texts, as a converted folder states them."""

from __future__ import annotations

from typing import NamedTuple

from metal_prefill.errors import GGUFError
from metal_prefill.files._gguf_file import GGUFFile
from metal_prefill.files._metadata_keys import LENGTH_KEYS, MAX_INT


class TextLengths(NamedTuple):
    """Maximum numbers of tokens of texts, including those at their ends; None where the context is the limit.

    Attributes
    ----------
    text : int or None
        Of a text that is neither a query nor a document.
    query, document : int or None
        Of a query and a document; by default `text`.
    """

    text: int | None = None
    query: int | None = None
    document: int | None = None

    @classmethod
    def read(cls, gguf: GGUFFile) -> TextLengths:
        """Read the lengths that a file states.

        Raises
        ------
        GGUFError
            A length is not a positive integer.
        """
        return cls(*(_length(gguf, f"{LENGTH_KEYS}{name}") for name in cls._fields))

    def longest(self, context: int) -> int:
        """Return the most tokens of any text in a context."""
        if self.text is None:
            return context
        return min(context, max(length for length in self if length is not None))


def _length(gguf: GGUFFile, key: str) -> int | None:
    if key not in gguf.metadata:
        return None
    value = gguf.metadata[key]
    if isinstance(value, bool) or not isinstance(value, int):
        raise GGUFError(f"{gguf.path}: {key} has type {gguf.metadata.type_name(key)}, expected an integer")
    if not 1 <= value <= MAX_INT:
        raise GGUFError(f"{gguf.path}: {key} is {value}, must be between 1 and {MAX_INT}")
    return value
