"""``metal-prefill label``: classification of texts and tokens."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from metal_prefill.commands import common, text_files

if TYPE_CHECKING:
    from metal_prefill import Model
    from metal_prefill.tasks import Entity

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
    if arguments.template is not None and arguments.labels is None:
        raise common.UsageError("--template requires --labels")
    texts = text_files.given_texts(arguments)
    with common.open_model(arguments) as model:
        head = model.engine.head
        if head.entities is not None:
            _find_parts(model, texts, arguments)
            return
        if arguments.threshold is not None:
            raise common.UsageError("--threshold requires a model of GLiNER")
        of_tokens = bool(head.labels) and head.pooling in (None, "none") and arguments.labels is None
        label = _label_parts if of_tokens else _label_texts
        label(model, texts, arguments)


def _find_parts(model: Model, texts: list[str], arguments: argparse.Namespace) -> None:
    _check_positions(arguments)
    if arguments.labels is None or arguments.template is not None:
        raise common.UsageError("a model of GLiNER requires --labels, and has no --template")
    options = {} if arguments.threshold is None else {"threshold": arguments.threshold}
    found = model.find_entities(texts, arguments.labels, truncate=arguments.truncate, **options)
    _print_parts(found, arguments)


def _check_positions(arguments: argparse.Namespace) -> None:
    if arguments.unicode is not None:
        raise common.UsageError("--unicode changes the positions of characters: not for labels of tokens")


def _label_parts(model: Model, texts: list[str], arguments: argparse.Namespace) -> None:
    _check_positions(arguments)
    found = model.label_tokens(texts, strategy=arguments.strategy, truncate=arguments.truncate)
    _print_parts(found, arguments)


def _print_parts(found: list[list[Entity]], arguments: argparse.Namespace) -> None:
    for i, entities in enumerate(found):
        if arguments.json:
            print(json.dumps({"index": i, "entities": [asdict(entity) for entity in entities]}))
            continue
        for entity in entities:
            print(f"{i}:{entity.start}-{entity.end}  {entity.label}  {entity.score:.4f}  {entity.text}")


def _label_texts(model: Model, texts: list[str], arguments: argparse.Namespace) -> None:
    options = text_files.prompt_options(arguments)
    found = model.classify(texts, arguments.labels, arguments.template, **options)
    for i, (label, values) in enumerate(zip(found.best, found.probabilities, strict=True)):
        if arguments.json:
            scores = dict(zip(found.labels, values.tolist(), strict=True))
            print(json.dumps({"index": i, "label": label, "probabilities": scores}))
        else:
            print(f"{i}  {label}  {values.max():.4f}  {texts[i]}")
