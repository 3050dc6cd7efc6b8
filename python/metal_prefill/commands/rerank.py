"""``metal-prefill rerank``: documents ranked by their relevance to a query."""

import argparse
import json
from dataclasses import asdict

from metal_prefill.commands import common, text_files

EXAMPLE = "metal-prefill rerank -m minilm --how late -q 'Who is dead?' 'The queen lives.' 'The king is dead.'"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-q", "--query", required=True, metavar="TEXT", help="query to rank for")
    text_files.add_text_arguments(parser, "documents")
    common.add_number(parser, "-n --top-n", "print only the best N")
    for name, what in (
        ("instruction", "task description (default: from the model card)"),
        ("template", "prompt with {query} and {document} (default: from the model file or card)"),
        ("label", "class whose probability is the score (default: the affirmative one of two)"),
    ):
        parser.add_argument(f"--{name}", metavar="TEXT", help=what)
    parser.add_argument(
        "--how",
        choices=("late",),
        help="late: late interaction, which compares the vectors of single tokens (default: as the model "
        "file requires)",
    )
    parser.add_argument("--json", action="store_true", help="print lines of JSON: index, score, document")
    common.add_model_arguments(parser)


def execute(arguments: argparse.Namespace) -> None:
    """Print documents with their scores, best first."""
    documents = text_files.given_texts(arguments)
    options = {name: getattr(arguments, name) for name in ("instruction", "template", "how", "label")}
    with common.open_model(arguments) as model:
        ranked = model.rerank(
            arguments.query, documents, arguments.top_n, **options, **text_files.prompt_options(arguments)
        )
    short = [f"{item.score:.4f}" for item in ranked]
    separates = len(set(short)) == len({item.score for item in ranked})
    for item, score in zip(ranked, short, strict=True):
        line = f"{score if separates else item.score}  {item.document}"
        print(json.dumps(asdict(item)) if arguments.json else line)
