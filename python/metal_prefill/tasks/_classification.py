"""Labels of texts, by a classification head or by the probability of each label after the text."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Literal

import numpy as np
import numpy.typing as npt

from metal_prefill._support.arguments import items_of
from metal_prefill.engine import Engine, EngineOwner
from metal_prefill.tasks._embedding import check_length, checked_texts, encode_tokens
from metal_prefill.tasks._pairs import EncodedPair, encode_continuation, encode_pair, score_continuations
from metal_prefill.tasks._pooled_head import logits_of, probabilities_of, softmax
from metal_prefill.tasks._prompts import PromptRules, cut_notes, errors_of, shortened, text_role, warn
from metal_prefill.tasks._text_passes import Ids, TextPasses, pooled_states

TextOrPair = str | tuple[str, str]

TEMPLATE = "{text}\n\nLabel: {label}"
CONTENT_FREE = ("N/A", "[MASK]", "")  # of arXiv:2102.09690


@dataclass(frozen=True)
class Classification:
    """The labels of texts.

    Attributes
    ----------
    labels : tuple of str
    probabilities : float32 [texts, labels]
        They add up to 1 over the labels, unless a classification head has independent labels.
    log_likelihoods : float64 [texts, labels]
        Sum of the log probabilities of each label's tokens, in nats; for a classification head, its logits.
    lengths : int64 [texts, labels]
        Number of tokens of each label; 1 for a classification head.
    """

    labels: tuple[str, ...]
    probabilities: npt.NDArray[np.float32]
    log_likelihoods: npt.NDArray[np.float64]
    lengths: npt.NDArray[np.int64]

    @property
    def best(self) -> list[str]:
        """The most probable label of each text; the first of equally probable ones."""
        return [self.labels[i] for i in self.probabilities.argmax(axis=1)]


def classify(
    model: EngineOwner,
    texts: Iterable[TextOrPair],
    labels: Sequence[str] | None = None,
    template: str | None = None,
    *,
    normalize_length: bool = True,
    calibrate: bool = False,
    truncate: Literal["error", "end"] | str = "error",
    unicode: Literal["NFC"] | None = None,
    split_special_tokens: bool | None = None,
) -> Classification:
    """Compute the probability of each label for each text.

    Parameters
    ----------
    texts
        Any number of texts. Encoders also accept pairs of texts, such as a premise and a hypothesis.
    labels
        Labels in words, whose probability to follow the text a generative model predicts. None selects
        the classes of the file's classification head. Their probabilities are the softmax of its outputs,
        or the sigmoid of each if the file requires it (``{arch}.classifier.activation``) or there is only
        one output.
    template
        Text that contains ``{text}`` and ends with ``{label}``, used with `labels`; by default
        the text, a blank line, ``Label:`` and the label.
    normalize_length
        Compare log probabilities per token of a label, so that long labels are not at a disadvantage.
    calibrate
        Divide by the probability of a label after texts without content (arXiv:2102.09690).
    truncate
        ``"error"``: a text longer than the context is an error. ``"end"``: its end is cut off, and a
        ``UserWarning`` counts and names such texts. The part of the template after the text is kept.
    unicode, split_special_tokens
        See :meth:`Model.embed`.

    Returns
    -------
    Classification
        Labels, probabilities and log likelihoods; ``best`` has the most probable label of each text.

    Raises
    ------
    TypeError, ValueError, ContextOverflowError
        A text is not a string, cannot be encoded, has no tokens (which a classification head needs) or
        does not fit; the message has its index. Or there are neither labels nor a classification head.
    """
    engine, rules = model.engine, PromptRules(truncate, unicode, split_special_tokens).checked()
    if labels is None:
        encoded = encode_for_head(engine, texts, rules)
        logits = head_logits(TextPasses(engine), encoded)
        warn(cut_notes([i for i, text in enumerate(encoded) if text.cut], len(encoded), engine.max_context))
        found = probabilities_of(engine.head, logits).astype(np.float32)
        return Classification(engine.head.labels, found, logits, np.ones(logits.shape, np.int64))
    if not engine.config.has_head:
        instead = "leave `labels` out to use the classes of its classification head"
        if not engine.head.labels:
            instead = f"use {engine.encoder_methods}"
        raise ValueError(f"{engine.name} is an encoder, which predicts no text: {instead}")
    labels = checked_texts(labels, "label")
    if not labels:
        raise TypeError("labels must be a sequence of strings, at least one")
    if len(set(labels)) < len(labels):
        raise ValueError(f"a label appears twice in {list(labels)}")
    form = TEMPLATE if template is None else template
    if not isinstance(form, str):
        raise TypeError(f"template must be a string, got {type(form).__name__}")
    if "{text}" not in form or not form.endswith("{label}") or form.count("{label}") != 1:
        raise ValueError(f"a template has {{text}}, and ends with {{label}}; got {form!r}")
    before, _, after = form.removesuffix("{label}").partition("{text}")
    given = checked_texts(texts)  # type: ignore[arg-type]  # raises an error for a pair
    all_texts = [*given, *CONTENT_FREE] if calibrate else given

    encode = partial(engine.tokenizer.encode, parse_special=rules.parses(engine.tokenizer))

    def pairs_of(i: int, text: str) -> list[tuple[Ids, Ids]]:
        made = []
        for label in labels:
            with errors_of(f"text {i}, label {label!r}"):
                context = rules.normalized(f"{before}{text}{after}")
                made.append(encode_continuation(engine, context, rules.normalized(label), encode))
        return made

    def excess_of(i: int, text: str) -> int:
        return _excess(engine, pairs_of(i, text))

    def name_of(i: int) -> str:
        return f"text {i // len(labels)}, label {labels[i % len(labels)]!r}"

    pairs, cut = list[tuple[Ids, Ids]](), list[int]()
    for i, text in enumerate(all_texts):
        made = pairs_of(i, text)
        if rules.truncate == "end" and _excess(engine, made) > 0:
            kept = shortened(engine.tokenizer, text, partial(excess_of, i))
            made = pairs_of(i, kept)
            cut.append(i)
        for context, label_ids in made:
            check_length(engine, len(context) + len(label_ids) - 1, name_of(len(pairs)))
            pairs.append((context, label_ids))
    warn(cut_notes([i for i in cut if i < len(given)], len(given), engine.max_context))
    shape = (len(all_texts), len(labels))
    log_probs = score_continuations(TextPasses(engine), pairs, name_of)
    likelihoods = np.array([of_label.sum(dtype=np.float64) for of_label in log_probs]).reshape(shape)
    lengths = np.array([len(label_ids) for _, label_ids in pairs], np.int64).reshape(shape)
    scores = likelihoods / lengths if normalize_length else likelihoods
    n = len(given)
    if calibrate:
        scores = scores - np.log(softmax(scores[n:]).mean(axis=0))
    probabilities = softmax(scores[:n]).astype(np.float32)
    return Classification(tuple(labels), probabilities, likelihoods[:n], lengths[:n])


def _excess(engine: Engine, pairs: Iterable[tuple[Ids, Ids]]) -> int:
    """Return by how many tokens the longest pair exceeds the context; its last token is only predicted."""
    return max(len(context) + len(label) for context, label in pairs) - 1 - engine.max_context


def head_logits(passes: TextPasses, encoded: Sequence[EncodedPair]) -> npt.NDArray[np.float64]:
    """Return the outputs of the classification head, ``[texts, labels]``; see `encode_for_head`."""
    head, segments = passes.engine.head, [text.segment for text in encoded]
    states = pooled_states(passes, head.state, [text.ids for text in encoded], segments)
    scores = np.array([logits_of(head, state) for state in states], np.float64)
    return scores.reshape(len(encoded), len(head.labels))


def encode_for_head(engine: Engine, texts: Iterable[TextOrPair], rules: PromptRules) -> list[EncodedPair]:
    """Return the tokens of texts, as of pairs without a second text, and of pairs.

    For errors see :meth:`metal_prefill.Model.classify`.
    """
    if not engine.head.labels:
        instead = "pass `labels`" if engine.config.has_head else f"use {engine.encoder_methods}"
        raise ValueError(f"{engine.name} has no classification head (cls.output.weight): {instead}")
    if engine.head.pooling == "none":
        raise ValueError(f"{engine.name} has labels for tokens: use `label_tokens`")
    encoded = []
    parts = [(text,) if isinstance(text, str) else text for text in _checked_pairs(engine, texts)]
    whole = map(rules.normalized, chain.from_iterable(parts))
    made = engine.tokenizer.encode_all(whole, parse_special=rules.parses(engine.tokenizer))
    for i, part in enumerate(parts):
        name = f"text {i}"
        with errors_of(name):
            tokens = [next(made) for _ in part]
        if len(part) == 1:
            ids, cut, _ = encode_tokens(engine, tokens[0], part[0], name, text_role(engine), rules)
            pair = EncodedPair(np.array(ids, np.int32), len(ids), cut)
        else:
            pair = encode_pair(engine, tokens[0], tokens[1], name, rules)
        if not len(pair.ids):
            raise ValueError(f"{name} has no tokens")
        encoded.append(pair)
    return encoded


def _checked_pairs(engine: Engine, texts: Iterable[TextOrPair]) -> list[TextOrPair]:
    checked: list[TextOrPair] = []
    for i, text in enumerate(items_of("texts", texts)):
        if isinstance(text, str):
            checked.append(text)
            continue
        parts = tuple(text) if isinstance(text, (tuple, list)) else ()
        if len(parts) != 2 or not all(isinstance(part, str) for part in parts):
            raise TypeError(f"text {i} must be a string or a pair of strings, got {type(text).__name__}")
        if engine.config.has_head:
            raise ValueError(f"text {i} is a pair, which only encoders take")
        checked.append((parts[0], parts[1]))
    return checked
