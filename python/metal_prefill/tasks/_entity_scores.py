"""Scores of labels for parts of a text, by the head of GLiNER (arXiv:2311.08526, section 2.2).

NumPy computes each text separately, in float32. Two linear layers without an activation between them are
combined where that saves products: the last layer of a part's vector is applied to the labels, of which there
are few.
"""

import numpy as np
import numpy.typing as npt

from metal_prefill.files._entity_head import DIRECTIONS, PROJECTION, EntityHead
from metal_prefill.files._gguf_file import FloatArray
from metal_prefill.files._task_config import PooledHead
from metal_prefill.tasks._pooled_head import affine
from metal_prefill.tasks._text_passes import finite


def projected(head: PooledHead, states: FloatArray) -> FloatArray:
    """Return the states of tokens with the width of the head."""
    entities = head.entities
    return affine(head, PROJECTION, states) if entities is not None and entities.projected else states


def span_scores(head: PooledHead, entities: EntityHead, words: FloatArray, labels: FloatArray) -> FloatArray:
    """Return the score of each part of a text for each label, ``[words, span_words, labels]``.

    Element ``[i, n]`` is of the ``n + 1`` words from word ``i``; it is ``-inf`` where the text has fewer.
    """
    count, width = len(words), entities.width
    words = _recurrent(head, words) if entities.recurrent else words
    weight, bias = (head.matrix(f"entities.span.0.{end}") for end in ("weight", "bias"))
    # Products of the first and the last word of each part, whose sum is the layer's output.
    first = np.maximum(_twice(head, "entities.start", words), 0) @ weight[:, :width].T
    last = np.maximum(_twice(head, "entities.end", words), 0) @ weight[:, width:].T + bias
    weight, bias = (head.matrix(f"entities.span.1.{end}") for end in ("weight", "bias"))
    wanted = _twice(head, "entities.label", labels)
    factors, offset = (wanted @ weight).T, wanted @ bias
    scores = np.full((count, min(entities.span_words, count), len(labels)), -np.inf, np.float32)
    for n in range(scores.shape[1]):
        made = np.maximum(first[: count - n] + last[n:], 0) @ factors + offset
        scores[: count - n, n] = finite(made, "a score of words")
    return scores


def word_scores(head: PooledHead, entities: EntityHead, words: FloatArray, labels: FloatArray) -> FloatArray:
    """Return the scores of each word as the first, the last and any word of a label's entity.

    The shape is ``[words, labels, 3]``.
    """
    width = entities.width
    words = _recurrent(head, words) if entities.recurrent else words
    words, labels = affine(head, "entities.word", words), affine(head, "entities.label", labels)
    weight, bias = (head.matrix(f"entities.score.0.{end}") for end in ("weight", "bias"))
    of_words, of_labels, of_both = (weight[:, i * width : (i + 1) * width].T for i in range(3))
    first = words[:, :width] @ of_words + bias
    scores = np.empty((len(words), len(labels), 3), np.float32)
    for i, label in enumerate(labels):
        inner = first + label[:width] @ of_labels + (words[:, width:] * label[width:]) @ of_both
        scores[:, i] = affine(head, "entities.score.1", np.maximum(inner, 0))
    return finite(scores, "a score of words")


def _twice(head: PooledHead, name: str, x: FloatArray) -> FloatArray:
    """Apply two layers with a ReLU between them."""
    return affine(head, f"{name}.1", np.maximum(affine(head, f"{name}.0", x), 0))


def _recurrent(head: PooledHead, words: FloatArray) -> FloatArray:
    """Apply an LSTM in both directions (https://doi.org/10.1162/neco.1997.9.8.1735).

    ``sigmoid(x)`` is computed as ``tanh(x / 2) / 2 + 1 / 2``, with one call for the four gates of both
    directions.
    """
    count, half = len(words), words.shape[1] // 2
    weights = head.derived("entities.gates", lambda: _gates(head, half))
    inputs = np.empty((count, 2, 4 * half), np.float32)
    for i, direction in enumerate(DIRECTIONS):
        given = affine(head, f"entities.{direction}.input", words)
        given += head.matrix(f"entities.{direction}.state.bias")
        inputs[:, i] = given[:: -1 if i else 1, _order(half)]
    inputs[..., : 3 * half] *= 0.5
    states = np.empty((count, 2, half), np.float32)
    cell, state = np.zeros((2, half), np.float32), np.zeros((2, 1, half), np.float32)
    for i in range(count):
        gates = np.matmul(state, weights)[:, 0]
        gates += inputs[i]
        np.tanh(gates, out=gates)
        sigmoids = gates[:, : 3 * half]
        sigmoids *= 0.5
        sigmoids += 0.5
        cell *= sigmoids[:, half : 2 * half]
        cell += sigmoids[:, :half] * gates[:, 3 * half :]
        np.multiply(sigmoids[:, 2 * half :], np.tanh(cell), out=states[i])
        state = states[i][:, None]
    return np.concatenate([states[:, 0], states[::-1, 1]], axis=1)


def _gates(head: PooledHead, half: int) -> FloatArray:
    """Return the weights of the state, ``[directions, half, 4 * half]``, for gates in `_order`."""
    weights = np.stack(
        [head.matrix(f"entities.{direction}.state.weight")[_order(half)].T for direction in DIRECTIONS]
    )
    weights[..., : 3 * half] *= 0.5
    return np.ascontiguousarray(weights)


def _order(half: int) -> npt.NDArray[np.int64]:
    """Return the place in a file of each value of the gates: input, forget, output, cell."""
    parts = [(0, 2), (3, 4), (2, 3)]
    return np.concatenate([np.arange(first * half, last * half) for first, last in parts])
