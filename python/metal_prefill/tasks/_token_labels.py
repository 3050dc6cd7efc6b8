"""Labels of the tokens of texts: named entities, parts of speech."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from metal_prefill._support.arguments import Progress, one_of
from metal_prefill.engine import Engine, EngineOwner
from metal_prefill.files._task_config import TransitionBiases
from metal_prefill.tasks._embedding import checked_texts, encode_tokens
from metal_prefill.tasks._pooled_head import logits_of, probabilities_of
from metal_prefill.tasks._prompts import PromptRules, cut_notes, errors_of, text_role, warn
from metal_prefill.tasks._text_passes import Ids, TextPasses, pooled_states, reported
from metal_prefill.text._tokenizer import TokenSpan

Strategy: TypeAlias = Literal["none", "simple", "first", "average", "max", "viterbi"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)

Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Entity:
    """A part of a text with a label.

    Attributes
    ----------
    label : str
        Label, without the prefix of BIO tags (``B-``, ``I-``), and of BIOES tags with the strategy
        ``"viterbi"``. With ``"none"``, the whole tag.
    score : float
        Probability of the label; the mean over the tokens or words of the entity.
    start, end : int
        Position of the first character in the text, and the position after the last.
    text : str
        The characters from `start` to `end`.
    """

    label: str
    score: float
    start: int
    end: int
    text: str


class _SpannedText(NamedTuple):
    text: str
    ids: Ids  # token ids, int32 ``[n]``, including the special tokens at both ends
    spans: list[TokenSpan]  # tokens of the text alone


class _Piece(NamedTuple):
    """A token or a word, with the probability of each label."""

    start: int
    end: int
    probabilities: Doubles


def label_tokens(
    model: EngineOwner,
    texts: Iterable[str],
    *,
    strategy: Literal["none", "simple", "first", "average", "max", "viterbi"] | str | None = None,
    transitions: Mapping[str, float] | None = None,
    ignore: Sequence[str] = ("O",),
    truncate: Literal["error", "end"] | str = "error",
    split_special_tokens: bool | None = None,
    progress: Progress | None = None,
) -> list[list[Entity]]:
    """Label parts of texts, such as names, with a model for token classification.

    Adjacent tokens with the same label are one entity. In BIO tags, ``B-`` starts a new one.

    Parameters
    ----------
    texts
        Any number of texts.
    strategy
        Aggregation of tokens to entities, as in the pipelines of transformers. ``"simple"`` assigns each
        token its most probable label. ``"first"``, ``"average"`` and ``"max"`` assign all tokens of a
        word one label: that of the first token, of the mean of their probabilities, or of the most
        certain token. ``"none"`` returns each token with its tag. Unless the vocabulary marks them
        (WordPiece), words are separated by any white space; transformers separates them by spaces only.
        ``"viterbi"`` needs BIOES tags: it finds the most probable sequence of tags in which each part begins
        with ``B-`` and ends with ``E-``, or is a single token with ``S-``, as OpenAI Privacy Filter decodes
        its tags. None selects ``"viterbi"`` for such tags, otherwise ``"simple"``.
    transitions
        Biases of ``"viterbi"`` by name, in place of those of the file, added to the score of a sequence for
        each pair of adjacent tags. Names are ``background_stay`` (``O`` after ``O``), ``background_to_start``
        (``B-`` or ``S-`` after ``O``), ``inside_to_continue`` (``I-`` after ``B-`` or ``I-``),
        ``inside_to_end`` (``E-`` after these), ``end_to_background`` (``O`` after ``E-`` or ``S-``) and
        ``end_to_start`` (``B-`` or ``S-`` after these). Others are 0. More parts are found if
        ``background_stay`` is negative or ``background_to_start`` positive.
    ignore
        Labels to omit from the result.
    truncate, split_special_tokens
        See :meth:`Model.embed`.
    progress
        Called with the number of texts done and their total.

    Returns
    -------
    list of list of Entity
        Entities of each text in order, with label, score and position in characters, without white space
        around them, which tokens of some vocabularies include.

    Raises
    ------
    TypeError, ValueError, ContextOverflowError
        A text is not a string, has lone surrogates or does not fit; the message has its index. Or the
        file has no classification head for tokens, or other tags than a strategy or `transitions` need.
    """
    engine = model.engine
    if strategy is not None:
        one_of("strategy", strategy, STRATEGIES)
    _check_labels(engine)
    decoding = _decoding_of(engine, strategy, transitions)
    rules = PromptRules(truncate, split_special_tokens=split_special_tokens).checked()
    spanned, cut = _encoded(engine, texts, rules)
    warn(cut_notes(cut, len(spanned), text_role(engine).limit))
    found = _found(engine, spanned, *decoding)
    # A token of white space alone is not an entity.
    return [
        [entity for entity in entities if entity.text and entity.label not in ignore]
        for entities in reported(found, len(spanned), progress)
    ]


def _check_labels(engine: Engine) -> None:
    """Raise ValueError if a file has no labels for tokens."""
    head = engine.head
    if head.entities is not None:
        raise ValueError(f"{engine.name} finds entities of labels that a call names: use `find_entities`")
    if not head.labels:
        raise ValueError(
            f"{engine.name} has no labels for tokens: it has no classification head (cls.output.weight)"
        )
    if head.pooling not in (None, "none"):
        raise ValueError(f"{engine.name} has labels for whole texts: use `classify`")


def _decoding_of(
    engine: Engine, strategy: str | None, transitions: Mapping[str, float] | None
) -> tuple[str, TransitionBiases]:
    """Return the strategy, by default the one for the tags of a file, and the biases of ``"viterbi"``."""
    head = engine.head
    stray = stray_tag(head.labels)
    if strategy is None:
        strategy = "viterbi" if stray is None else "simple"
    if strategy == "viterbi" and stray is not None:
        found = f"the label {stray!r}" if stray else "no label O, or none with E- or S-"
        raise ValueError(f"strategy 'viterbi' needs BIOES tags: {engine.name} has {found}")
    if transitions is None:
        return strategy, head.transitions
    if strategy != "viterbi":
        raise ValueError(f"transitions need the strategy 'viterbi', got {strategy!r}")
    for name, value in transitions.items():
        one_of("transitions", name, TransitionBiases._fields)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"transitions[{name!r}] must be a number, got {type(value).__name__}")
        if not math.isfinite(value):
            raise ValueError(f"transitions[{name!r}] is {value}, must be finite")
    return strategy, TransitionBiases(**transitions)


def _encoded(
    engine: Engine, texts: Iterable[str], rules: PromptRules
) -> tuple[list[_SpannedText], list[int]]:
    """Return texts in tokens, and the indices of those that lost their ends."""
    parses = rules.parses(engine.tokenizer)
    role, frame = text_role(engine), engine.tokenizer.frame
    spanned, cut = [], []
    for i, text in enumerate(checked_texts(texts)):
        with errors_of(f"text {i}"):
            spans = engine.tokenizer.encode_spans(text, parse_special=parses)
        encoded = encode_tokens(engine, [span.id for span in spans], text, f"text {i}", role, rules)
        cut += [i] if encoded.cut else []
        kept = spans[: len(encoded.ids) - len(frame.begin) - len(frame.end)]
        spanned.append(_SpannedText(text, np.array(encoded.ids, np.int32), kept))
    return spanned, cut


def _found(
    engine: Engine, spanned: Sequence[_SpannedText], strategy: str, biases: TransitionBiases
) -> Iterator[list[Entity]]:
    """Yield the entities of each text."""
    head, begin = engine.head, len(engine.tokenizer.frame.begin)
    filled = [i for i, item in enumerate(spanned) if item.spans]
    prompts = [spanned[i].ids for i in filled]
    states = pooled_states(TextPasses(engine), "none", prompts, name_of=lambda i: f"text {filled[i]}")
    for item in spanned:
        if not item.spans:
            yield []
            continue
        logits = logits_of(head, next(states)[begin : begin + len(item.spans)])
        pieces = [
            _Piece(span.start, span.end, values)
            for span, values in zip(item.spans, probabilities_of(head, logits), strict=True)
        ]
        yield _entities(engine, item, pieces, logits, strategy, biases)


def _entities(
    engine: Engine,
    item: _SpannedText,
    pieces: list[_Piece],
    logits: npt.NDArray[np.floating[Any]],
    strategy: str,
    biases: TransitionBiases,
) -> list[Entity]:
    labels = engine.head.labels
    if strategy == "viterbi":
        chosen = best_path(logits, transitions_of(labels, biases))
    else:
        if strategy not in ("none", "simple"):
            pieces = [_merged(word, strategy) for word in _words(engine, item, pieces)]
        chosen = [int(piece.probabilities.argmax()) for piece in pieces]
    # Prefixes of tags that begin an entity, and of tags that continue one, as those without prefix do.
    begin, other = _PREFIXES.get(strategy, (("B-",), ("I-",)))
    groups: list[tuple[str, list[tuple[_Piece, float]]]] = []
    for i, piece in zip(chosen, pieces, strict=True):
        tag, scored = labels[i], (piece, float(piece.probabilities[i]))
        label = tag[2:] if tag.startswith((*begin, *other)) else tag
        if groups and groups[-1][0] == label and strategy != "none" and not tag.startswith(begin):
            groups[-1][1].append(scored)
        else:
            groups.append((label, [scored]))
    return [_entity(item.text, label, group) for label, group in groups]


_PREFIXES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "none": ((), ()),
    "viterbi": (("B-", "S-"), ("I-", "E-")),
}


def _entity(text: str, label: str, scored: Sequence[tuple[_Piece, float]]) -> Entity:
    start, end = scored[0][0].start, scored[-1][0].end
    inside = text[start:end]
    start += len(inside) - len(inside.lstrip())  # tokens of some vocabularies begin with a space
    inside = inside.strip()
    score = float(np.mean([score for _, score in scored]))
    return Entity(label, score, start, start + len(inside), inside)


def _words(engine: Engine, item: _SpannedText, pieces: Sequence[_Piece]) -> list[list[_Piece]]:
    words: list[list[_Piece]] = []
    for span, piece in zip(item.spans, pieces, strict=True):
        if words and engine.tokenizer.continues_word(span, item.text):
            words[-1].append(piece)
        else:
            words.append([piece])
    return words


def _merged(word: Sequence[_Piece], strategy: str) -> _Piece:
    """Return a word with the probabilities of its first token, of its most certain token, or their mean."""
    if strategy == "first":
        chosen = word[0].probabilities
    elif strategy == "max":
        chosen = max((piece.probabilities for piece in word), key=lambda values: float(values.max()))
    else:
        chosen = np.mean([piece.probabilities for piece in word], axis=0)
    return _Piece(word[0].start, word[-1].end, chosen)


OUTSIDE = "O"
_TAG = re.compile(r"[BIES]-.+", re.DOTALL)


class Transitions(NamedTuple):
    """Scores of tags by those next to them; ``-inf`` if a sequence may not have them."""

    # Scores of the first and of the last tag of a text, ``[tags]``.
    first: Doubles
    last: Doubles
    between: Doubles  # scores of a tag, the columns, after another one, ``[tags, tags]``


def stray_tag(labels: Sequence[str]) -> str | None:
    """Return the first label that is not a BIOES tag; None if all are.

    Parts can end only if there are ``O``, and ``E-`` or ``S-``; without these, the result is empty.
    """
    stray = next((label for label in labels if label != OUTSIDE and not _TAG.fullmatch(label)), None)
    if stray is not None:
        return stray
    return None if OUTSIDE in labels and any(label[0] in "ES" for label in labels) else ""


@lru_cache(maxsize=16)
def transitions_of(labels: tuple[str, ...], biases: TransitionBiases) -> Transitions:
    """Return the scores of transitions between tags."""

    def score(before: str, after: str) -> float:
        if before[0] in "BI":
            inside = {"I": biases.inside_to_continue, "E": biases.inside_to_end}
            return inside.get(after[0], -np.inf) if before[2:] == after[2:] else -np.inf
        if after[0] in "IE":
            return -np.inf
        if before == OUTSIDE:
            return biases.background_stay if after == OUTSIDE else biases.background_to_start
        return biases.end_to_background if after == OUTSIDE else biases.end_to_start

    return Transitions(
        np.array([-np.inf if label[0] in "IE" else 0.0 for label in labels]),
        np.array([-np.inf if label[0] in "BI" else 0.0 for label in labels]),
        np.array([[score(before, after) for after in labels] for before in labels]),
    )


def best_path(logits: npt.NDArray[np.floating[Any]], transitions: Transitions) -> list[int]:
    """Return the tags with the largest sum of log probabilities and transitions; of equal ones the first.

    Log probabilities are logits, ``[n, tags]``, less a number that is the same for all tags of a token, and
    so for all sequences.
    """
    emissions = np.asarray(logits, np.float64)
    scores = emissions[0] + transitions.first
    before = np.zeros(emissions.shape, np.intp)
    for i in range(1, len(emissions)):
        sums = scores[:, None] + transitions.between
        before[i] = sums.argmax(axis=0)
        scores = sums.max(axis=0) + emissions[i]
    path = [int((scores + transitions.last).argmax())]
    for i in range(len(emissions) - 1, 0, -1):
        path.append(int(before[i, path[-1]]))
    return path[::-1]
