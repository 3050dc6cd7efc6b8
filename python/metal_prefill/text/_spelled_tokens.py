"""Tokens that are recognized by their spelling, and the white space that belongs to them."""

from __future__ import annotations

import re
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
    def _finders(self) -> tuple[_Finder, _Finder]:
        """Finders of user-defined tokens, and of these and special tokens."""
        return _Finder(self.user_defined), _Finder(self.user_defined | self.special)

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


class _Finder:
    """Finds the longest of many spellings at each place of a text.

    A regular expression would try all of them at a place, and takes 100 times the memory of the spellings.
    """

    def __init__(self, spellings: Collection[str]) -> None:
        self._spellings = frozenset(spellings)
        found: dict[str, set[int]] = {}
        for spelling in self._spellings:
            found.setdefault(spelling[:2], set()).add(len(spelling))
        for start in [start for start in found if len(start) == 2 and start[0] in self._spellings]:
            found[start].add(1)
        # Lengths by the first two characters, the longest first.
        self._lengths = {start: sorted(lengths, reverse=True) for start, lengths in found.items()}
        pairs = [start for start in found if len(start) == 2]
        places = [_one_of(start for start in found if len(start) == 1)]
        if pairs:
            places.append(f"{_one_of(pair[0] for pair in pairs)}(?={_one_of(pair[1] for pair in pairs)})")
        self._place = re.compile("|".join(filter(None, places))) if self._spellings else None

    def spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield the start and end of each spelling in a text."""
        at = 0
        while self._place is not None and (place := self._place.search(text, at)):
            start = place.start()
            at = start + 1
            lengths = self._lengths.get(text[start : start + 2]) or self._lengths.get(text[start])
            for length in lengths or ():
                spelling = text[start : start + length]
                if spelling in self._spellings:
                    at = start + len(spelling)  # the text may end sooner
                    yield start, at
                    break


def _one_of(characters: Iterable[str]) -> str:
    """Return the pattern of one of these characters; empty without any."""
    escaped = "".join(map(re.escape, sorted(set(characters))))
    return f"[{escaped}]" if escaped else ""
