"""Tokens that models for late interaction add to queries (ColBERT, arXiv:2004.12832, section 3.2)."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from metal_prefill._engine import Engine
from metal_prefill.errors import GGUFError, UnsupportedModelError
from metal_prefill.files._metadata_keys import EXPANSION_KEYS, MAX_INT


class QueryExpansion(NamedTuple):
    """How a model expands queries.

    Attributes
    ----------
    length : int
        Number of tokens of an expanded query.
    token : int
        Token that fills it.
    seen : bool
        Whether tokens attend to those of the expansion. Otherwise all tokens attend to the text alone.
    fixed : bool
        Whether `length` is also the limit of longer queries.
    """

    length: int
    token: int
    seen: bool
    fixed: bool

    def expand(self, ids: npt.NDArray[np.int32]) -> tuple[npt.NDArray[np.int32], int]:
        """Return the tokens of an expanded query, and how many were added."""
        added = max(self.length - len(ids), 0) if len(ids) else 0
        return (np.append(ids, np.full(added, self.token, np.int32)) if added else ids), added


def query_expansion(engine: Engine) -> QueryExpansion | None:
    """Return how a model expands queries; None if it does not.

    Raises
    ------
    GGUFError
        Metadata is missing, or has a wrong type or value.
    UnsupportedModelError
        Tokens of the expansion are not to be seen in a model whose attention is causal.
    """
    if f"{EXPANSION_KEYS}length" not in engine.gguf.metadata:
        return None
    found = QueryExpansion(
        _integer(engine, "length", 1, MAX_INT),
        _integer(engine, "token", 0, engine.config.vocab_size - 1),
        _flag(engine, "seen"),
        _flag(engine, "fixed"),
    )
    if engine.config.causal and not found.seen:
        raise UnsupportedModelError(
            f"{engine.path}: {EXPANSION_KEYS}seen is false, which is not supported if attention is causal"
        )
    return found


def _integer(engine: Engine, name: str, least: int, most: int) -> int:
    key, value = _value(engine, name)
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise _wrong_type(engine, key, "an integer")
    if not least <= value <= most:
        raise GGUFError(f"{engine.path}: {key} is {value}, must be between {least} and {most}")
    return int(value)


def _flag(engine: Engine, name: str) -> bool:
    key, value = _value(engine, name)
    if not isinstance(value, (bool, np.bool_)):
        raise _wrong_type(engine, key, "bool")
    return bool(value)


def _value(engine: Engine, name: str) -> tuple[str, Any]:
    key = f"{EXPANSION_KEYS}{name}"
    if key not in engine.gguf.metadata:
        raise GGUFError(f"{engine.path}: {key} is missing")
    return key, engine.gguf.metadata[key]


def _wrong_type(engine: Engine, key: str, expected: str) -> GGUFError:
    kind = engine.gguf.metadata.type_name(key)
    return GGUFError(f"{engine.path}: {key} has type {kind}, expected {expected}")
