"""Texts from arguments, or from files with a plain text or JSON value per line."""

from __future__ import annotations

import argparse
import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from metal_prefill.commands.common import UsageError, add_option, read_text, standard_input

DEFAULT_COLUMN = "text"
_LONGEST_FIELD = 2**31 - 1  # of csv, in which a long is 32 bits on some systems


def add_text_arguments(parser: argparse.ArgumentParser, texts: str) -> None:
    """Add the arguments of `given_texts` and `prompt_options`; `texts` describes the texts in the help."""
    parser.add_argument(
        "texts", nargs="*", metavar="TEXT", help=f"{texts}; without any and without -f, those of stdin"
    )
    add_option(
        parser,
        "-f --file",
        f"{texts}, one per line, where blank lines are skipped; a line of a .jsonl file is a string or "
        "an object, the first row of a .csv or .tsv file names columns; - is stdin",
        metavar="FILE",
    )
    column = f"field of objects or column that has the text (default: {DEFAULT_COLUMN})"
    parser.add_argument("--column", metavar="NAME", help=column)
    cut = f"{texts} longer than the context: refuse them, or cut off their ends and print how many"
    add_option(parser, "--truncate", cut, "error", choices=("error", "end"))
    normalized = "normalize texts first, as transformers does for qwen2 and qwen3 (default: do not)"
    parser.add_argument("--unicode", choices=("NFC",), help=normalized)


def prompt_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options of how texts become prompts."""
    return {"truncate": arguments.truncate, "unicode": arguments.unicode}


def given_texts(arguments: argparse.Namespace) -> list[str]:
    """Return the texts in arguments, in a file or on stdin; see `read_texts`."""
    if not arguments.texts:
        if arguments.file is None and standard_input().isatty():
            raise UsageError("no texts: pass them as arguments, in a file with -f, or on standard input")
        return read_texts("-" if arguments.file is None else arguments.file, arguments.column)
    other = "-f" if arguments.file is not None else "--column"
    if arguments.file is not None or arguments.column is not None:
        raise UsageError(f"{other} and the text {arguments.texts[0]!r:.40} exclude each other")
    return list(arguments.texts)


def read_texts(path: str, column: str | None = None) -> list[str]:
    """Read the texts of a file, ``-`` for stdin, ignoring blank ones and a byte order mark.

    A line of a file whose name ends with ``.jsonl`` is a string, or an object with a field `column`. The
    first row of a ``.csv`` or ``.tsv`` file names its columns. A line of any other file is a text. Raises
    UsageError, which names the line, if it contains no text, is not UTF-8, or has no columns.
    """
    kind = Path(path).suffix.lower()
    read = {**dict.fromkeys((".jsonl", ".ndjson"), _objects), ".csv": _rows, ".tsv": _rows}.get(kind)
    if read is None and column is not None:
        raise UsageError(
            f"--column is {column!r}, but {path} has a text per line: only .jsonl, .csv and .tsv"
        )
    try:
        with (
            io.StringIO(read_text(path)) if path == "-" else open(path, encoding="utf-8-sig", newline="\n")
        ) as file:
            if read is None:
                return [line.rstrip("\r\n") for line in file if line.strip()]
            return [text for text in read(file, path, column or DEFAULT_COLUMN) if text.strip()]
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text: {error}") from error


def _objects(file: TextIO, path: str, column: str) -> Iterator[str]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path}, line {number} is not JSON: {error}") from None
        text = value.get(column) if isinstance(value, dict) else value
        if not isinstance(text, str):
            raise UsageError(f'{path}, line {number} is neither a string nor an object with "{column}"')
        yield text


def _rows(file: TextIO, path: str, column: str) -> Iterator[str]:
    csv.field_size_limit(_LONGEST_FIELD)
    reader = csv.DictReader(file, delimiter="\t" if path.lower().endswith(".tsv") else ",", strict=True)
    try:
        if column not in (names := reader.fieldnames or ()):
            raise UsageError(
                f"{path} has no column {column!r}, but {', '.join(map(repr, names))}: set --column"
            )
        for row in reader:
            yield row[column] or ""
    except csv.Error as error:
        raise UsageError(f"{path}, line {reader.line_num}: {error}") from None
