"""Recognition of tokens by their spelling."""

import time
from collections.abc import Callable
from random import Random

import pytest
from tokenizers import AddedToken, models, normalizers

from metal_prefill import UnsupportedModelError
from metal_prefill.text._segmentation import TextSegmenter
from metal_prefill.text._segmenters import Pipeline


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
    spelled = [(AddedToken(spelling, normalized=False), i) for i, spelling in enumerate(spellings)]
    assert TextSegmenter(models.BPE(), Pipeline(None, None), spelled).ids(text) == []
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
