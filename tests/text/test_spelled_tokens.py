"""Recognition of many tokens by their spelling."""

from __future__ import annotations

import re
import time
from random import Random
from typing import Any

import pytest

from metal_prefill.text._segmentation import Finder


def test_the_longest_spelling_is_found_at_each_place() -> None:
    for seed in range(50):
        random = Random(seed)

        def word(most: int, random: Random = random) -> str:
            return "".join(random.choices("ab[]^-\\ \né", k=random.randrange(1, most)))

        spellings = {word(random.choice((2, 3, 6))) for _ in range(random.randrange(1, 20))}
        pattern = re.compile("|".join(map(re.escape, sorted(spellings, key=len, reverse=True))))
        text = word(300)
        assert list(Finder(spellings).spans(text)) == [match.span() for match in pattern.finditer(text)]


def test_a_spelling_is_found_at_the_end_of_a_text() -> None:
    assert list(Finder(("ab", "abcde", "b")).spans("abab")) == [(0, 2), (2, 4)]


def test_without_spellings_nothing_is_found() -> None:
    assert list(Finder(()).spans("abc")) == []


class Counted(str):
    """A text that counts its comparisons and those of its parts."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]
    comparisons = 0

    def __getitem__(self, key: Any) -> Counted:
        return Counted(str(self)[key])

    def __lt__(self, other: str) -> bool:
        Counted.comparisons += 1
        return str(self) < other

    def __eq__(self, other: object) -> bool:
        Counted.comparisons += 1
        return str(self) == other

    def __ne__(self, other: object) -> bool:
        return not self == other


@pytest.mark.parametrize("spelling", ["m" * 999 + "x", "m" * 999 + "a", "mm"])
def test_the_number_of_comparisons_does_not_grow_with_the_number_of_lengths(spelling: str) -> None:
    """A model file may have spellings of 1,024 lengths, none of which ends as the text continues."""
    spellings = {f"mm{'m' * i}{end}" for i in range(1000) for end in "ax"} | {spelling}
    text = Counted("m" * 2000)
    Counted.comparisons = 0
    found = list(Finder(spellings).spans(text))
    assert len(found) == (1000 if spelling == "mm" else 0)
    assert 0 < Counted.comparisons < 25 * 2000  # 11 for 2,001 spellings, 10 for 1,002 characters


def test_the_number_of_spellings_does_not_delay_texts() -> None:
    """A model file may define all of its tokens so; the alternatives of a pattern took 14 s."""
    random = Random(1)
    spellings = {f"a{letter}{i}" for i in range(20_000) for letter in "bcdefgh"}
    text = "".join(random.choices("abcdefgh", k=200_000))
    begin = time.process_time()
    assert list(Finder(spellings).spans(text)) == []
    assert time.process_time() - begin < 2
