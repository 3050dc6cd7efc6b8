"""Tokenizers of encoders as transformers writes them, in all variants of the file.

The tool that records the ids of transformers and the tests that compare with them share these definitions.
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from metal_prefill.conversion._folder import Fields
from metal_prefill.conversion._vocabulary import read_vocabulary
from metal_prefill.conversion._writing import add_vocabulary
from metal_prefill.files import GGUFFile
from metal_prefill.files._gguf_writer import GGUFWriter
from metal_prefill.text import Tokenizer
from support.files.gguf_bytes import Value, entry, gguf
from support.places import DATA

RECORD = DATA / "transformers_tokenizers.npz"
PAIRS = 200  # pairs of neighbouring texts


@dataclass(frozen=True)
class Variant:
    """A tokenizer class of transformers with options."""

    vocabulary: str  # "wordpiece" or "unigram"
    options: dict[str, Any] = field(default_factory=dict)  # arguments of the class
    charsmap: bool = True  # whether a Unigram tokenizer normalizes text


VARIANTS = {
    "uncased": Variant("wordpiece", {"do_lower_case": True}),
    "cased": Variant("wordpiece", {"do_lower_case": False}),
    "uncased with accents": Variant("wordpiece", {"do_lower_case": True, "strip_accents": False}),
    "cased without accents": Variant("wordpiece", {"do_lower_case": False, "strip_accents": True}),
    "ideographs together": Variant("wordpiece", {"tokenize_chinese_chars": False}),
    "unigram": Variant("unigram"),
    "unigram as written": Variant("unigram", charsmap=False),
    "unigram, no prefix": Variant("unigram", {"add_prefix_space": False}),
}


def open_folder(folder: Path) -> Tokenizer:
    writer = GGUFWriter(None, "bert")
    vocabulary = read_vocabulary(folder, Fields.read_if_present(folder / "config.json"))
    add_vocabulary(writer, vocabulary, Fields(folder, {"type_vocab_size": 2}))
    path = folder / "vocabulary.gguf"
    writer.write_header(path, [])
    writer.close()
    return Tokenizer(GGUFFile(path))


VOCABULARY_KEYS = "tokenizer.ggml."


def open_vocabulary(folder: Path, base: Mapping[str, Value], **changes: Value | None) -> Tokenizer:
    """Open a vocabulary of these entries, some of them replaced or omitted."""
    entries = {**base, **changes}
    content = [entry(VOCABULARY_KEYS + key, *value) for key, value in entries.items() if value is not None]
    (folder / "v.gguf").write_bytes(gguf(content))
    return Tokenizer(GGUFFile(folder / "v.gguf"))


def packed(rows: Sequence[Sequence[int]]) -> npt.NDArray[np.int32]:
    """Return lists of numbers as one array, in which each list follows its length."""
    return np.array([n for row in rows for n in (len(row), *row)], np.int32)


def unpacked(array: npt.NDArray[np.int32]) -> list[list[int]]:
    rows, at = [], 0
    while at < len(array):
        n = int(array[at])
        rows.append(array[at + 1 : at + 1 + n].tolist())
        at += n + 1
    return rows


@cache
def recorded() -> dict[str, npt.NDArray[Any]]:
    with np.load(io.BytesIO(RECORD.read_bytes())) as arrays:
        return dict(arrays)


def write_recorded(folder: Path, name: str) -> Path:
    """Write the tokenizer of a variant as transformers wrote it."""
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes(recorded()[f"{name}: {file}"].tobytes())
    return folder


def open_recorded(folder: Path, name: str) -> Tokenizer:
    """Open the tokenizer of a variant, and write its files to the folder."""
    return open_folder(write_recorded(folder, name))
