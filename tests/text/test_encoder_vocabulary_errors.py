"""Files with encoder vocabularies: the tokens that they define, and errors."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.files.gguf_bytes import (
    ARRAY,
    F32,
    FALSE,
    I32,
    TRUE,
    U8,
    integer,
    numbers,
    scalar,
    string,
    strings,
    u32,
)
from support.folders.encoder_tokenizers import VOCABULARY_KEYS as KEY
from support.folders.encoder_tokenizers import open_recorded, open_vocabulary

from metal_prefill import GGUFError
from metal_prefill.files import GGUFFile
from metal_prefill.text import Tokenizer
from metal_prefill.text._vocabulary import TokenFrame

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "\u2581hello", "\u2581wor", "ld", "\u2581,", "\u2581")
PIECES = ("<s>", "<pad>", "</s>", "<unk>", "\u2581hello", "\u2581", "w", "or", "ld", "<mask>")


BERT = {
    "model": string("bert"),
    "tokens": strings(*WORDS),
    "token_type": numbers(I32, *(3 if word.startswith("[") else 1 for word in WORDS)),
    "unknown_token_id": integer(1),
    "cls_token_id": integer(2),
    "seperator_token_id": integer(3),
}
XLM_R = {
    "model": string("t5"),
    "tokens": strings(*PIECES),
    "token_type": numbers(I32, 3, 3, 3, 2, 1, 1, 1, 1, 1, 3),
    "scores": numbers(F32, 0, 0, 0, 0, -1, -2, -3, -3, -3, 0),
    "bos_token_id": integer(0),
    "eos_token_id": integer(2),
    "seperator_token_id": integer(2),
    "unknown_token_id": integer(3),
    "add_bos_token": TRUE,
}


def test_the_mark_distinguishes_words_from_continuations(tmp_path: Path) -> None:
    tokenizer = open_vocabulary(tmp_path, BERT)
    assert tokenizer.encode("Hello, WORLD") == [2, 5, 8, 6, 7]
    assert tokenizer.encode("ld") == [2, 1]  # a continuation does not begin a word
    assert tokenizer.encode("wor\u2581", add_bos=False) == [6, 9]
    assert tokenizer.decode([2, 5, 8, 6, 7, 3]) == "hello , world"
    assert tokenizer.encode("[SEP] hello[SEP]", add_bos=False, parse_special=True) == [3, 5, 3]
    assert 3 not in tokenizer.encode("[SEP]")


def test_flags_of_the_file_select_case_and_accents(tmp_path: Path) -> None:
    tokens = strings(*WORDS, "\u2581caf\u00e9", "\u2581cafe", "\u2581CAFE")
    base = {key: value for key, value in BERT.items() if key != "token_type"} | {"tokens": tokens}
    lower, accents = "normalizer.lowercase", "normalizer.strip_accents"
    assert open_vocabulary(tmp_path, base).encode("CAF\u00c9") == [2, 11]
    assert open_vocabulary(tmp_path, base, **{accents: FALSE}).encode("CAF\u00c9") == [2, 10]
    assert open_vocabulary(tmp_path, base, **{lower: FALSE}).encode("CAF\u00c9 caf\u00e9") == [2, 1, 10]
    assert open_vocabulary(tmp_path, base, **{lower: FALSE, accents: TRUE}).encode("CAF\u00c9") == [2, 12]


@pytest.mark.parametrize(
    ("base", "changes", "frame"),
    [
        (BERT, {}, TokenFrame((2,), (3,), (3,), 1)),
        (BERT, {"add_eos_token": TRUE, "add_sep_token": FALSE}, TokenFrame((2,), (3,), (3,), 1)),
        (BERT, {"cls_token_id": None, "seperator_token_id": None}, TokenFrame((2,), (3,), (3,), 0)),
        (BERT, {"add_bos_token": FALSE, "add_sep_token": FALSE}, TokenFrame((), (), (), 1)),
        (BERT, {"token_type_count": integer(1)}, TokenFrame((2,), (3,), (3,), 0)),
        (XLM_R, {}, TokenFrame((0,), (2, 2), (2,), 0)),
        (XLM_R, {"add_sep_token": FALSE}, TokenFrame((0,), (2,), (2,), 0)),
        (XLM_R, {"add_bos_token": None, "add_eos_token": FALSE}, TokenFrame((), (2,), (), 0)),
        (XLM_R, {"token_type_count": integer(2)}, TokenFrame((0,), (2, 2), (2,), 0)),
    ],
)
def test_texts_have_the_tokens_of_the_file(
    tmp_path: Path, base: dict[str, Any], changes: dict[str, Any], frame: TokenFrame
) -> None:
    assert open_vocabulary(tmp_path, base, **changes).frame == frame


def test_control_tokens_are_not_pieces_of_text(tmp_path: Path) -> None:
    tokenizer = open_vocabulary(tmp_path, XLM_R)
    assert tokenizer.encode("hello world") == [0, 4, 5, 6, 7, 8]
    assert not {0, 2, 9} & set(tokenizer.encode("<s> <mask></s>", add_bos=False))
    assert tokenizer.encode("<s>hello</s>", add_bos=False, parse_special=True) == [0, 4, 2]
    assert tokenizer.decode([0, 4, 5, 6, 2]) == "hello w"


@pytest.mark.parametrize("base", [BERT, XLM_R])
def test_text_without_a_token_is_the_unknown_token(tmp_path: Path, base: dict[str, Any]) -> None:
    tokenizer = open_vocabulary(tmp_path, base)
    assert tokenizer.unk_id in tokenizer.encode("hello \u6f22")
    assert tokenizer.missing_bytes == b""
    with pytest.raises(ValueError, match="the vocabulary has no tokens for '\u6f22'"):
        tokenizer.encode("hello \u6f22", strict=True)


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (BERT, {"tokens": strings(), "token_type": None}, f"{KEY}tokens is empty"),
        (BERT, {"cls_token_id": integer(10)}, f"{KEY}cls_token_id is 10, must be between 0 and 9"),
        (BERT, {"mask_token_id": string("x")}, f"{KEY}mask_token_id has type string"),
        (BERT, {"normalizer.lowercase": integer(1)}, "normalizer.lowercase has type uint32, expected bool"),
        (BERT, {"token_type_count": (I32, scalar(I32, -1))}, "token_type_count is -1, must be between 0"),
        (
            {**BERT, "tokens": strings("a", "b"), "token_type": None, "cls_token_id": None},
            {"unknown_token_id": integer(0), "seperator_token_id": None},
            "add_bos_token is set, but tokenizer.ggml.bos_token_id is missing",
        ),
        (
            {**BERT, "tokens": strings("a", "b"), "token_type": None, "seperator_token_id": None},
            {"unknown_token_id": None, "cls_token_id": integer(0), "eos_token_id": integer(1)},
            r"unknown_token_id is missing, and no token is spelled \[UNK\]",
        ),
        (XLM_R, {"scores": None}, f"metadata {KEY}scores is missing"),
        (XLM_R, {"scores": numbers(F32, *[float("nan")] * 10)}, "scores contains a value that is not finite"),
        (XLM_R, {"scores": numbers(F32, 0)}, "scores has 1 entries for 10 tokens"),
        (XLM_R, {"normalizer.steps": string("{}")}, f"{KEY}normalizer.steps is not a list in JSON"),
        (XLM_R, {"normalizer.steps": string("[" * 9999)}, f"{KEY}normalizer.steps is not a list in JSON"),
        (XLM_R, {"normalizer.steps": string('[{"type": "NFD"}]')}, "steps contains {'type': 'NFD'}, which"),
        (XLM_R, {"normalizer.steps": string('[{"type": "Precompiled"}]')}, "'Precompiled'}, which is not"),
        (XLM_R, {"precompiled_charsmap": numbers(F32, 0)}, r"charsmap has type array\[float32\], expected"),
        (XLM_R, {"precompiled_charsmap": numbers(U8, 1, 2)}, "charsmap is damaged: its trie has 513 bytes"),
    ],
)  # fmt: skip
def test_problems_are_named(
    tmp_path: Path, base: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(GGUFError, match=message):
        open_vocabulary(tmp_path, base, **changes).encode("hello")


class Charsmap:
    """The character map of the recorded vocabulary, and ways to damage it."""

    def __init__(self, folder: Path) -> None:
        open_recorded(folder, "unigram")
        with GGUFFile(folder / "vocabulary.gguf") as opened:
            content = np.asarray(opened.metadata[KEY + "precompiled_charsmap"]).tobytes()
        size = int.from_bytes(content[:4], "little")
        self.units = np.frombuffer(content, "<u4", size // 4, 4).copy()
        self.texts = content[4 + size :]

    def open(self, folder: Path, size: int | None = None) -> Tokenizer:
        size = 4 * len(self.units) if size is None else size
        content = size.to_bytes(4, "little") + self.units.tobytes() + self.texts
        value = ARRAY, u32(U8) + len(content).to_bytes(8, "little") + content
        return open_vocabulary(folder, XLM_R, precompiled_charsmap=value)

    def a_node(self, *, with_value: bool) -> int:
        nodes = (self.units < 2**31) & ((self.units & 0x100 != 0) == with_value)
        found = np.flatnonzero(nodes)
        return int(found[len(found) // 2])


def test_a_character_map_normalizes_text(tmp_path: Path) -> None:
    assert Charsmap(tmp_path).open(tmp_path).encode("\uff48\u212f\u217c\u2113o", add_bos=False) == [4]


def test_damaged_character_maps_are_rejected(tmp_path: Path) -> None:
    charsmap = Charsmap(tmp_path)
    units, texts = charsmap.units.copy(), charsmap.texts

    def message() -> str:
        with pytest.raises(GGUFError, match="precompiled_charsmap is damaged") as error:
            charsmap.open(tmp_path).encode("hello")
        charsmap.units[:], charsmap.texts = units, texts
        return str(error.value)

    charsmap.units[0] |= 2**31
    assert "the root of its trie is a value" in message()
    charsmap.units[charsmap.a_node(with_value=False)] |= 0x1FFFFF << 10
    assert "of its trie leads to" in message()
    node = charsmap.a_node(with_value=True)
    child = node ^ int(units[node] >> 10) << (8 if units[node] & 0x200 else 0)
    charsmap.units[child] = 2**31 | 0x7FFFFFFF
    assert "a value of its trie is 2147483647, must begin a text in" in message()
    charsmap.texts = charsmap.texts[:-1] + b"\xff"
    assert "is not valid UTF-8" in message()
    with pytest.raises(GGUFError, match="its trie has 100 bytes, must have a multiple of 1024"):
        charsmap.open(tmp_path, size=100).encode("hello")
    with pytest.raises(GGUFError, match="its trie has 1073741824 bytes"):
        charsmap.open(tmp_path, size=2**30).encode("hello")
