"""Tokenizers of encoders: ids of transformers for hostile texts, and the required contents of a file."""

from pathlib import Path
from typing import Any

import numpy.typing as npt
import pytest
from support import encoder_tokenizers as recorded
from support.encoder_tokenizers import VARIANTS
from support.hostile_texts import hostile_texts

from metal_prefill.text import Tokenizer

Record = dict[str, npt.NDArray[Any]]


@pytest.fixture(scope="module")
def record() -> Record:
    return recorded.recorded()


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return list(hostile_texts())


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def tokenizer(variant: str, record: Record, tmp_path: Path) -> Tokenizer:
    return recorded.open_folder(recorded.write_recorded(tmp_path, variant, record))


def test_ids_match_transformers(tokenizer: Tokenizer, variant: str, record: Record, texts: list[str]) -> None:
    for text, ids in zip(texts, recorded.unpacked(record[f"{variant}: ids"]), strict=True):
        assert tokenizer.frame.text(tokenizer.encode(text, add_bos=False)) == ids, repr(text)


def test_pairs_match_transformers(
    tokenizer: Tokenizer, variant: str, record: Record, texts: list[str]
) -> None:
    made = [tokenizer.encode_pair(texts[i], texts[i + 1]) for i in range(recorded.PAIRS)]
    assert [pair.ids for pair in made] == recorded.unpacked(record[f"{variant}: pairs"])
    assert [pair.types for pair in made] == recorded.unpacked(record[f"{variant}: types"])


def test_recorded_variants_differ(record: Record) -> None:
    assert len({record[f"{name}: ids"].tobytes() for name in VARIANTS}) == len(VARIANTS)
