"""Long texts, which are encoded in parts: the tokens of the whole, and an end by Ctrl-C."""

import re
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support import comparison
from support.folders import encoder_tokenizers
from support.hostile_texts import hostile_texts

from metal_prefill.text import Tokenizer, _tokenizer
from metal_prefill.text._segmentation import TextSegmenter

RECORD = comparison.recorded()
WHOLE = 1 << 40  # characters of a part, which no text has
TEXTS = [*comparison.TEXTS, *hostile_texts(150, seed=5), "И был вечер и было утро", "a  b c\n d"]
BETWEEN = " and  the King's \u2581x "
TEXT = BETWEEN.join(TEXTS)
SHORT = BETWEEN.join(TEXTS[:: max(len(TEXTS) // 60, 1)])  # for the places, which add up whatever the words


@pytest.fixture(params=[*comparison.TOKENIZERS, *encoder_tokenizers.VARIANTS])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    if request.param in encoder_tokenizers.VARIANTS:
        return encoder_tokenizers.open_recorded(tmp_path, request.param)
    return comparison.open_variant(tmp_path / "v.gguf", comparison.TOKENIZERS[request.param])


def made(monkeypatch: pytest.MonkeyPatch, length: int, encode: Callable[[], Any]) -> tuple[Any, int]:
    """Return the result of a call whose parts have this length, and their number."""
    parts = []

    def counted(name: str) -> None:
        real = getattr(TextSegmenter, name)

        def call(segmenter: TextSegmenter, text: str) -> Any:
            parts.append(text)
            return real(segmenter, text)

        context.setattr(TextSegmenter, name, call)

    with monkeypatch.context() as context:
        context.setattr(_tokenizer, "_PART", length)
        counted("ids")
        counted("spans")
        return encode(), len(parts)


def test_tokens_are_those_of_the_whole_text(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    for encode in (lambda: tokenizer.encode(TEXT, parse_special=True), lambda: tokenizer.encode_spans(SHORT)):
        whole, few = made(monkeypatch, WHOLE, encode)
        for length in (1, 100):
            found, many = made(monkeypatch, length, encode)
            assert found == whole
            assert many > few + 20 or not tokenizer._divisible


def test_only_vocabularies_with_spaces_after_letters_are_not_divided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variant = comparison.TOKENIZERS["sentencepiece"]
    tokens = RECORD["vocabularies"][variant.kind]["tokens"]
    place = next(i for i, token in enumerate(tokens) if re.fullmatch("\u2581[a-z]{2,}", token))
    for token, divisible in (("th\u2581", False), ("\u2581th", True)):
        changed = [*tokens[:place], token, *tokens[place + 1 :]]
        opened = comparison.open_variant(tmp_path / "v.gguf", variant, tokens=changed)
        encode = partial(opened.encode, "with the king")
        found, parts = made(monkeypatch, 1, encode)
        assert (parts == 3) == divisible
        assert found == made(monkeypatch, WHOLE, encode)[0]


@pytest.mark.parametrize("spelling", ["with the", "with ", " the", "king"])
def test_texts_are_not_divided_next_to_spelled_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spelling: str
) -> None:
    """The tokens after a spelled one differ from those after other words."""
    variant = comparison.TOKENIZERS["sentencepiece"]
    vocabulary = RECORD["vocabularies"][variant.kind]
    added = {"tokens": spelling, "types": 4, "scores": 0.0}
    changes = {name: [*vocabulary[name], value] for name, value in added.items()}
    opened = comparison.open_variant(tmp_path / "v.gguf", variant, **changes)
    encode = partial(opened.encode, "with the king is the king of")
    assert made(monkeypatch, 1, encode)[0] == made(monkeypatch, WHOLE, encode)[0]


def test_a_text_without_words_is_one_part(smollm: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert made(monkeypatch, 10, lambda: smollm.encode("x" * 1000))[1] == 1
    assert made(monkeypatch, 10, lambda: smollm.encode("x" * 1000 + " y " + "z" * 30))[1] == 2


def test_ctrl_c_ends_the_encoding_of_a_long_text(smollm: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    text, done = "the king is dead " * 100_000, 0
    real = TextSegmenter.ids

    def interrupted(segmenter: TextSegmenter, part: str) -> list[int]:
        nonlocal done
        done += len(part)
        ids = real(segmenter, part)
        signal.raise_signal(signal.SIGINT)
        return ids

    monkeypatch.setattr(TextSegmenter, "ids", interrupted)
    with pytest.raises(KeyboardInterrupt):
        smollm.encode(text)
    assert 0 < done < len(text) / 10
