"""Tokens of words, next to those of the tokenizers library."""

import time
from pathlib import Path
from random import Random

import pytest
from support.folders.encoder_tokenizers import open_recorded
from support.hostile_texts import hostile_texts
from tokenizers import models, pre_tokenizers

from metal_prefill.text import Tokenizer
from metal_prefill.text._segmentation import TextSegmenter, WordTokens
from metal_prefill.text._segmenters import Pipeline
from metal_prefill.text._tokenizer import _BLOCK

# A text in three or four has a control character.
ASCII = [chr(code) for code in (*(list(range(32, 127)) * 20), *range(32), 127)]
WORDS = ("the", "The", "king", "unaffable", "x" * 101, "isn't", "a_b", "3.14", "[MASK]", "##s", "-")


@pytest.fixture(params=["uncased", "cased"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    return open_recorded(tmp_path, request.param)


def texts(random: Random, count: int) -> list[str]:
    """Return texts of words and of single characters, some of which are controls."""
    made = ["".join(random.choices(ASCII, k=random.randint(0, 30))) for _ in range(count)]
    made += [random.choice(" \t\n\v,-").join(random.choices(WORDS, k=9)) for _ in range(count)]
    return [*made, *(text for text in hostile_texts(count, random.randrange(2**32)) if text.isascii())]


def test_tokens_are_those_of_the_library(tokenizer: Tokenizer) -> None:
    words, taken = tokenizer._words, 0
    assert words is not None
    for text in texts(Random(1), 400):
        expected = tokenizer._segmenter(parse_special=False, begins=True).ids(text)
        assert tokenizer.encode(text, add_bos=False) == expected, repr(text)
        taken += words.encode_all([text]) != [None]
    assert taken > 400


def test_texts_are_encoded_together_as_each_alone(tokenizer: Tokenizer) -> None:
    random = Random(2)
    mixed = [*texts(random, 400), *hostile_texts(100, 5), "", "unaffable " * 3000, "[MASK]", "é"]
    mixed = [text for text in mixed if text.encode("utf-8", "ignore").decode() == text]
    random.shuffle(mixed)
    assert sum(map(len, mixed)) > 3 * _BLOCK
    assert list(tokenizer.encode_all(mixed)) == [tokenizer.encode(text, add_bos=False) for text in mixed]


def segmenter(*tokens: str) -> TextSegmenter:
    vocabulary = {"[UNK]": 0, **{token: i for i, token in enumerate(tokens, 1)}}
    model = models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=100)
    return TextSegmenter(model, Pipeline(None, pre_tokenizers.BertPreTokenizer()))


def test_words_of_different_texts_do_not_spell_a_token() -> None:
    of_words = segmenter("un", "##aff", "re", "##ad")
    words = WordTokens(of_words, lowercase=False, user_defined=["unaff read"])
    assert words.encode_all(["unaff", "read", "unaff read"]) == [None, [3, 4], None]


@pytest.mark.parametrize("count", [50, 50_000])
def test_the_number_of_spelled_tokens_does_not_delay_texts(count: int) -> None:
    """They are searched for unless there are many: 50,000 took 5 s."""
    spelled = [f"Un{i:x}." for i in range(count)]
    words = WordTokens(segmenter("un", "##aff"), lowercase=True, user_defined=spelled)
    begin = time.process_time()
    expected = [[1] * 20 if count < 100 else None]
    assert all(words.encode_all(["un " * 20]) == expected for _ in range(2000))
    assert words.encode_all([f"un a {spelled[-1].swapcase()}"]) == [None]
    assert time.process_time() - begin < 1


def test_special_tokens_are_searched_for_where_texts_spell_them() -> None:
    words = WordTokens(segmenter("x", "y", "["), lowercase=False, special=["[X Y]"])
    assert words.encode_all(["[ x"]) == [[3, 1]]
    assert words.encode_all(["x", "[x"], parse_special=True) == [[1], None]


def test_a_spelled_token_of_white_space_is_left_to_the_library() -> None:
    assert WordTokens(segmenter("un"), lowercase=True, user_defined=[" "]).encode_all(["un"]) == [None]


def test_tokens_longer_than_a_word_may_be_are_not_found() -> None:
    texts = ("long" * 25, "long" * 25 + "s")
    of_words = segmenter(*texts)
    assert WordTokens(of_words, lowercase=False).encode_all([" ".join(texts)]) == [[1, 0]]
    assert of_words.ids(" ".join(texts)) == [1, 0]
