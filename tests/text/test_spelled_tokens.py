"""Recognition of tokens by their spelling."""

import re
import time
from collections.abc import Callable, Iterable
from random import Random

import pytest
from tokenizers import AddedToken, models, normalizers

from metal_prefill import UnsupportedModelError
from metal_prefill.text._segmentation import TextSegmenter
from metal_prefill.text._segmenters import Pipeline


def spans(spellings: Iterable[str], text: str) -> list[tuple[int, int]]:
    spelled = [(AddedToken(spelling, normalized=False), i) for i, spelling in enumerate(spellings)]
    return [place for _, place in TextSegmenter(models.BPE(), Pipeline(None, None), spelled).spans(text)]


def test_the_longest_spelling_is_found_at_each_place() -> None:
    for seed in range(50):
        random = Random(seed)

        def word(most: int, random: Random = random) -> str:
            return "".join(random.choices("ab[]^-\\ \né", k=random.randrange(1, most)))

        spellings = {word(random.choice((2, 3, 6))) for _ in range(random.randrange(1, 20))}
        pattern = re.compile("|".join(map(re.escape, sorted(spellings, key=len, reverse=True))))
        text = word(300)
        assert spans(spellings, text) == [match.span() for match in pattern.finditer(text)]


def test_a_spelling_is_found_at_the_end_of_a_text() -> None:
    assert spans(("ab", "abcde", "b"), "abab") == [(0, 2), (2, 4)]


def test_without_spellings_nothing_is_found() -> None:
    assert spans((), "abc") == []


def _lengths() -> tuple[set[str], str]:
    """Return spellings of 1,000 lengths, and a text that each begins, and none ends."""
    return {f"mm{'m' * i}{end}" for i in range(1000) for end in "ax"}, "m" * 50_000


def _many() -> tuple[set[str], str]:
    """Return as many spellings as a large vocabulary has; a pattern of them took 14 s."""
    letters = "".join(Random(1).choices("abcdefgh", k=200_000))
    return {f"a{letter}{i}" for i in range(20_000) for letter in "bcdefgh"}, letters


@pytest.mark.parametrize("make", [_lengths, _many])
def test_spellings_of_a_model_file_do_not_delay_texts(make: Callable[[], tuple[set[str], str]]) -> None:
    spellings, text = make()
    begin = time.process_time()
    assert spans(spellings, text) == []
    assert time.process_time() - begin < 2


def test_a_token_of_which_nothing_is_left_is_not_recognized() -> None:
    """The library would panic: an empty text is between the bytes of a character."""
    pipeline = Pipeline(normalizers.Strip(), None)
    segmenter = TextSegmenter(models.BPE({"\u0301": 0}, []), pipeline, [(AddedToken("  "), 5)])
    assert segmenter.ids("\u0301") == [0]


def test_a_panic_of_the_library_is_an_error_of_the_file() -> None:
    tokens = AddedToken("x", rstrip=True, normalized=False), AddedToken(" ", lstrip=True, normalized=False)
    segmenter = TextSegmenter(models.BPE(), Pipeline(None, None), [(token, 0) for token in tokens])
    with pytest.raises(UnsupportedModelError, match="cannot find the tokens of the vocabulary in 'x  ': "):
        segmenter.ids("x  ")
