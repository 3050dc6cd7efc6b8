"""Tokens of texts by the tokenizers library, and of ASCII text by its words, which takes less time.

The library can let other threads run during long texts. WordPiece makes tokens of words one by one.
"""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress

from tokenizers import Encoding
from tokenizers import Tokenizer as Segmenter

from metal_prefill.text._encoder_vocabulary import MAX_WORD_CHARACTERS
from metal_prefill.text._spelled_tokens import Finder

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


# BERT's tokenizer removes other control characters, and changes text beyond ASCII in several ways.
_OTHER = re.compile(r"[^\t\n\r -~]")
_WORD = re.compile(r"[0-9A-Za-z]+|[!-/:-@\[-`{-~]")  # each punctuation mark is a word
_END = "\0"  # after each of several texts, which do not contain it
_WORDS = re.compile(f"{_WORD.pattern}|{_END}")
_NO_TOKEN = -1  # of the end of a text


class WordTokens:
    """WordPiece by looking up words, in a quarter to a half of the time of the tokenizers library.

    A word that is a token becomes that token; the library converts the others of a text together. Words of
    texts are not remembered, or the time of a text would tell whether another one had the same words.
    """

    def __init__(
        self,
        segmenter: Segmenter,  # WordPiece segmenter
        *,
        lowercase: bool,  # whether it converts text to lower case
        spelled: Iterable[str] = (),  # tokens that the segmenter recognizes by their spelling
    ) -> None:
        spellings = {text.lower().strip() for text in spelled}
        self._finder = Finder(spellings)
        self._spaced = "" in spellings  # a token of white space is everywhere
        self._segmenter = segmenter
        self._lowercase = lowercase
        self._tokens = {
            word: token
            for word, token in segmenter.get_vocab().items()
            if len(word) <= MAX_WORD_CHARACTERS and _WORD.fullmatch(word)
        }
        self._tokens[_END] = _NO_TOKEN

    def encode(self, text: str) -> list[int] | None:
        """Return the ids that the segmenter makes of a text; None if it is not plain ASCII words."""
        if not _is_plain(text) or self._spells(lowered := text.lower()):
            return None
        return self._ids_of(_WORD.findall(lowered if self._lowercase else text))

    def encode_all(self, texts: Sequence[str]) -> list[list[int] | None]:
        """Return what `encode` returns for each text.

        The words of all texts are looked up together, in half of the time of one text after another.
        """
        plain = list(map(_is_plain, texts))
        joined = self._joined(texts, plain)
        lowered = joined.lower()
        if self._spells(lowered):
            plain = [
                is_plain and not self._spells(text.lower())
                for text, is_plain in zip(texts, plain, strict=True)
            ]
            joined = self._joined(texts, plain)
            lowered = joined.lower()
        made = _divided(self._ids_of(_WORDS.findall(lowered if self._lowercase else joined)))
        return [next(made) if is_plain else None for is_plain in plain]

    def _spells(self, lowered: str) -> bool:
        return self._spaced or self._finder.finds(lowered)

    @staticmethod
    def _joined(texts: Sequence[str], chosen: Sequence[bool]) -> str:
        return "".join(f"{text}{_END}" for text in compress(texts, chosen))

    def _ids_of(self, words: list[str]) -> list[int]:
        tokens = self._tokens
        try:
            return [tokens[word] for word in words]
        except KeyError:
            made = self._segmented([word for word in dict.fromkeys(words) if word not in tokens])
        ids: list[int] = []
        for word in words:
            if word in tokens:
                ids.append(tokens[word])
            else:
                ids += made[word]
        return ids

    def _segmented(self, words: list[str]) -> dict[str, list[int]]:
        joined = " ".join(words)
        if self._spells(joined.lower()):  # words that did not follow each other
            return {word: segmented_ids(self._segmenter, word) for word in words}
        encoding = segmented(self._segmenter, joined)
        made: dict[str, list[int]] = {word: [] for word in words}
        for place, token in zip(encoding.word_ids, encoding.ids, strict=True):
            assert place is not None  # only special tokens have no word
            made[words[place]].append(token)
        return made


def _is_plain(text: str) -> bool:
    return text.isascii() and (text.isprintable() or not _OTHER.search(text))


def _divided(ids: list[int]) -> Iterator[list[int]]:
    """Divide ids at the ends of texts."""
    start = 0
    while start < len(ids):
        end = ids.index(_NO_TOKEN, start)
        yield ids[start:end]
        start = end + 1
