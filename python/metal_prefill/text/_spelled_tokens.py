"""Tokens that are recognized by their spelling, and the white space that belongs to them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

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
    def _patterns(self) -> tuple[re.Pattern[str] | None, re.Pattern[str] | None]:
        """Patterns of user-defined tokens, and of these and special tokens, longest first; None if empty."""
        return _alternatives(self.user_defined), _alternatives(self.user_defined | self.special)

    def split(self, text: str, parse_special: bool) -> Iterator[str | int]:
        """Split text at the tokens that are recognized by their spelling."""
        pattern = self._patterns[parse_special]
        end = 0
        for match in pattern.finditer(text) if pattern else ():
            if match.start() > end:
                yield text[end : match.start()]
            found = self.user_defined.get(match[0])
            yield self.special[match[0]] if found is None else found
            end = match.end()
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


def _alternatives(tokens: Iterable[str]) -> re.Pattern[str] | None:
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
