"""Segmentation of text into tokens by the tokenizers library.

WordPiece segments each word alone, so that tokens of ASCII words are looked up instead, in less time.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress

import numpy as np
from tokenizers import AddedToken, Encoding, models
from tokenizers import Tokenizer as Segmenter

from metal_prefill._support.cached_property import cached_property
from metal_prefill.errors import UnsupportedModelError
from metal_prefill.files._gguf_file import GGUFFile
from metal_prefill.text._segmenters import MAX_WORD_CHARACTERS, Pipeline
from metal_prefill.text._vocabulary import SPACE, SPECIAL_TYPES, SPELLING_KEYS, TokenType, Vocabulary

LONG = 1 << 12  # characters, which take some milliseconds
_PARALLELISM = "TOKENIZERS_PARALLELISM"


def let_threads_run() -> None:
    """Let other threads of this process run while a long text is segmented.

    The library releases the GIL for batches only. Unless its own threads are switched off, it segments a
    batch in them, and writes a warning when the process is forked later.
    """
    os.environ.setdefault(_PARALLELISM, "false")


class TextSegmenter:
    """A model of the tokenizers library, and the tokens that texts spell."""

    def __init__(
        self,
        model: models.Model,
        pipeline: Pipeline,
        spelled: Sequence[tuple[AddedToken, int]] = (),  # tokens and their ids
    ) -> None:
        normalizer, pre_tokenizer = pipeline
        segmenter = self._segmenter = Segmenter(model)
        if normalizer is not None:
            segmenter.normalizer = normalizer
            # The library panics if nothing is left of a token.
            spelled = [
                (token, i)
                for token, i in spelled
                if not token.normalized or normalizer.normalize_str(token.content)
            ]
        if pre_tokenizer is not None:
            segmenter.pre_tokenizer = pre_tokenizer
        self._size = segmenter.get_vocab_size()
        segmenter.add_tokens([token for token, _ in spelled])
        # The library numbers tokens that are not in the vocabulary of the model after those that are.
        self._ids = {
            number: i
            for token, i in spelled
            if (number := segmenter.token_to_id(token.content) or 0) >= self._size
        }

    def ids(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        return self._translated(self._encoded(text, places=False).ids)

    def spans(self, text: str) -> Iterable[tuple[int, tuple[int, int]]]:
        """Return the tokens of a text, and the first character of each and the one after its last."""
        encoding = self._encoded(text, places=True)
        return zip(self._translated(encoding.ids), encoding.offsets, strict=True)

    def vocabulary(self) -> dict[str, int]:
        return self._segmenter.get_vocab()

    def tokens_of_words(self, words: Sequence[str]) -> dict[str, list[int]]:
        """Return the tokens of each word, as the pre-tokenizer separates words at spaces."""
        encoding = self._encoded(" ".join(words), places=True)
        made: dict[str, list[int]] = {word: [] for word in words}
        for place, token in zip(encoding.word_ids, encoding.ids, strict=True):
            assert place is not None  # only special tokens have no word
            made[words[place]].append(token)
        return made

    def _encoded(self, text: str, *, places: bool) -> Encoding:
        try:
            if len(text) < LONG or os.environ.get(_PARALLELISM) != "false":
                return self._segmenter.encode(text, add_special_tokens=False)
            encode = self._segmenter.encode_batch if places else self._segmenter.encode_batch_fast
            return encode([text], add_special_tokens=False)[0]
        except BaseException as error:
            if type(error).__name__ != "PanicException":
                raise
            raise UnsupportedModelError(
                f"the tokenizers library cannot find the tokens of the vocabulary in {text[:40]!r}: {error}"
            ) from None

    def _translated(self, ids: list[int]) -> list[int]:
        if not self._ids or max(ids, default=0) < self._size:
            return ids
        return [self._ids.get(i, i) for i in ids]


# BERT's tokenizer removes other control characters, and changes text beyond ASCII in several ways.
_OTHER = re.compile(r"[^\t\n\r -~]")
_WORD = re.compile(r"[0-9A-Za-z]+|[!-/:-@\[-`{-~]")  # each punctuation mark is a word
_END = "\0"  # after each of several texts, which do not contain it
_WORDS = re.compile(f"{_WORD.pattern}|{_END}")
_NO_TOKEN = -1  # of the end of a text
_MOST_SPELLED = 100  # tokens that are searched for in each text


class WordTokens:
    """WordPiece by looking up words, in a quarter to a half of the time of the tokenizers library.

    A word that is a token becomes that token; the library converts the others of a text together. Words of
    texts are not cached: the time of a text would reveal whether another one had the same words.
    """

    def __init__(
        self,
        segmenter: TextSegmenter,  # of WordPiece, without spelled tokens
        *,
        lowercase: bool,  # whether it converts text to lower case
        user_defined: Iterable[str] = (),  # tokens that every text spells, as written and as normalized
        special: Iterable[str] = (),  # those that texts spell with `parse_special`
    ) -> None:
        # Each text in lower case that spells a token contains one of these: without and with `parse_special`.
        self._spelled = (_first_words(user_defined), _first_words((*user_defined, *special)))
        self._segmenter = segmenter
        self._lowercase = lowercase
        self._tokens = {
            word: token
            for word, token in segmenter.vocabulary().items()
            if len(word) <= MAX_WORD_CHARACTERS and _WORD.fullmatch(word)
        }
        self._tokens[_END] = _NO_TOKEN

    def encode(self, text: str, *, parse_special: bool = False) -> list[int] | None:
        """Return the ids of the segmenter; None if the text is not plain ASCII words, or spells a token."""
        if not _is_plain(text) or self._spells(lowered := text.lower(), parse_special):
            return None
        return self._ids_of(_WORD.findall(lowered if self._lowercase else text))

    def encode_all(self, texts: Sequence[str], *, parse_special: bool = False) -> list[list[int] | None]:
        """Return the result of `encode` for each text.

        The words of all texts are looked up together, in half of the time of one text after another.
        """
        plain = list(map(_is_plain, texts))
        joined = self._joined(texts, plain)
        lowered = joined.lower()
        if self._spells(lowered, parse_special):
            plain = [
                is_plain and not self._spells(text.lower(), parse_special)
                for text, is_plain in zip(texts, plain, strict=True)
            ]
            joined = self._joined(texts, plain)
            lowered = joined.lower()
        made = _divided(self._ids_of(_WORDS.findall(lowered if self._lowercase else joined)))
        return [next(made) if is_plain else None for is_plain in plain]

    def _spells(self, lowered: str, parse_special: bool) -> bool:
        return any(map(lowered.__contains__, self._spelled[parse_special]))

    @staticmethod
    def _joined(texts: Sequence[str], chosen: Sequence[bool]) -> str:
        return "".join(f"{text}{_END}" for text in compress(texts, chosen))

    def _ids_of(self, words: list[str]) -> list[int]:
        tokens = self._tokens
        try:
            return [tokens[word] for word in words]
        except KeyError:
            others = [word for word in dict.fromkeys(words) if word not in tokens]
            made = self._segmenter.tokens_of_words(others)
        ids: list[int] = []
        for word in words:
            if word in tokens:
                ids.append(tokens[word])
            else:
                ids += made[word]
        return ids


def _first_words(spellings: Iterable[str]) -> tuple[str, ...]:
    """Return the first words of spellings in lower case; for many, the empty text, which all contain."""
    found = {" ".join(text.lower().split()[:1]) for text in spellings}
    return tuple(found) if len(found) <= _MOST_SPELLED else ("",)


def _is_plain(text: str) -> bool:
    return text.isascii() and (text.isprintable() or not _OTHER.search(text))


def _divided(ids: list[int]) -> Iterator[list[int]]:
    """Divide ids at the ends of texts."""
    start = 0
    while start < len(ids):
        end = ids.index(_NO_TOKEN, start)
        yield ids[start:end]
        start = end + 1


# Characters that Unicode calls white space. Python's str.strip() also removes four separators of information.
_WHITE_SPACE = "".join(c for c in map(chr, range(0x3001)) if c.isspace() and not "\x1c" <= c <= "\x1f")
_SPACES = _WHITE_SPACE + SPACE


class SpelledTokens:
    """Control tokens and user-defined tokens of a vocabulary."""

    def __init__(self, gguf: GGUFFile, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._options = {option: vocabulary.spelling(gguf, option) for option in SPELLING_KEYS}
        self.normalized = self._options["normalized"]
        self.with_options = frozenset[int]().union(*self._options.values())

    @cached_property
    def special(self) -> dict[str, int]:
        """Ids of control and unknown tokens, by spelling."""
        return self._by_spelling(SPECIAL_TYPES)

    @cached_property
    def user_defined(self) -> dict[str, int]:
        """Ids of user-defined tokens, which replace their spelling wherever it occurs, by spelling."""
        return self._by_spelling((TokenType.USER_DEFINED,))

    def _by_spelling(self, types: Sequence[TokenType]) -> dict[str, int]:
        spelled = self._vocabulary.spelled
        ids = np.flatnonzero(np.isin(self._vocabulary.types, types))
        return {spelled(i): i for i in map(int, ids) if spelled(i)}

    def recognized(self, parse_special: bool) -> list[tuple[AddedToken, int]]:
        """Return the tokens that a text spells, and their ids."""
        ids = {**self.special, **self.user_defined} if parse_special else self.user_defined
        return [
            (AddedToken(text, **{option: i in listed for option, listed in self._options.items()}), i)
            for text, i in ids.items()
        ]

    @property
    def take_white_space(self) -> bool:
        """Whether white space next to some tokens belongs to them."""
        return bool(self._options["lstrip"] or self._options["rstrip"])

    def text_between(self, before: str | int | None, text: str, after: str | int | None) -> str:
        """Return the text between two pieces, without the white space that belongs to tokens."""
        if before in self._options["rstrip"]:
            text = text.lstrip(_WHITE_SPACE)
        if after in self._options["lstrip"]:
            text = text.rstrip(_WHITE_SPACE)
        return text

    def place_of(self, token: int, text: str, start: int, end: int) -> tuple[int, int]:
        """Return the place of a token in `with_options`, without the white space that belongs to it."""
        spelling = self._vocabulary.spelled(token)
        if spelling[0] not in _SPACES:
            start = end - len(text[start:end].lstrip(_SPACES))
        if spelling[-1] not in _SPACES:
            end = start + len(text[start:end].rstrip(_SPACES))
        return start, end
