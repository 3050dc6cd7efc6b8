"""``metal-prefill embed``: embeddings of texts, printed, or in a file that an interrupted run continues."""

from __future__ import annotations

import argparse
import glob
import hashlib
import io
import json
import os
import shutil
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from metal_prefill._support.atomic_write import lock, named, replacing
from metal_prefill._support.messages import counted
from metal_prefill.commands import common, text_files
from metal_prefill.errors import MissingExtraError
from metal_prefill.files._task_config import TEXT_POOLINGS
from metal_prefill.tasks._text_passes import TextPasses

if TYPE_CHECKING:
    from metal_prefill import Model

BLOCK = 256  # texts per write
HASH_DIGITS = 16  # of the identity, in the name of a part
SHOWN = 4  # values of a printed vector
VECTORS = "embedding"  # column of a Parquet file

EXAMPLE = "metal-prefill embed -m minilm 'The king is dead.' 'Long live the king.'"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text_files.add_text_arguments(parser, "texts")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="output file: .npy, float32 [texts, dimensions], or .parquet with the texts (requires pyarrow); "
        "without it, the first values of each vector are printed",
    )
    parser.add_argument("--json", action="store_true", help="print lines of JSON: text, embedding")
    common.add_number(parser, "--dimensions", "keep the first N values of each vector")
    parser.add_argument(
        "--pooling", choices=TEXT_POOLINGS, help="pooling of hidden states (default: the model file's)"
    )
    parser.add_argument(
        "--instruction",
        metavar="TEXT",
        help="prompt of each text: query, document or another name that the model knows; a description of "
        "the task; or a template with {text} (default: the model's default prompt, if it has one)",
    )
    common.add_model_arguments(parser)


def execute(arguments: argparse.Namespace) -> None:
    """Compute the vectors missing from an earlier run, and write the file once all are available."""
    from metal_prefill.tasks._embedding import check_pooling, embed_encoded, encode_texts, vector_width
    from metal_prefill.tasks._prompts import PromptRules, role_of

    kind = _kind(arguments.output, arguments.json, arguments.column)
    texts = text_files.given_texts(arguments)
    with common.open_model(arguments) as model:
        # Encode all texts first, so that errors are raised early and number the texts as in the file.
        pooling = check_pooling(model.engine, arguments.pooling)
        if pooling == "none":
            raise common.UsageError(
                f"{model.engine.name} has a vector for each token, not for each text: set --pooling"
            )
        rules = PromptRules(**text_files.prompt_options(arguments))
        role = role_of(model.engine, pooling, arguments.instruction)
        encoded = encode_texts(model.engine, texts, role, rules)
        for note in encoded.notes():
            warnings.warn(note, stacklevel=1)
        width = vector_width(model.engine, pooling, arguments.dimensions)
        passes = TextPasses(model.engine)

        def vectors_of(first: int) -> Any:
            block = encoded.part(range(first, min(first + BLOCK, len(texts))))
            return embed_encoded(passes, block, dimensions=width, pooling=pooling)

        if arguments.output is None:
            for first in range(0, len(texts), BLOCK):
                _print(texts[first : first + BLOCK], vectors_of(first), arguments.json)
            return
        identity = {
            "dimensions": width,
            "pooling": pooling,
            "instruction": arguments.instruction,
            "truncate": [arguments.truncate, model.max_context],
            "rules": rules[1:],
            "compute": model.compute,
        }
        with _opened(arguments.output, _identity(model, texts, identity), len(texts), width) as part:
            before = part.rows
            begin = time.perf_counter()
            with common.progress_bar("texts", "texts", len(texts) > BLOCK) as progress:
                for first in range(before, len(texts), BLOCK):
                    part.append(vectors_of(first))
                    if progress is not None:
                        progress(part.rows, len(texts))
            seconds = time.perf_counter() - begin
            with replacing(arguments.output) as path:
                if kind == ".npy":
                    shutil.copyfile(part.path, path)
                else:
                    column = arguments.column or text_files.DEFAULT_COLUMN
                    _write_parquet(path, column, texts, np.load(part.path))
            part.path.unlink()
            _remove_abandoned(arguments.output)
    tokens = sum(map(len, encoded.prompts[before:]))
    print(summary(len(texts) - before, before, tokens, seconds), file=sys.stderr)


def _kind(output: Path | None, as_json: bool, column: str | None) -> str:
    """Return the ending of the output's name, empty without an output."""
    if output is None:
        return ""
    if as_json:
        raise common.UsageError("--json prints vectors, and -o writes them to a file: use one of them")
    if output.suffix not in (".npy", ".parquet"):
        raise common.UsageError(f"{output}: the name must end with .npy or .parquet")
    if output.suffix == ".parquet":
        if column == VECTORS:
            raise common.UsageError(f"--column {column}: {output} has the vectors in a column of this name")
        _pyarrow()
    if not output.parent.is_dir():
        raise common.UsageError(f"{output}: folder {output.parent} does not exist")
    return output.suffix


def _print(texts: list[str], vectors: Any, as_json: bool) -> None:
    for text, vector in zip(texts, vectors, strict=True):
        if as_json:
            print(json.dumps({"text": text, "embedding": [float(value) for value in vector]}))
        else:
            values = " ".join(f"{value:7.4f}" for value in vector[:SHOWN])
            print(f"[{values} ... {len(vector)} values]  {text}")


def summary(done: int, before: int, tokens: int, seconds: float) -> str:
    """Summarize the number of texts and the speed."""
    rate = f" ({done / seconds:,.0f} texts/s, {tokens / seconds:,.0f} tokens/s)" if done and seconds else ""
    known = f"; {before:,} done before" if before else ""
    return f"{counted(done, 'text')} in {seconds:.1f} s{rate}{known}"


def _identity(model: Model, texts: list[str], options: dict[str, Any]) -> str:
    """Return a hash of all inputs that the vectors depend on."""
    digest = hashlib.sha256()
    size = model.path.stat().st_size
    for piece in (str(model.path.resolve()), str(size), json.dumps(options, sort_keys=True), *texts):
        encoded = piece.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.hexdigest()


class _Part:
    """An .npy file next to the output, named by an identity, to which an interrupted run has written rows."""

    def __init__(self, output: Path, path: Path, file: IO[bytes], texts: int, width: int) -> None:
        self.path, self._output, self._file = path, output, file
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(
            header, {"descr": "<f4", "fortran_order": False, "shape": (texts, width)}
        )
        start, row = len(header.getvalue()), 4 * width
        file.seek(0)
        whole = file.read(start) == header.getvalue()
        # The last write may be incomplete; a longer file is damaged.
        rows = (os.fstat(file.fileno()).st_size - start) // row if whole else 0
        self.rows = rows if rows <= texts else 0
        with named(output):
            file.truncate(start + self.rows * row if whole else 0)
            if not whole:
                file.write(header.getvalue())
                file.flush()

    def append(self, vectors: Any) -> None:
        with named(self._output):
            self._file.write(vectors.tobytes())
            self._file.flush()
            os.fsync(self._file.fileno())
        self.rows += len(vectors)


@contextmanager
def _opened(output: Path, identity: str, texts: int, width: int) -> Iterator[_Part]:
    """Open the part of an output. Raises UsageError if another process is writing it."""
    path = output.with_name(f".{output.name}.{identity[:HASH_DIGITS]}.part")
    with open(path, "a+b") as file:
        common.lock_output(file, output)
        if os.fstat(file.fileno()).st_nlink == 0:  # that process has just finished
            raise common.UsageError(f"{output}: another process has written it")
        yield _Part(output, path, file, texts, width)


def _remove_abandoned(output: Path) -> None:
    """Remove parts of interrupted runs with other texts or options, unless a process may be writing them."""
    digits = HASH_DIGITS * "[0-9a-f]"
    for path in output.parent.glob(f".{glob.escape(output.name)}.{digits}.part"):
        # Another process may have removed the part or be writing it, or it may belong to another user.
        with suppress(OSError), open(path, "rb") as file:
            if lock(file, wait=False):
                path.unlink()


def _pyarrow() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtraError(f"writing Parquet requires pyarrow: pip install pyarrow ({error})") from error
    return pyarrow


def _write_parquet(path: Path, column: str, texts: list[str], vectors: Any) -> None:
    arrow = _pyarrow()
    table = arrow.table({column: texts, VECTORS: list(vectors)})
    arrow.parquet.write_table(table, path)
