"""Tokens that are recognized by their spelling, and the white space that belongs to them."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence

import numpy as np

from metal_prefill._support.cached_property import cached_property
from metal_prefill.files._gguf_file import GGUFFile
from metal_prefill.text._vocabulary import SPECIAL_TYPES, TokenType, Vocabulary

# Characters that Unicode calls white space. Python's str.strip() also removes four separators of information.
_WHITE_SPACE = "".join(c for c in map(chr, range(0x3001)) if c.isspace() and not "\x1c" <= c <= "\x1f")


class SpelledTokens:
    """Control tokens and user-defined tokens of a vocabulary."""

    def __init__(self, gguf: GGUFFile, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._strips_before = vocabulary.spelling(gguf, "lstrip")
        self._strips_after = vocabulary.spelling(gguf, "rstrip")

    @cached_property
    def special(self) -> dict[str, int]:
        """Ids of control and unknown tokens, by spelling."""
        return self._by_spelling(SPECIAL_TYPES)

    @cached_property
    def user_defined(self) -> dict[str, int]:
        """Ids of user-defined tokens, which replace their spelling wherever it occurs, by spelling.

        Those of WordPiece are recognized by the segmenter, also in normalized text.
        """
        if self._vocabulary.kind == "bert":
            return {}
        return self._by_spelling((TokenType.USER_DEFINED,))

    def _by_spelling(self, types: Sequence[TokenType]) -> dict[str, int]:
        tokens = self._vocabulary.tokens
        ids = np.flatnonzero(np.isin(self._vocabulary.types, types))
        return {tokens[i]: int(i) for i in ids if tokens[i]}

    @cached_property
    def _finders(self) -> tuple[Finder, Finder, Finder]:
        """Finders of user-defined tokens, of these and special tokens, and of special tokens."""
        both = self.user_defined | self.special
        return Finder(self.user_defined), Finder(both), Finder(self.special)

    def special_in(self, text: str) -> bool:
        """Return whether a text spells a control token."""
        return self._finders[2].finds(text)

    def split(self, text: str, parse_special: bool) -> Iterator[str | int]:
        """Split text at the tokens that are recognized by their spelling."""
        end = 0
        for start, stop in self._finders[parse_special].spans(text):
            if start > end:
                yield text[end:start]
            spelling = text[start:stop]
            found = self.user_defined.get(spelling)
            yield self.special[spelling] if found is None else found
            end = stop
        if end < len(text):
            yield text[end:]

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
        """Return whether a text contains a spelling."""
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
