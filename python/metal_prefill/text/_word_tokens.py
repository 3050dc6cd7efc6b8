"""Tokens of the words of ASCII text, which WordPiece makes of each word alone."""

from __future__ import annotations

import re
from itertools import chain

from tokenizers import Tokenizer as Segmenter

from metal_prefill.text._encoder_vocabulary import MAX_WORD_CHARACTERS

MOST_WORDS = 1 << 16  # that are remembered, in up to 20 MB

# BERT's tokenizer removes other control characters, and changes text beyond ASCII in several ways.
_OTHER = re.compile(r"[^\t\n\r -~]")
_WORD = re.compile(r"[0-9A-Za-z]+|[!-/:-@\[-`{-~]")  # each punctuation mark is a word


class WordTokens:
    """Tokens of words seen before. To look them up takes a fifth of the time of the tokenizers library.

    Safe to use from several threads.

    Parameters
    ----------
    segmenter
        WordPiece segmenter.
    lowercase
        Whether it converts text to lower case.
    """

    def __init__(self, segmenter: Segmenter, *, lowercase: bool) -> None:
        self._segmenter = segmenter
        self._lowercase = lowercase
        self._known: dict[str, tuple[int, ...]] = {}

    def encode(self, text: str) -> list[int] | None:
        """Return the ids that the segmenter makes of a text; None if the text is not plain ASCII."""
        if _OTHER.search(text):
            return None
        words, known = _WORD.findall(text.lower() if self._lowercase else text), self._known
        try:
            return list(chain.from_iterable([known[word] for word in words]))
        except KeyError:
            made = self._segmented([word for word in dict.fromkeys(words) if word not in known])
        if len(known) < MOST_WORDS:
            known.update((word, ids) for word, ids in made.items() if len(word) <= MAX_WORD_CHARACTERS)
        return list(chain.from_iterable([made.get(word) or known[word] for word in words]))

    def _segmented(self, words: list[str]) -> dict[str, tuple[int, ...]]:
        encoding = self._segmenter.encode(" ".join(words), add_special_tokens=False)
        ids: list[list[int]] = [[] for _ in words]
        for place, token in zip(encoding.word_ids, encoding.ids, strict=True):
            assert place is not None  # only special tokens have no word
            ids[place].append(token)
        return dict(zip(words, map(tuple, ids), strict=True))
