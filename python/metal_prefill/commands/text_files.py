"""Texts from files with a plain text or JSON value per line."""

from __future__ import annotations

import argparse
import io
import json

from metal_prefill.commands.common import UsageError, standard_input


def add_text_arguments(parser: argparse.ArgumentParser, texts: str) -> None:
    """Add ``-f`` and ``--column``, the arguments of `read_texts`; `texts` describes them in the help."""
    parser.add_argument(
        "-f",
        "--file",
        required=True,
        metavar="FILE",
        help=f"{texts}, one per line, where blank lines are skipped; a line of a .jsonl file is a string or "
        "an object; - is stdin",
    )
    parser.add_argument(
        "--column", default="text", metavar="NAME", help="field of objects that has the text (default: text)"
    )


def add_prompt_arguments(parser: argparse.ArgumentParser, what: str) -> None:
    """Add the options for texts beyond the context and for their Unicode form."""
    add_truncate_argument(parser, what)
    parser.add_argument(
        "--unicode",
        choices=("NFC",),
        help="normalize texts first, as transformers does for qwen2 and qwen3 (default: do not)",
    )


def add_truncate_argument(parser: argparse.ArgumentParser, what: str) -> None:
    """Add the option for texts beyond the context."""
    parser.add_argument(
        "--truncate",
        choices=("error", "end"),
        default="error",
        help=f"{what} longer than the context: refuse them, or cut off their ends and print how many "
        "(default: error)",
    )


def read_texts(path: str, column: str = "text") -> list[str]:
    """Read the texts of a file, ``-`` for stdin, ignoring blank lines.

    A line of a file whose name ends with ``.jsonl`` is a string, or an object with a field `column`; a line
    of any other file is a text.

    Raises
    ------
    UsageError
        A line contains no text, or the file is not UTF-8; the message names the file and the line.
    """
    as_json = path.endswith((".jsonl", ".ndjson"))
    texts = []
    try:
        with (
            io.StringIO(standard_input().read())
            if path == "-"
            else open(path, encoding="utf-8", newline="\n")
        ) as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    where = f"{path}, line {number}"
                    texts.append(_text(line, where, column) if as_json else line.rstrip("\r\n"))
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text: {error}") from error
    return texts


def _text(line: str, where: str, column: str) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is not JSON: {error}") from None
    text = value.get(column) if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise UsageError(f'{where} is neither a string nor an object with "{column}"')
    return text
