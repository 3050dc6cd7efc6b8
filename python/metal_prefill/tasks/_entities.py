"""Entities of labels that a call names, with a model of GLiNER (arXiv:2311.08526)."""

from __future__ import annotations

import re
import warnings
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from metal_prefill._support.arguments import Progress, number
from metal_prefill.engine import Engine, EngineOwner
from metal_prefill.errors import ContextOverflowError
from metal_prefill.files._entity_head import DIRECTIONS, PROJECTION, EntityHead
from metal_prefill.files._gguf_file import FloatArray
from metal_prefill.files._task_config import PooledHead
from metal_prefill.tasks._embedding import (
    EncodedTexts,
    check_length,
    checked_texts,
    embed_encoded,
    encode_texts,
)
from metal_prefill.tasks._pooled_head import affine, sigmoid
from metal_prefill.tasks._prompts import PromptRules, errors_of, named
from metal_prefill.tasks._text_passes import Ids, TextPasses, finite, pooled_states, reported
from metal_prefill.tasks._token_labels import Entity

# Words and single signs, as in the library.
_WORD = re.compile(r"\w+(?:[-_]\w+)*|\S")
_KEPT_LABELS = 4096  # maximum number whose vectors are kept for later calls
_Places = npt.NDArray[np.int64]  # ``[parts, 3]``
_Probabilities = npt.NDArray[np.float64]  # ``[parts]``


class _Words(NamedTuple):
    """A text in words."""

    text: str
    ids: Ids  # token ids of labels and text, int32 ``[n]``
    places: list[tuple[int, int]]  # first character of each word, and the one after its last
    tokens: list[int]  # index in `ids` of the first token of each word


class _EntityTexts(NamedTuple):
    """Texts in words, after labels."""

    labels: list[str]  # without repetitions
    places: list[int]  # index of the token whose state represents each label, if texts follow labels
    read_labels: EncodedTexts | None  # the labels, if another encoder reads them
    texts: list[_Words]
    cut: list[int]  # indices of texts that lost their ends

    @property
    def with_labels(self) -> str:
        """Words for messages about the length of a text, which labels add to if it follows them."""
        return " with the labels" if self.places else ""


def find_entities(
    model: EngineOwner,
    texts: Iterable[str],
    labels: Iterable[str],
    *,
    threshold: float = 0.5,
    flat_ner: bool = True,
    multi_label: bool = False,
    truncate: Literal["error", "end"] | str = "error",
    progress: Progress | None = None,
) -> list[list[Entity]]:
    """Find parts of texts for labels in words, such as ``"person"``, with a model of GLiNER.

    Parameters
    ----------
    texts
        Any number of texts.
    labels
        Names of kinds of entities. Repetitions are ignored.
    threshold
        Probability that an entity exceeds.
    flat_ner
        True: entities do not overlap; the most probable ones are chosen first. False: one may be inside
        another one.
    multi_label
        Whether the same words may be entities of several labels.
    truncate
        ``"error"``: a text with more words than the model reads, or that does not fit the context, is an
        error. ``"end"``: its end is cut off, and a ``UserWarning`` names such texts. In the context, a text
        follows the labels, unless the model has an encoder of labels.
    progress
        Called with the number of texts done and their total.

    Returns
    -------
    list of list of Entity
        Entities of each text by position, with label, probability and position in characters.

    Raises
    ------
    TypeError, ValueError, ContextOverflowError
        A text or label is not a string, cannot be encoded or does not fit; the message has its index. Or
        there are no labels, one has no tokens, or the file is not a model of GLiNER.

    Examples
    --------
    >>> model.find_entities(["Ada Lovelace was born in London."], ["person", "city"])  # doctest: +SKIP
    [[Entity(label='person', ..., text='Ada Lovelace'), Entity(label='city', ..., text='London')]]
    """
    engine = model.engine
    threshold = number("threshold", threshold)
    if not 0 <= threshold <= 1:
        raise ValueError(f"threshold must be between 0 and 1, got {threshold}")
    for name, value in (("flat_ner", flat_ner), ("multi_label", multi_label)):
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be a bool, got {type(value).__name__}")
    encoded = _encoded(engine, texts, labels, PromptRules(truncate).checked())
    if encoded.cut:
        warnings.warn(
            f"{len(encoded.cut)} of {len(encoded.texts)} texts exceeded {_head_of(engine).most_words} words, "
            f"or{encoded.with_labels} the context of {engine.max_context} tokens, and lost their ends: "
            f"{named(encoded.cut, 'text')}",
            stacklevel=2,
        )
    candidates = _candidates(TextPasses(engine), encoded, threshold)
    return [
        _entities(encoded.labels, *parts, flat_ner, multi_label)
        for parts in reported(candidates, len(encoded.texts), progress)
    ]


def _head_of(engine: Engine) -> EntityHead:
    """Return the head that finds entities; raises ValueError if the file has none."""
    if engine.head.entities is None:
        hint = ": use `label_tokens`" if engine.head.labels and engine.head.pooling in (None, "none") else ""
        raise ValueError(
            f"{engine.name} does not find entities of given labels: it has no head of GLiNER{hint}"
        )
    return engine.head.entities


def _encoded(engine: Engine, texts: Iterable[str], labels: Iterable[str], rules: PromptRules) -> _EntityTexts:
    """Return texts in tokens, after those of the labels; errors are those of `find_entities`."""
    head, tokenizer = _head_of(engine), engine.tokenizer
    names = list(dict.fromkeys(checked_texts(labels, "label")))
    if not names:
        raise ValueError("labels must name at least one kind of entity")
    prompt = list(tokenizer.frame.begin)
    ids_of_labels = list((engine.label_encoder or engine).tokenizer.encode_all(names))
    for name, ids in zip(names, ids_of_labels, strict=True):
        if not ids:
            raise ValueError(f"label {name!r} has no tokens")
    reader = engine.label_encoder
    read_labels = None if reader is None else encode_texts(reader, names, noun="label")
    encoded = _EntityTexts(names, [], read_labels, [], [])
    if head.label_tokens is not None:
        before, separator = head.label_tokens
        for ids in ids_of_labels:
            encoded.places.append(len(prompt) + head.reads_names)
            prompt += [before, *ids]
        prompt.append(separator)
    end = tokenizer.frame.end
    check_length(engine, len(prompt) + len(end) + 1, f"the {len(names)} labels and a word")
    known: dict[str, list[int]] = {}
    for i, text in enumerate(checked_texts(texts)):
        matches = list(_WORD.finditer(text))
        new = [word for word in dict.fromkeys(match.group() for match in matches) if word not in known]
        with errors_of(f"text {i}"):
            known.update(zip(new, tokenizer.encode_all(new), strict=True))
        # Words of characters that the tokenizer removes have no tokens.
        words = [(known[match.group()], match.span()) for match in matches if known[match.group()]]
        starts = list(accumulate((len(tokens) for tokens, _ in words), initial=len(prompt)))
        if rules.truncate == "end":
            fitting = bisect_right(starts, engine.max_context - len(end)) - 1
            if len(words) > (kept := min(fitting, head.most_words)):
                encoded.cut.append(i)
                words = words[:kept]
        if len(words) > head.most_words:
            raise ContextOverflowError(
                f"text {i}: {len(words)} words exceed the {head.most_words} that the model reads"
            )
        whole = np.array([*prompt, *chain.from_iterable(tokens for tokens, _ in words), *end], np.int32)
        check_length(engine, len(whole), f"text {i}{encoded.with_labels}")
        encoded.texts.append(_Words(text, whole, [place for _, place in words], starts[: len(words)]))
    return encoded


def _candidates(
    passes: TextPasses, encoded: _EntityTexts, threshold: float
) -> Iterator[tuple[_Words, _Places, _Probabilities]]:
    """Yield each text with first word, last word and label of each part that may be an entity."""
    # A text without words has no entities, and may have no tokens to compute.
    filled = [i for i, item in enumerate(encoded.texts) if item.places]
    prompts = [encoded.texts[i].ids for i in filled]
    states = pooled_states(passes, "none", prompts, name_of=lambda i: f"text {filled[i]}")
    pooled, head = passes.engine.head, _head_of(passes.engine)
    separate = _label_vectors(passes.engine, encoded)
    for item in encoded.texts:
        if not item.places:
            yield item, np.empty((0, 3), np.int64), np.empty(0)
            continue
        made = next(states)[[*encoded.places, *item.tokens]]
        made = affine(pooled, PROJECTION, made) if head.projected else made
        labels, words = np.split(made, [len(encoded.places)])
        labels = labels if separate is None else separate
        if head.mode == "spans":
            yield item, *_spans(span_scores(pooled, head, words, labels), threshold)
        else:
            yield item, *_runs(word_scores(pooled, head, words, labels), threshold)


def _label_vectors(engine: Engine, encoded: _EntityTexts) -> FloatArray | None:
    """Return the vectors of labels by a separate encoder; None if the file has none."""
    encoder, labels = engine.label_encoder, encoded.read_labels
    if encoder is None or labels is None:
        return None
    known = engine.label_vectors
    new = [i for i, label in enumerate(encoded.labels) if label not in known]
    made = embed_encoded(TextPasses(encoder), labels.part(new), normalize=False)
    vectors = known | dict(zip((encoded.labels[i] for i in new), made, strict=True))
    engine.label_vectors = vectors if len(vectors) <= _KEPT_LABELS else {}
    return np.stack([vectors[label] for label in encoded.labels])


def _spans(scores: FloatArray, threshold: float) -> tuple[_Places, _Probabilities]:
    """Return the parts of a text whose probability exceeds the threshold."""
    probabilities = sigmoid(scores.astype(np.float64))
    places = np.argwhere((probabilities > threshold) & (scores > -np.inf))
    chosen = probabilities[tuple(places.T)]
    places[:, 1] += places[:, 0]
    return places, chosen


def _runs(scores: FloatArray, threshold: float) -> tuple[_Places, _Probabilities]:
    """Return parts whose first, last and other words have probabilities of at least the threshold.

    The probability of a part is the least of these.
    """
    first, last, inside = np.moveaxis(sigmoid(scores.astype(np.float64)), 2, 0)
    places, chosen = [np.empty((0, 3), np.int64)], [np.empty(0)]
    for start, label in np.argwhere(first > threshold):
        least = np.minimum.accumulate(inside[start:, label])
        ends = np.flatnonzero((least >= threshold) & (last[start:, label] > threshold))
        places.append(np.stack([np.full_like(ends, start), start + ends, np.full_like(ends, label)], axis=1))
        chosen.append(np.minimum(np.minimum(least[ends], last[start + ends, label]), first[start, label]))
    return np.concatenate(places), np.concatenate(chosen)


def _entities(
    labels: Sequence[str],
    item: _Words,
    places: _Places,
    probabilities: _Probabilities,
    flat_ner: bool,
    multi_label: bool,
) -> list[Entity]:
    """Choose entities by their probability, without those that overlap earlier ones."""
    verdicts: dict[tuple[int, int], bool] = {}
    taken = np.zeros(len(item.places), np.bool_)
    ends = np.empty((0, 2), np.int64)
    chosen: list[tuple[int, Entity]] = []
    for i in np.argsort(-probabilities, kind="stable").tolist():
        first, last, label = places[i].tolist()
        known = verdicts.get((first, last))
        if known is None:
            free = not taken[first : last + 1].any()
            if not (free or flat_ner):  # inside another one, or around some
                disjoint = (ends[:, 0] > last) | (ends[:, 1] < first)
                inside = (ends[:, 0] <= first) & (ends[:, 1] >= last)
                around = (ends[:, 0] >= first) & (ends[:, 1] <= last)
                free = bool((disjoint | inside | around).all())
            known = verdicts[first, last] = free
            if free:
                taken[first : last + 1] = True
                ends = np.append(ends, [[first, last]], axis=0)
        elif not multi_label:
            continue
        if known:
            start, end = item.places[first][0], item.places[last][1]
            name, score = labels[label], float(probabilities[i])
            chosen.append((first, Entity(name, score, start, end, item.text[start:end])))
    return [entity for _, entity in sorted(chosen, key=lambda pair: pair[0])]


def span_scores(head: PooledHead, entities: EntityHead, words: FloatArray, labels: FloatArray) -> FloatArray:
    """Return the score of each part of a text for each label, ``[words, span_words, labels]``.

    Element ``[i, n]`` is for the ``n + 1`` words from word ``i``; it is ``-inf`` if the text has fewer.
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
