"""Normalized text, in which some tokens are recognized by their normalized spelling.

The tokenizers library recognizes tokens in two steps: most of them in text as it is written, and those with
the option ``normalized`` in the normalized text between those of the first step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tokenizers import Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Segmenter

from metal_prefill._support.cached_property import cached_property
from metal_prefill.text._encoder_vocabulary import SPACE
from metal_prefill.text._segmentation import Section, SpelledTokens, Spellings


class NormalText:
    """Normalized texts of a tokenizer, and the tokens in them.

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
