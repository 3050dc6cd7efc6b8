"""Random texts, with every supported way to split text into tokens.

A text round-trips through its tokens, whole and piece by piece; its words never become control tokens. If
llama.cpp is installed, the ids are compared with its ids.
"""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
from support import comparison
from support.fuzzing import TIMEOUT, fuzz
from support.text_writer import write_text

from metal_prefill.files import GGUFFile
from metal_prefill.text import Tokenizer

pytestmark = pytest.mark.timeout(TIMEOUT)

SPACE = "\u2581"  # a space in SentencePiece's vocabularies


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("vocabularies")
    vocabularies: dict[str, Any] = json.loads(comparison.TOKENS.read_text())["vocabularies"]
    return {
        name: comparison.write_vocabulary(folder / f"{i}.gguf", vocabularies[variant.kind], variant)
        for i, (name, variant) in enumerate(comparison.TOKENIZERS.items())
    }


@pytest.fixture(scope="module")
def tokenizers(files: dict[str, Path]) -> dict[str, Tokenizer]:
    return {name: Tokenizer.from_gguf(GGUFFile(path)) for name, path in files.items()}


def write(random: Random) -> bytes:
    """Return a tokenizer's name and a text for it."""
    return f"{random.choice(tuple(comparison.TOKENIZERS))}\n{write_text(random)}".encode()


def test_texts_round_trip_without_control_tokens(tokenizers: dict[str, Tokenizer]) -> None:
    def run(content: bytes, _: Random) -> None:
        name, text = content.decode().split("\n", 1)
        tokenizer, variant = tokenizers[name], comparison.TOKENIZERS[name]
        ids = tokenizer.encode(text, add_bos=False, parse_special=variant.parse_special)
        decoder = tokenizer.decoder(skip_special=False)
        streamed = "".join(decoder.step(i) for i in ids) + decoder.flush()
        whole = tokenizer.decode(ids, skip_special=False)
        if variant.kind == "llama" and variant.space_prefix:
            # A stream continues a text: it keeps the spaces that the tokenizer inserts before stretches
            # of plain text.
            assert streamed.replace(" ", "") == whole.replace(" ", "")
        else:
            assert streamed == whole
        if variant.kind == "gpt2" or SPACE not in text:
            assert whole == comparison.decoded(tokenizer, text, parse_special=variant.parse_special)
        if not variant.parse_special:
            assert not any(tokenizer.is_special(i) for i in ids)
            assert tokenizer.encode(text, add_bos=False, strict=True) == ids

    fuzz("text", 300, write, run)


def test_ids_match_llama_cpp(files: dict[str, Path], tokenizers: dict[str, Tokenizer]) -> None:
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama.cpp is not installed")
    peers = {name: llama_cpp.Llama(str(path), vocab_only=True, verbose=False) for name, path in files.items()}

    def run(content: bytes, _: Random) -> None:
        name, text = content.decode().split("\n", 1)
        special = comparison.TOKENIZERS[name].parse_special
        expected = peers[name].tokenize(text.encode(), add_bos=False, special=special)
        assert tokenizers[name].encode(text, add_bos=False, parse_special=special) == expected

    fuzz("text", 300, write, run)
    for peer in peers.values():
        peer.close()
