"""Segmentation of texts by the tokenizers library, which can let other threads run during long ones."""

from __future__ import annotations

import os

from tokenizers import Encoding
from tokenizers import Tokenizer as Segmenter

LONG = 1 << 12  # characters, which take some milliseconds
_PARALLELISM = "TOKENIZERS_PARALLELISM"


def let_threads_run() -> None:
    """Let other threads of this process run while a long text is segmented.

    The library releases the GIL for batches only. Unless its own threads are switched off, it segments a
    batch in them, and writes a warning when the process is forked later.
    """
    os.environ.setdefault(_PARALLELISM, "false")


def segmented_ids(segmenter: Segmenter, text: str) -> list[int]:
    """Return the ids of the tokens of a text."""
    if _holds_gil(text):
        return segmenter.encode(text, add_special_tokens=False).ids
    return segmenter.encode_batch_fast([text], add_special_tokens=False)[0].ids


def segmented(segmenter: Segmenter, text: str) -> Encoding:
    """Return the tokens of a text with their words and characters."""
    if _holds_gil(text):
        return segmenter.encode(text, add_special_tokens=False)
    return segmenter.encode_batch([text], add_special_tokens=False)[0]


def _holds_gil(text: str) -> bool:
    return len(text) < LONG or os.environ.get(_PARALLELISM) != "false"
