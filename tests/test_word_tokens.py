"""Remembered tokens of words, next to those of the tokenizers library."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest
from support import encoder_tokenizers as recorded
from support.hostile_texts import hostile_texts

from metal_prefill.text import _word_tokens
from metal_prefill.text._tokenizer import Tokenizer
from metal_prefill.text._word_tokens import WordTokens

Opened = tuple[Tokenizer, WordTokens]
# A text in three or four has a control character.
ASCII = [chr(code) for code in (*(list(range(32, 127)) * 20), *range(32), 127)]
WORDS = ("the", "The", "king", "unaffable", "x" * 101, "isn't", "a_b", "3.14", "[MASK]", "##s", "-")


@pytest.fixture(params=["uncased", "cased"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Opened:
    folder = recorded.write_recorded(tmp_path, request.param, recorded.recorded())
    tokenizer = recorded.open_folder(folder)
    words = tokenizer._words
    assert words is not None
    return tokenizer, words


def texts(random: Random, count: int) -> list[str]:
    """Return texts of words and of single characters, some of which are controls."""
    made = ["".join(random.choices(ASCII, k=random.randint(0, 30))) for _ in range(count)]
    made += [random.choice(" \t\n\v,-").join(random.choices(WORDS, k=9)) for _ in range(count)]
    return [*made, *(text for text in hostile_texts(count, random.randrange(2**32)) if text.isascii())]


def by_library(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    return lambda text: tokenizer._segmenter.encode(text, add_special_tokens=False).ids


def test_tokens_are_those_of_the_library(opened: Opened) -> None:
    tokenizer, words = opened
    expected = by_library(tokenizer)
    taken = 0
    for text in texts(Random(1), 400):
        for _ in range(2):  # with new words, then with known ones
            assert tokenizer.encode(text, add_bos=False) == expected(text), repr(text)
        taken += words.encode(text) is not None
    assert taken > 400


def test_other_text_is_left_to_the_library(opened: Opened) -> None:
    _, words = opened
    for text in ("é", "a\x00b", "a\vb", "\x7f", "漢", "\u2028"):
        assert words.encode(text) is None
    assert words.encode("") == words.encode(" \t\r\n") == []


def test_memory_is_bounded(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, words = opened
    monkeypatch.setattr(_word_tokens, "MOST_WORDS", 50)
    random = Random(2)
    for _ in range(100):
        text = " ".join(f"{random.randrange(10**6):x}" for _ in range(9)) + " " + "y" * 1000
        assert tokenizer.encode(text, add_bos=False) == by_library(tokenizer)(text)
    assert 50 <= len(words._known) < 60
    assert max(map(len, words._known)) <= 100


def test_threads_share_the_words(opened: Opened) -> None:
    tokenizer, _ = opened
    made = texts(Random(3), 200)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: [tokenizer.encode(text, add_bos=False) for text in made], range(4)))
    assert found == [list(map(by_library(tokenizer), made))] * 4
