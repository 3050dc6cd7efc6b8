"""Vectors over the vocabulary (SPLADE, arXiv:2109.10086), and three kinds at once (arXiv:2402.03216)."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from metal_prefill import _core
from metal_prefill._support.arguments import Progress, integer, one_of
from metal_prefill.engine import Engine, EngineOwner
from metal_prefill.files._task_config import QUERY_WEIGHTS, TOKEN_VECTORS, TOKEN_WEIGHTS
from metal_prefill.tasks._embedding import check_pooling, encode_texts, vector_width
from metal_prefill.tasks._pooled_head import affine, embedding_of, vocabulary_vector
from metal_prefill.tasks._prompts import PromptRules, TextRole, cut_notes, text_role, warn
from metal_prefill.tasks._text_passes import Ids, TextPasses, finite, pooled, pooled_states, reported


@dataclass(frozen=True)
class SparseVector:
    """The positive values of a vector over the vocabulary.

    Attributes
    ----------
    ids : int32 [n]
        Token ids, ascending.
    weights : float32 [n]
        Their values.
    """

    ids: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]


def embed_sparse(
    model: EngineOwner,
    texts: Iterable[str],
    *,
    instruction: Literal["query", "document"] | None = None,
    max_active: int | None = None,
    truncate: Literal["error", "end"] | str = "error",
    split_special_tokens: bool | None = None,
    progress: Progress | None = None,
) -> list[SparseVector]:
    """Compute a vector over the vocabulary for each text, with a SPLADE model or bge-m3.

    The similarity of two vectors is the sum of the products of the weights that they share.

    Parameters
    ----------
    texts
        Any number of texts.
    instruction
        ``"query"`` looks up the weights of a query's tokens, without a forward pass, in models that have such
        weights. Other models compute queries as documents.
    max_active
        Number of largest values of each vector to keep; None keeps all that are positive.
    truncate, split_special_tokens
        See :meth:`Model.embed`.
    progress
        Called with the number of texts done and their total.

    Returns
    -------
    list of SparseVector

    Raises
    ------
    TypeError, ValueError, ContextOverflowError
        A text is not a string or does not fit; the message has its index. Or the model has no head for
        vectors over the vocabulary.
    """
    engine = model.engine
    check_sparse(engine)
    most = None if max_active is None else integer("max_active", max_active, 1)
    rules = PromptRules(truncate, split_special_tokens=split_special_tokens).checked()
    one_of("instruction", str(instruction), ("query", "document", "None"))
    role = sparse_role(engine, instruction)
    encoded = encode_texts(engine, texts, role, rules)
    warn(cut_notes(encoded.cut, len(encoded.prompts), role.limit))
    vectors = sparse_vectors(engine, encoded.prompts, role, most)
    return list(reported(vectors, len(encoded.prompts), progress))


def check_sparse(engine: Engine) -> None:
    """Raise ValueError if a model has no head for vectors over the vocabulary."""
    if engine.head.vocabulary_pooling is None and not engine.head.weighs_tokens:
        raise ValueError(f"{engine.name} has no head for vectors over the vocabulary: use `embed`")


def sparse_role(engine: Engine, instruction: str | None) -> TextRole:
    """Return the role of texts; queries without a forward pass have no tokens at their ends."""
    looked_up = instruction == "query" and QUERY_WEIGHTS in engine.gguf.tensors
    return text_role(engine)._replace(framed=not looked_up)


def token_weights(
    engine: Engine, ids: Ids, states: npt.NDArray[np.float32], most: int | None
) -> SparseVector:
    """Return the largest weight of each distinct token of a text that is not a special one."""
    weights = finite(affine(engine.head, TOKEN_WEIGHTS, states)[:, 0], "a weight of a token")
    present, places = np.unique(ids, return_inverse=True)
    largest = np.zeros(len(present), np.float32)
    np.maximum.at(largest, places, weights)
    tokenizer = engine.tokenizer
    left_out = (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.unk_id)
    largest[np.isin(present, [i for i in left_out if i is not None])] = 0
    return _largest(present, largest, most)


def _largest(ids: Ids, weights: npt.NDArray[np.float32], most: int | None) -> SparseVector:
    """Return the positive weights, only the `most` largest unless it is None."""
    kept = np.flatnonzero(weights > 0)
    if most is not None:
        kept = np.sort(kept[np.argsort(-weights[kept], kind="stable")[:most]])
    return SparseVector(ids[kept].astype(np.int32), weights[kept])


def sparse_vectors(
    engine: Engine, prompts: Sequence[Ids], role: TextRole, most: int | None
) -> Iterator[SparseVector]:
    """Yield the vector of each text, with at most `most` values; None keeps all that are positive."""
    if not role.framed:
        for ids in map(np.unique, prompts):
            yield _largest(ids, engine.head.matrix(QUERY_WEIGHTS)[ids], most)
        return
    for ids, states in zip(prompts, pooled_states(TextPasses(engine), "none", prompts), strict=True):
        if engine.head.weighs_tokens:
            yield token_weights(engine, ids, states, most)
            continue
        vector = vocabulary_vector(engine.head, states)
        yield _largest(np.arange(len(vector), dtype=np.int32), vector, most)


@dataclass(frozen=True)
class HybridVectors:
    """Vectors of texts.

    Attributes
    ----------
    dense : float32 [texts, dim]
        A vector of length 1 for each text, as :meth:`metal_prefill.Model.embed` computes it.
    sparse : list of SparseVector
        Weights of the tokens of each text, as :meth:`metal_prefill.Model.embed_sparse` computes them.
    tokens : list of float32 [tokens, dim]
        Vectors of length 1 of the tokens of each text but the first, compared by
        :func:`metal_prefill.tasks.maxsim`.
    """

    dense: npt.NDArray[np.float32]
    sparse: list[SparseVector]
    tokens: list[npt.NDArray[np.float32]]


def embed_hybrid(
    model: EngineOwner,
    texts: Iterable[str],
    *,
    truncate: Literal["error", "end"] | str = "error",
    split_special_tokens: bool | None = None,
    progress: Progress | None = None,
) -> HybridVectors:
    """Compute the three kinds of vectors of bge-m3 in one pass.

    Parameters
    ----------
    texts
        Any number of texts.
    truncate, split_special_tokens
        See :meth:`Model.embed`.
    progress
        Called with the number of texts done and their total.

    Returns
    -------
    HybridVectors

    Raises
    ------
    TypeError, ValueError, ContextOverflowError
        A text is not a string or does not fit; the message has its index. Or the model lacks a head of the
        three.
    """
    engine = model.engine
    head = engine.head
    if not (head.weighs_tokens and head.projects_tokens):
        raise ValueError(f"{engine.name} lacks the heads for weights and vectors of tokens: use `embed`")
    pooling = check_pooling(engine, None)
    rules = PromptRules(truncate, split_special_tokens=split_special_tokens).checked()
    encoded = encode_texts(engine, texts, rules=rules)
    warn(cut_notes(encoded.cut, len(encoded.prompts), engine.max_context))
    count = len(encoded.prompts)
    found = HybridVectors(np.empty((count, vector_width(engine, pooling, None)), np.float32), [], [])
    all_states = pooled_states(TextPasses(engine), "none", encoded.prompts)
    for states in reported(all_states, count, progress):
        i = len(found.tokens)
        vector = embedding_of(head, pooled(states, pooling))
        found.dense[i] = vector[: found.dense.shape[1]]
        found.sparse.append(token_weights(engine, encoded.prompts[i], states, None))
        vectors = finite(affine(head, TOKEN_VECTORS, states[1:]), "a number of a token's vector")
        found.tokens.append(np.ascontiguousarray(vectors))
        _core.normalize(found.tokens[-1])
    _core.normalize(found.dense)
    return found
