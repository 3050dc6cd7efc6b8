"""Tokenizers of encoders: ids of transformers for hostile texts, alone and in pairs."""

import itertools
from pathlib import Path

import pytest
from support.folders.encoder_tokenizers import PAIRS, VARIANTS, open_recorded, recorded, unpacked
from support.hostile_texts import hostile_texts


@pytest.mark.parametrize("name", VARIANTS)
def test_ids_of_texts_and_of_pairs_match_transformers(tmp_path: Path, name: str) -> None:
    tokenizer = open_recorded(tmp_path, name)
    for text, ids in zip(hostile_texts(), unpacked(recorded()[f"{name}: ids"]), strict=True):
        assert tokenizer.frame.text(tokenizer.encode(text, add_bos=False)) == ids, repr(text)
    texts = [tokenizer.encode(text, add_bos=False) for text in hostile_texts(PAIRS + 1)]
    made = [tokenizer.frame.pair(*pair) for pair in itertools.pairwise(texts)]
    assert [pair.ids for pair in made] == unpacked(recorded()[f"{name}: pairs"])
    assert [pair.types for pair in made] == unpacked(recorded()[f"{name}: types"])
