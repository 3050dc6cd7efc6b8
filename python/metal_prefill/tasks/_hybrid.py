"""Vectors of three kinds from one pass: of texts, over the vocabulary, and of tokens (arXiv:2402.03216)."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from metal_prefill import _core
from metal_prefill._support.arguments import Progress
from metal_prefill.engine import EngineOwner
from metal_prefill.tasks._embedding import check_pooling, encode_texts, vector_width
from metal_prefill.tasks._pooled_head import embedding_of, token_vectors
from metal_prefill.tasks._prompts import PromptRules, warn_of_cut
from metal_prefill.tasks._sparse import SparseVector, token_weights
from metal_prefill.tasks._text_passes import TextPasses, pooled, pooled_states


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
        raise ValueError(f"{engine.name} lacks the heads for weights and vectors of tokens: use embed")
    pooling = check_pooling(engine, None)
    rules = PromptRules(truncate, split_special_tokens=split_special_tokens).checked()
    encoded = encode_texts(engine, texts, rules=rules)
    warn_of_cut(encoded.cut, len(encoded.prompts), engine.max_context, "text")
    names = [f"text {i}" for i in range(len(encoded.prompts))]
    found = HybridVectors(np.empty((len(names), vector_width(engine, pooling, None)), np.float32), [], [])
    for states in pooled_states(TextPasses(engine), "none", encoded.prompts, names):
        i = len(found.tokens)
        vector = embedding_of(head, pooled(states, pooling))
        found.dense[i] = vector[: found.dense.shape[1]]
        found.sparse.append(token_weights(engine, encoded.prompts[i], states, None))
        found.tokens.append(np.ascontiguousarray(token_vectors(head, states[1:])))
        _core.normalize(found.tokens[-1])
        if progress is not None:
            progress(i + 1, len(names))
    _core.normalize(found.dense)
    return found
