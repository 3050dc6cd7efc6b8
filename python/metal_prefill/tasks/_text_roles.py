"""Purpose of a text: how long it may be, and which tokens expand it.

Models for late interaction add tokens to queries (ColBERT, arXiv:2004.12832, section 3.2).
"""

from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from metal_prefill.engine import Engine
from metal_prefill.errors import GGUFError, UnsupportedModelError
from metal_prefill.files._metadata_keys import EXPANSION_KEYS, MAX_INT, SKIPPED_KEY
from metal_prefill.files._task_config import Pooling
from metal_prefill.tasks._prompts import DOCUMENT_NAMES
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


class TextRole(NamedTuple):
    """Limits of texts."""

    kind: Literal["text", "query", "document"]
    limit: int  # most tokens, with those that begin and end every text
    expansion: QueryExpansion | None = None  # how texts are expanded
    skipped: tuple[int, ...] = ()  # ids of tokens without vectors in late interaction
    framed: bool = True  # whether texts have the tokens that the file adds at their ends

    @property
    def plural(self) -> str:
        """Name of such texts in messages."""
        return "queries" if self.kind == "query" else f"{self.kind}s"


def role_of(engine: Engine, pooling: Pooling, instruction: str | None) -> TextRole:
    """Return the role of texts that are embedded with an instruction."""
    if instruction == "query":
        return query_role(engine, expanded=pooling == "none")
    if instruction in DOCUMENT_NAMES:
        return document_role(engine)
    return text_role(engine)


def text_role(engine: Engine) -> TextRole:
    """Return the role of texts that are neither queries nor documents."""
    return TextRole("text", _limit(engine, engine.lengths.text))


def query_role(engine: Engine, *, expanded: bool = True) -> TextRole:
    """Return the role of queries, expanded as in late interaction or not."""
    expansion = query_expansion(engine) if expanded else None
    if expansion is not None and expansion.fixed:
        return TextRole("query", _limit(engine, expansion.length), expansion)
    return TextRole("query", _limit(engine, engine.lengths.query, engine.lengths.text), expansion)


def document_role(engine: Engine) -> TextRole:
    """Return the role of documents."""
    limit = _limit(engine, engine.lengths.document, engine.lengths.text)
    return TextRole("document", limit, skipped=_skipped_tokens(engine))


def _skipped_tokens(engine: Engine) -> tuple[int, ...]:
    """Return the ids of tokens of documents that are not compared."""
    metadata = engine.gguf.metadata
    if SKIPPED_KEY not in metadata:
        return ()
    ids = metadata[SKIPPED_KEY]
    if not isinstance(ids, np.ndarray) or not np.issubdtype(ids.dtype, np.integer):
        kind = metadata.type_name(SKIPPED_KEY)
        raise GGUFError(f"{engine.path}: {SKIPPED_KEY} has type {kind}, expected an array of integers")
    return tuple(map(int, ids))


def _limit(engine: Engine, *lengths: int | None) -> int:
    """Return the first length that is known, at most the context."""
    return min(next((length for length in lengths if length), engine.max_context), engine.max_context)
