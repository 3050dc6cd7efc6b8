"""Purpose of a text: how long it may be, and whether tokens expand it."""

from typing import Literal, NamedTuple

import numpy as np

from metal_prefill.engine import Engine
from metal_prefill.errors import GGUFError
from metal_prefill.files._metadata_keys import SKIPPED_KEY
from metal_prefill.files._task_config import Pooling
from metal_prefill.tasks._prompts import DOCUMENT_NAMES
from metal_prefill.tasks._query_expansion import QueryExpansion, query_expansion


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
