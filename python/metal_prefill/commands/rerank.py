"""``metal-prefill rerank``: documents ranked by their relevance to a query."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from metal_prefill.commands import common
from metal_prefill.commands.text_files import add_prompt_arguments, add_text_arguments, read_texts


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
    parser.add_argument(
        "--how",
        choices=("late",),
        help="late: late interaction, which compares the vectors of single tokens (default: as the model "
        "file requires)",
    )
    add_prompt_arguments(parser, "documents")
    parser.add_argument("--json", action="store_true", help="print lines of JSON: index, score, document")
    common.add_model_arguments(parser)
    common.add_engine_arguments(parser)


def execute(arguments: argparse.Namespace) -> None:
    """Print documents with their scores, best first."""
    from metal_prefill.tasks._prompt_rules import PromptRules
    from metal_prefill.tasks._reranking import Options, encode_documents
    from metal_prefill.tasks._text_passes import TextPasses

    documents = read_texts(arguments.file, arguments.column)
    with common.open_model(arguments) as model:
        rules = PromptRules(arguments.truncate, arguments.unicode)
        options = Options(arguments.instruction, arguments.template, arguments.how, rules)
        ranking = encode_documents(model.engine, arguments.query, documents, options)
        for note in ranking.notes():
            print(f"warning: {note}", file=sys.stderr)
        ranked = ranking.ranked(TextPasses(model.engine), arguments.top_n)
    for item in ranked:
        print(json.dumps(asdict(item)) if arguments.json else f"{item.score:.4f}  {item.document}")
