"""``metal-prefill rerank``: documents ranked by their relevance to a query."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from metal_prefill._commands import common
from metal_prefill._commands.text_files import add_text_arguments, read_texts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("-q", "--query", required=True, metavar="TEXT", help="query to rank for")
    add_text_arguments(parser, "documents")
    parser.add_argument("-n", "--top-n", type=common.positive, metavar="N", help="print only the best N")
    parser.add_argument(
        "--instruction", metavar="TEXT", help="task description (default: from the model card)"
    )
    parser.add_argument(
        "--template",
        metavar="TEXT",
        help="prompt with {query} and {document} (default: from the model file or card)",
    )
    parser.add_argument("--json", action="store_true", help="print lines of JSON: index, score, document")
    common.add_model_arguments(parser)
    common.add_engine_arguments(parser)


def execute(arguments: argparse.Namespace) -> None:
    """Print documents with their scores, best first."""
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
