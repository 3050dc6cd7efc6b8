"""Tokens that models for late interaction add to queries (ColBERT, arXiv:2004.12832, section 3.2)."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from metal_prefill.engine import Engine
from metal_prefill.errors import GGUFError, UnsupportedModelError
from metal_prefill.files._metadata_keys import EXPANSION_KEYS, MAX_INT
from metal_prefill.text._metadata import boolean, integer


class QueryExpansion(NamedTuple):
    """How a model expands queries."""

    length: int  # number of tokens of an expanded query
    token: int  # token that fills it
    # Whether tokens attend to those of the expansion. Otherwise all tokens attend to the text alone.
    seen: bool
    fixed: bool  # whether `length` is also the limit of longer queries

    def added(self, tokens: int) -> int:
        """Return how many tokens are added to a query of `tokens`."""
        return max(self.length - tokens, 0) if tokens else 0

    def expand(self, ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Return the tokens of an expanded query."""
        added = self.added(len(ids))
        return np.append(ids, np.full(added, self.token, np.int32)) if added else ids


def query_expansion(engine: Engine) -> QueryExpansion | None:
    """Return how a model expands queries; None if it does not."""
    if f"{EXPANSION_KEYS}length" not in engine.gguf.metadata:
        return None
    found = QueryExpansion(
        _integer(engine, "length", 1, MAX_INT),
        _integer(engine, "token", 0, engine.config.vocab_size - 1),
        boolean(engine.gguf, f"{EXPANSION_KEYS}seen"),
        boolean(engine.gguf, f"{EXPANSION_KEYS}fixed"),
    )
    if engine.config.causal and not found.seen:
        raise UnsupportedModelError(
            f"{engine.path}: {EXPANSION_KEYS}seen is false, which is not supported if attention is causal"
        )
    return found


def _integer(engine: Engine, name: str, least: int, most: int) -> int:
    key = f"{EXPANSION_KEYS}{name}"
    value = integer(engine.gguf, key)
    if not least <= value <= most:
        raise GGUFError(f"{engine.path}: {key} is {value}, must be between {least} and {most}")
    return value
