"""Tokenizers of DeBERTa in a file of SentencePiece."""

import json
import shutil
from pathlib import Path

import pytest
from support.folders.encoder_tokenizers import open_folder
from support.places import DATA

from metal_prefill import GGUFError, UnsupportedModelError
from metal_prefill.text import Tokenizer

MODEL = DATA / "small_spm.model"


def opened(path: Path, **settings: object) -> Tokenizer:
    """Open a folder with the model, or a changed one that is there already."""
    path.mkdir(exist_ok=True)
    if not (path / "spm.model").exists():
        shutil.copy(MODEL, path / "spm.model")
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "config.json").write_text(json.dumps({"model_type": "deberta-v2"}))
    return open_folder(path)


def test_tokens_are_those_of_sentencepiece(tmp_path: Path) -> None:
    tokenizer = opened(tmp_path / "m")
    expected = json.loads((DATA / "sentencepiece_tokens.json").read_bytes())
    assert {text: tokenizer.encode(text, add_bos=False) for text in expected} == expected
    frame = [tokenizer.token(i) for i in (*tokenizer.frame.begin, *tokenizer.frame.end)]
    assert frame == ["[CLS]", "[SEP]"]
    assert tokenizer.token(tokenizer.vocab_size - 1) == "[MASK]"
    lower = opened(tmp_path / "lower", do_lower_case=True)
    assert lower.encode("SUN") == tokenizer.encode("sun")


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    whole = MODEL.read_bytes()
    (tmp_path / "m").mkdir()
    for content in (
        whole[:-3],
        b"\x0b" + whole,
        whole.replace(b"[SEP]", b"\xff\xff\xff\xff\xff"),
        b"\x80" * 12,
    ):
        (tmp_path / "m" / "spm.model").write_bytes(content)
        with pytest.raises(GGUFError, match=r"spm\.model: is not a valid model of SentencePiece"):
            opened(tmp_path / "m")
    (tmp_path / "m" / "spm.model").write_bytes(whole.replace(b"[SEP]", b"[XXX]"))
    with pytest.raises(GGUFError, match=r"spm\.model: lacks the token \[SEP\]"):
        opened(tmp_path / "m")


def test_words_that_are_split_at_punctuation_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="split_by_punct is True"):
        opened(tmp_path / "m", split_by_punct=True)
