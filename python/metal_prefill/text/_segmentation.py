"""Pieces of texts: tokens that are recognized by their spelling, and the tokens of the text between them.

The tokenizers library segments text. WordPiece makes tokens of words one by one, and looking up those of
ASCII text takes less time.
"""

from __future__ import annotations

import os
import re
import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from itertools import compress
from typing import NamedTuple

import numpy as np
from tokenizers import Encoding, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Segmenter

from metal_prefill._support.cached_property import cached_property
from metal_prefill.files._gguf_file import GGUFFile
from metal_prefill.text._segmenters import MAX_WORD_CHARACTERS
from metal_prefill.text._vocabulary import SPACE, SPECIAL_TYPES, TokenType, Vocabulary

LONG = 1 << 12  # characters, which take some milliseconds
_PARALLELISM = "TOKENIZERS_PARALLELISM"


def let_threads_run() -> None:
    """Let other threads of this process run while a long text is segmented.

    The library releases the GIL for batches only. Unless its own threads are switched off, it segments a
    batch in them, and writes a warning when the process is forked later.
    """
    os.environ.setdefault(_PARALLELISM, "false")


def segmented_ids(segmenter: Segmenter, text: str) -> list[int]:
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
# Characters that Unicode calls white space. Python's str.strip() also removes four separators of information.
_WHITE_SPACE = "".join(c for c in map(chr, range(0x3001)) if c.isspace() and not "\x1c" <= c <= "\x1f")

# Characters of words that are neither letters, marks, digits nor connectors: joiners, and letters in circles
# and squares.
_OTHER_WORD = "\u200c\u200d" + "".join(
    chr(code)
    for first, last in ((0x24B6, 0x24E9), (0x1F130, 0x1F149), (0x1F150, 0x1F169), (0x1F170, 0x1F189))
    for code in range(first, last + 1)
)


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


class Section(NamedTuple):
    """A token in a text, or the text between two tokens."""

    start: int
    end: int
    token: int | None


class Spellings:
    """Spellings of tokens that are recognized in the same text."""

    def __init__(
        self, special: Mapping[str, int], user_defined: Mapping[str, int], words: Container[int]
    ) -> None:
        self._ids = {**special, **user_defined}
        # Of user-defined tokens, and of these and special tokens.
        self._finders = (Finder(user_defined), Finder(self._ids))
        self._words = words  # ids of tokens that are recognized between words only

    def sections(self, text: str, parse_special: bool) -> Iterator[Section]:
        """Yield the tokens in a text, and the texts before and after each, which may be empty."""
        last = 0
        for start, end in self._finders[parse_special].spans(text):
            token = self._ids[text[start:end]]
            adjacent = text[max(start - 1, 0) : start], text[end : end + 1]
            if token not in self._words or not any(map(_is_word, adjacent)):
                yield Section(last, start, None)
                yield Section(start, end, token)
                last = end
        yield Section(last, len(text), None)


def _is_word(character: str) -> bool:
    """Return whether a character is one of words, as Unicode's regular expressions define them."""
    if not character:
        return False
    kind = unicodedata.category(character)
    return kind[0] in "LM" or kind in ("Nd", "Nl", "Pc") or character in _OTHER_WORD


class SpelledTokens:
    """Control tokens and user-defined tokens of a vocabulary."""

    def __init__(self, gguf: GGUFFile, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._strips_before = vocabulary.spelling(gguf, "lstrip")
        self._strips_after = vocabulary.spelling(gguf, "rstrip")
        # Ids of tokens that are recognized between words only, or in normalized text, between the others.
        self.words = vocabulary.spelling(gguf, "single_word")
        self.normalized = vocabulary.spelling(gguf, "normalized")

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

    @cached_property
    def _as_written(self) -> Spellings:
        special, user_defined = (
            {text: i for text, i in ids.items() if i not in self.normalized}
            for ids in (self.special, self.user_defined)
        )
        return Spellings(special, user_defined, self.words)

    @cached_property
    def _special_finder(self) -> Finder:
        return Finder(self.special)

    def special_in(self, text: str) -> bool:
        """Return whether a text may spell a control token."""
        return not self.normalized.isdisjoint(self.special.values()) or self._special_finder.finds(text)

    def split(self, text: str, parse_special: bool) -> Iterator[str | int]:
        """Split text at the tokens that are recognized in it as it is written."""
        for start, end, token in self._as_written.sections(text, parse_special):
            if token is not None:
                yield token
            elif end > start:
                yield text[start:end]

    @property
    def take_white_space(self) -> bool:
        """Whether white space next to some tokens belongs to them."""
        return bool(self._strips_before or self._strips_after)

    def without_white_space(self, pieces: list[str | int]) -> list[str | int]:
        """Remove the white space that belongs to the tokens next to it."""
        if not self.take_white_space:
            return pieces
        made: list[str | int] = []
        for before, piece, after in zip([None, *pieces], pieces, [*pieces[1:], None]):  # noqa: B905
            if isinstance(piece, str):
                if before in self._strips_after:
                    piece = piece.lstrip(_WHITE_SPACE)
                if after in self._strips_before:
                    piece = piece.rstrip(_WHITE_SPACE)
            made.append(piece)
        return made


class NormalText:
    """Normalized texts of a tokenizer, and the tokens in them.

    The tokenizers library recognizes tokens in two steps: most of them in text as it is written, and those
    with the option ``normalized`` in the normalized text between those of the first step.

    A text is given as one of several pieces, with tokens between them. A token that is recognized in
    normalized text may be among these, in prompts whose texts do not spell tokens.
    """

    def __init__(
        self,
        spelled: SpelledTokens,
        normalizer: normalizers.Normalizer | None,
        *,
        marks: bool = False,  # whether U+2581 represents spaces, instead of a normalizer
        prepends: bool = False,  # whether it also begins each text
    ) -> None:
        self._spelled, self._normalizer = spelled, normalizer
        self._marks, self._prepends = marks, prepends
        special, self.user_defined = self._normalized(spelled.special), self._normalized(spelled.user_defined)
        self._spellings = Spellings(special, self.user_defined, spelled.words)

    def _normalized(self, ids: Mapping[str, int]) -> dict[str, int]:
        found: dict[str, int] = {}
        for spelling, i in ids.items():
            if i in self._spelled.normalized:
                found.setdefault(self._normal(spelling, begins=True), i)
        found.pop("", None)
        return found

    def _normal(self, text: str, *, begins: bool) -> str:
        if self._normalizer is not None:
            return self._normalizer.normalize_str(text)
        if not self._marks:
            return text
        return (SPACE if text and begins and self._prepends else "") + text.replace(" ", SPACE)

    def of(self, pieces: Sequence[str | int], at: int) -> str:
        """Return the normalized text of a piece."""
        follows = at > 0 and pieces[at - 1] in self._spelled.normalized  # with which it was one text
        text = self._normal(_text(pieces, at), begins=not follows)
        # A token begins with the space before it.
        ends = self._prepends and at + 1 < len(pieces) and pieces[at + 1] in self._spelled.normalized
        return text.removesuffix(SPACE) if ends else text

    def split(self, text: str, parse_special: bool) -> list[Section]:
        """Split normalized text at its tokens, without the white space that belongs to them."""
        found = list(self._spellings.sections(text, parse_special))
        kept = self._spelled.without_white_space(
            [text[start:stop] if token is None else token for start, stop, token in found]
        )
        sections = []
        for section, left in zip(found, kept, strict=True):
            if isinstance(left, int):
                sections.append(section)
            elif left:
                start = text.index(left, section.start)
                sections.append(Section(start, start + len(left), None))
        return sections

    def places(self, pieces: Sequence[str | int], at: int) -> list[tuple[int, int]]:
        """Return the place in a piece, as it is written, of each character of its normalized text."""
        text, normal = _text(pieces, at), self.of(pieces, at)
        if self._normalizer is None or text == normal:
            added = len(normal) - len(text)
            return [(max(i - added, 0), max(i + 1 - added, 0)) for i in range(len(normal))]
        return self._characters.encode(text, add_special_tokens=False).offsets

    @cached_property
    def _characters(self) -> Segmenter:
        """Segmenter whose tokens are the characters of normalized text."""
        segmenter = Segmenter(models.WordLevel({"": 0}, ""))
        assert self._normalizer is not None
        segmenter.normalizer = self._normalizer
        segmenter.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        return segmenter

    def split_as_written(
        self, pieces: Sequence[str | int], at: int, parse_special: bool
    ) -> Iterator[str | int]:
        """Split a piece, as it is written, at the tokens in its normalized text."""
        given, places = _text(pieces, at), self.places(pieces, at)
        end = 0
        for start, stop, token in self.split(self.of(pieces, at), parse_special):
            if token is not None:
                # The space with which a token begins stays in the text before it, as in prompts of others.
                first = places[start][int(self._prepends)]
                if first > end:
                    yield given[end:first]
                yield token
                end = places[stop - 1][1]
        if end < len(given):
            yield given[end:]


def _text(pieces: Sequence[str | int], at: int) -> str:
    text = pieces[at]
    assert isinstance(text, str)
    return text


class Finder:
    """Finds the longest of many spellings at each place of a text.

    The number of comparisons at a place grows with the logarithms of the number of spellings and of their
    length. A regular expression would try all spellings, and takes 100 times their memory.
    """

    def __init__(self, spellings: Collection[str]) -> None:
        self._sorted = sorted(set(spellings))
        self.longest = max(map(len, self._sorted), default=0)  # length of the longest spelling
        # For each spelling, the lengths of those that it begins with, its own and 0 included, as bits.
        self._lengths: list[int] = []
        prefixes: list[tuple[str, int]] = [("", 1)]  # of the latest spelling
        for spelling in self._sorted:
            while not spelling.startswith(prefixes[-1][0]):
                prefixes.pop()
            self._lengths.append(prefixes[-1][1] | 1 << len(spelling))
            prefixes.append((spelling, self._lengths[-1]))
        starts = {spelling[:2] for spelling in self._sorted}
        pairs = [start for start in starts if len(start) == 2]
        places = [_one_of(start for start in starts if len(start) == 1)]
        if pairs:
            places.append(f"{_one_of(pair[0] for pair in pairs)}(?={_one_of(pair[1] for pair in pairs)})")
        self._place = re.compile("|".join(filter(None, places))) if self._sorted else None

    def finds(self, text: str) -> bool:
        return next(self.spans(text), None) is not None

    def spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield the start and end of each spelling in a text."""
        at = 0
        while self._place is not None and (place := self._place.search(text, at)):
            start = place.start()
            at = start + 1
            if length := self.length(text, start):
                at = start + length
                yield start, at

    def length(self, text: str, start: int) -> int:
        """Return the length of the longest spelling at a place of a text, 0 if there is none."""
        text = text[start : start + self.longest]
        i = bisect_right(self._sorted, text) - 1
        if i < 0:
            return 0
        # A spelling that the text begins with is also a prefix of the last one that is not after the text.
        last = self._sorted[i]
        common = bisect_left(
            range(min(len(text), len(last))), True, key=lambda n: text[: n + 1] != last[: n + 1]
        )
        return (self._lengths[i] & ((2 << common) - 1)).bit_length() - 1


def _one_of(characters: Iterable[str]) -> str:
    """Return the pattern of one of these characters; empty without any."""
    escaped = "".join(map(re.escape, sorted(set(characters))))
    return f"[{escaped}]" if escaped else ""
