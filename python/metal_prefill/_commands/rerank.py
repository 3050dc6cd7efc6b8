"""``metal-prefill rerank``: documents in the order in which they answer a query."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from metal_prefill._commands import common
from metal_prefill._commands.text_files import add_text_arguments, read_texts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("-q", "--query", required=True, metavar="TEXT", help="what is asked")
    add_text_arguments(parser, "documents")
    parser.add_argument("-n", "--top-n", type=common.positive, metavar="N", help="print the best N only")
    parser.add_argument("--instruction", metavar="TEXT", help="the task (default: that of the model's card)")
    parser.add_argument(
        "--template", metavar="TEXT", help="with {query} and {document} (default: the file's or the card's)"
    )
    parser.add_argument("--json", action="store_true", help="print lines of JSON: index, score, document")
    common.add_model_arguments(parser)
    common.add_engine_arguments(parser)


def execute(arguments: argparse.Namespace) -> None:
    """Print documents, the best first, each with its score."""
    documents = read_texts(arguments.file, arguments.column)
    with common.open_model(arguments) as model:
        ranked = model.rerank(
            arguments.query,
            documents,
            arguments.top_n,
            instruction=arguments.instruction,
            template=arguments.template,
        )
    for item in ranked:
        print(json.dumps(asdict(item)) if arguments.json else f"{item.score:.4f}  {item.document}")
