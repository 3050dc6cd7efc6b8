"""``metal-prefill label``: classification of texts and tokens."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

from metal_prefill.commands import common, text_files

if TYPE_CHECKING:
    from metal_prefill.tasks import Classification

EXAMPLE = "metal-prefill label --labels happy,sad 'O happy dagger!'"


def _labels(text: str) -> list[str]:
    labels = [word.strip() for word in text.split(",")]
    if not all(labels):
        raise argparse.ArgumentTypeError(f"must be labels separated by commas, got {text!r}")
    return labels


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text_files.add_text_arguments(parser, "texts")
    parser.add_argument(
        "--labels",
        type=_labels,
        metavar="A,B,...",
        help="labels in words, of which a generative model predicts the most probable, and for which a model "
        "of GLiNER finds parts of texts (default: those of the file's classification head)",
    )
    parser.add_argument(
        "--template", metavar="TEXT", help="with --labels: prompt that contains {text} and ends with {label}"
    )
    parser.add_argument(
        "--strategy",
        choices=("none", "simple", "first", "average", "max", "viterbi"),
        help="grouping of tokens that a head labels: adjacent tokens with the same label (simple); whole "
        "words, with the label of their first token (first), of the mean of their tokens (average) or of the "
        "most certain token (max); no grouping (none); the most probable sequence of BIOES tags (viterbi) "
        "(default: viterbi for such tags, otherwise simple)",
    )
    exceeded = "with a model of GLiNER: probability that a part of a text exceeds (default: 0.5)"
    parser.add_argument("--threshold", type=float, metavar="P", help=exceeded)
    parser.add_argument("--json", action="store_true", help="print lines of JSON, one for each text")
    common.add_model_arguments(parser)


def execute(arguments: argparse.Namespace) -> None:
    """Print the labels of each text: of the whole text, or of its parts with their positions."""
    labels, threshold = arguments.labels, arguments.threshold
    if arguments.template is not None and labels is None:
        raise common.UsageError("--template requires --labels")
    texts = text_files.given_texts(arguments)
    with common.open_model(arguments) as model:
        head = model.engine.head
        finds = head.entities is not None
        if finds and (labels is None or arguments.template is not None):
            raise common.UsageError("a model of GLiNER requires --labels, and has no --template")
        if threshold is not None and not finds:
            raise common.UsageError("--threshold requires a model of GLiNER")
        whole = not finds and (not head.labels or head.pooling not in (None, "none") or labels is not None)
        if arguments.strategy is not None and (finds or whole):
            raise common.UsageError("--strategy requires a model with labels for tokens")
        if whole:
            options = text_files.prompt_options(arguments)
            _print_classes(
                model.classify(texts, labels, arguments.template, **options), texts, arguments.json
            )
            return
        if arguments.unicode is not None:
            raise common.UsageError("--unicode changes the positions of characters: not for labels of tokens")
        if finds:
            options = {} if threshold is None else {"threshold": threshold}
            find = partial(model.find_entities, texts, labels, **options)
        else:
            find = partial(model.label_tokens, texts, strategy=arguments.strategy)
        with common.progress_bar("texts", "texts") as progress:
            found = find(truncate=arguments.truncate, progress=progress)
    for i, entities in enumerate(found):
        if arguments.json:
            print(json.dumps({"index": i, "entities": [asdict(entity) for entity in entities]}))
            continue
        for entity in entities:
            print(f"{i}:{entity.start}-{entity.end}  {entity.label}  {entity.score:.4f}  {entity.text}")


def _print_classes(found: Classification, texts: list[str], as_json: bool) -> None:
    for i, (label, values) in enumerate(zip(found.best, found.probabilities, strict=True)):
        if as_json:
            scores = dict(zip(found.labels, values.tolist(), strict=True))
            print(json.dumps({"index": i, "label": label, "probabilities": scores}))
        else:
            print(f"{i}  {label}  {values.max():.4f}  {texts[i]}")
