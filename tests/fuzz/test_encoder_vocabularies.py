"""Vocabularies of encoders: hostile texts, and files with invalid metadata.

A text is encoded as tokens with offsets, none of which is a control token. A file opens or raises an error of
the package; the tokenizers library would panic on some files without the checks.
"""

from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from support.files.gguf_mutator import Parts, mutate, take_apart
from support.folders.encoder_tokenizers import VARIANTS, open_recorded
from support.fuzzing import fuzz
from support.hostile_texts import hostile_text

from metal_prefill import MetalPrefillError
from metal_prefill.files import GGUFFile
from metal_prefill.text import Tokenizer

CHARSMAP = b"tokenizer.ggml.precompiled_charsmap"
TEXT = "Hello, wörld \u212b \u1e9b\u0323 ﬁ 漢字 \U0001f600 </s> [SEP]"


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    return {name: open_recorded(tmp_path_factory.mktemp("vocabulary"), name) for name in VARIANTS}


def test_texts_are_encoded_with_offsets(tokenizers: dict[str, Tokenizer]) -> None:
    def run(path: Path, _: Random) -> None:
        name, text = path.read_bytes().decode().split("\n", 1)
        tokenizer = tokenizers[name]
        ids = tokenizer.encode(text, add_bos=False)
        spans = tokenizer.encode_spans(text)
        assert [span.id for span in spans] == ids
        assert all(0 <= span.start <= span.end <= len(text) for span in spans)
        assert all(a.start <= b.start for a, b in pairwise(spans))
        assert not any(tokenizer.is_special(i) for i in ids if i != tokenizer.unk_id)
        tokenizer.decode(ids)
        pair = tokenizer.frame.pair(ids, ids)
        assert len(pair.ids) == len(pair.types) == 2 * len(ids) + tokenizer.frame.pair_tokens

    def write(random: Random) -> bytes:
        return f"{random.choice(tuple(VARIANTS))}\n{hostile_text(random)}".encode()

    fuzz("encoder-text", 300, write, run)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Parts]:
    folder = tmp_path_factory.mktemp("parts")
    found = {}
    for name in ("uncased", "unigram"):
        open_recorded(folder, name)
        parts = take_apart(folder / "vocabulary.gguf")
        found[name] = Parts(parts.metadata, [("t", [32], 0, 0)], bytes(128))
    return found


def damaged_charsmap(parts: Parts, random: Random) -> Parts:
    """Change bytes of the character map, most often in its trie, or its length."""
    content = bytearray(next(value for key, _, value in parts.metadata if key == CHARSMAP))
    for _ in range(random.choice((1, 1, 3, 50))):
        end = random.choice((16, 64, 2048, len(content)))
        content[random.randrange(12, end)] = random.randrange(256)
    changed = Parts(list(parts.metadata), parts.tensors, parts.data)
    changed.replace(CHARSMAP, bytes(content))
    return changed


@pytest.mark.parametrize("damaged", ["structure", "character map"])
def test_files_open_or_raise_an_error(files: dict[str, Parts], damaged: str) -> None:
    def damage(random: Random) -> bytes:
        if damaged == "structure":
            return mutate(files[random.choice(tuple(files))], random)
        return damaged_charsmap(files["unigram"], random).assemble()

    def use(path: Path, _: Random) -> None:
        with suppress(MetalPrefillError), GGUFFile(path) as opened:
            tokenizer = Tokenizer(opened)
            ids = tokenizer.encode(TEXT)
            tokenizer.decode(ids)
            tokenizer.encode_spans(TEXT)
            tokenizer.frame.pair(ids, ids)

    fuzz("encoder-vocabulary", 60, damage, use)
