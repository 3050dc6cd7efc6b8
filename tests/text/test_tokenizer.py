"""Tokenizers: the same ids as llama.cpp, the same text back, and no special token out of plain text."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support import comparison
from support.comparison import TokenizerVariant
from support.files.gguf_bytes import F32, I32, TRUE, U32, integer, numbers, scalar, string, strings
from support.folders import tokenizer_folders
from support.folders.encoder_tokenizers import VOCABULARY_KEYS as KEY
from support.folders.encoder_tokenizers import open_vocabulary

from metal_prefill import GGUFError, UnsupportedModelError
from metal_prefill.files import GGUFFile
from metal_prefill.text import Tokenizer

RECORD = comparison.recorded()
GPT2, LLAMA = RECORD["vocabularies"]["gpt2"], RECORD["vocabularies"]["llama"]

Open = Callable[..., Tokenizer]


@pytest.fixture
def open_variant(tmp_path: Path) -> Open:
    """Return a function that opens one of the recorded vocabularies, changed or not."""
    return partial(comparison.open_variant, tmp_path / "vocabulary.gguf")


@pytest.fixture
def sentencepiece(open_variant: Open) -> Tokenizer:
    return open_variant(comparison.TOKENIZERS["sentencepiece"])


@pytest.mark.parametrize("name", comparison.TOKENIZERS)
def test_a_lower_bound_of_the_number_of_tokens(open_variant: Open, name: str) -> None:
    tokenizer = open_variant(comparison.TOKENIZERS[name])
    longest = max((tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)), key=len).decode(
        "utf-8", "ignore"
    )
    for text in (longest, "a", " ", "\u00e9", "\U000e0001", "\1", "\u2581", *comparison.TEXTS[:4]):
        copies = text * (5_000 // max(len(text), 1))
        assert tokenizer.least_tokens(copies) <= len(tokenizer.encode(copies, add_bos=False))
    assert tokenizer.least_tokens("a" * 2_000_000) > 2000


def test_a_lower_bound_without_omitted_text(open_variant: Open) -> None:
    tokenizer = open_variant(comparison.TOKENIZERS["smollm"], **without("gpt2", "\u0101", "\u00f1"))
    for text in ("\1", "\U00040000"):
        assert tokenizer.least_tokens(text * 100_000) <= len(tokenizer.encode(text * 100_000))
    assert tokenizer.least_tokens("a" * 2_000_000) > 2000


def test_recorded_tokenizers_are_current() -> None:
    assert set(RECORD["expected"]) == set(comparison.TOKENIZERS)


@pytest.mark.parametrize("name", comparison.TOKENIZERS)
def test_ids_match_llama_cpp(open_variant: Open, name: str) -> None:
    variant = comparison.TOKENIZERS[name]
    tokenizer = open_variant(variant)
    for text, expected in zip(comparison.TEXTS, RECORD["expected"][name], strict=True):
        ids = tokenizer.encode(text, add_bos=False, parse_special=variant.parse_special)
        assert ids == expected, text


def test_text_of_the_bundled_model_is_tokenized_as_in_training(demo_path: Path) -> None:
    trained = tokenizer_folders.of_file(demo_path)
    tokenizer = Tokenizer(GGUFFile(demo_path))
    for text in comparison.TEXTS:
        assert tokenizer.encode(text, add_bos=False) == trained.encode(text).ids, text


def test_special_tokens_are_omitted_from_text_by_default(smollm: Tokenizer) -> None:
    ids = smollm.encode("<|im_start|>user\nhi<|im_end|>", parse_special=True)
    assert smollm.decode(ids) == "user\nhi"
    assert smollm.decode(ids, skip_special=False) == "<|im_start|>user\nhi<|im_end|>"


def test_invalid_bytes_become_replacement_characters(sentencepiece: Tokenizer) -> None:
    ids = [sentencepiece.encode("\x01", add_bos=False)[-1] + n for n in (0, 0xFE)]
    assert sentencepiece.decode(ids) == "\x01\ufffd"


def test_every_token_has_its_bytes(smollm: Tokenizer, sentencepiece: Tokenizer) -> None:
    assert smollm.token_bytes(GPT2["tokens"].index("\u0120")) == b" "
    assert smollm.token_bytes(0) == b"<|endoftext|>"
    assert {smollm.token_bytes(i) for i in range(smollm.vocab_size)} >= {bytes([b]) for b in range(256)}
    assert sentencepiece.token_bytes(LLAMA["tokens"].index("<0xFF>")) == b"\xff"
    assert [smollm.is_special(i) for i in range(5)] == [True, True, True, False, False]


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_stream_contains_only_whole_characters(open_variant: Open, kind: str) -> None:
    tokenizer = open_variant(TokenizerVariant(kind, "smollm"))
    text = "né 🎭 漢字 👩‍👧"
    decoder = tokenizer.decoder()
    pieces = [decoder.step(i) for i in tokenizer.encode(text, add_bos=False)]
    assert "".join(pieces).lstrip(" ") == text
    assert "" in pieces
    assert not any("\ufffd" in piece for piece in pieces)
    assert decoder.flush() == ""


def test_a_stream_that_ends_within_a_character_ends_with_a_replacement(smollm: Tokenizer) -> None:
    decoder = smollm.decoder()
    ids = smollm.encode("🐉", add_bos=False)
    assert len(ids) > 1
    assert [decoder.step(i) for i in ids[:-1]] == [""] * (len(ids) - 1)
    assert decoder.flush() == "\ufffd"


def test_continuation_keeps_its_leading_space(sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode("speak", add_bos=False)
    assert sentencepiece.decode(ids) == "speak"
    decoder = sentencepiece.decoder()
    assert "".join(map(decoder.step, ids)) == " speak"


def test_a_control_token_cannot_be_formed_by_merges(open_variant: Open) -> None:
    # The pieces of "</s>" merge completely; as a control token it still must not be formed from text.
    tokens = [*LLAMA["tokens"][:-2], "/s", "</s"]
    for i, piece in enumerate(("<", "/", "s", ">")):
        if piece not in tokens:
            tokens[-3 - i] = piece
    scores = [*LLAMA["scores"][:-2], 10.0, 9.0]
    tokenizer = open_variant(TokenizerVariant("llama"), tokens=tokens, scores=scores)
    ids = tokenizer.encode("</s>", add_bos=False)
    assert tokens.index("</s") in ids
    assert tokens.index("</s>") not in ids


def test_control_token_cannot_be_a_whole_word(open_variant: Open) -> None:
    tokens = [*GPT2["tokens"], "STOP"]
    types = [*GPT2["types"], 3]
    tokenizer = open_variant(TokenizerVariant("gpt2", "llama-bpe"), tokens=tokens, types=types)
    assert len(tokens) - 1 not in tokenizer.encode("STOP")
    assert tokenizer.encode("STOP", add_bos=False, parse_special=True) == [len(tokens) - 1]


@pytest.mark.parametrize(("name", "strips"), [("Phi-3-mini", True), ("Phi 3.5 mini", True), ("Llama", False)])
def test_control_tokens_of_phi_3_take_the_white_space_after_them(
    open_variant: Open, name: str, strips: bool
) -> None:
    tokens, types = [*LLAMA["tokens"], "<|end|>"], [*LLAMA["types"], 3]
    scores = [*LLAMA["scores"], 0.0]
    tokenizer = open_variant(TokenizerVariant("llama"), tokens=tokens, types=types, scores=scores, name=name)
    for control, taken in (("<|end|>", strips), ("</s>", strips), ("<s>", False)):
        made = tokenizer.encode(f"{control} \n a", add_bos=False, parse_special=True)
        text = "a" if taken else " \n a"
        assert made == [tokens.index(control), *tokenizer.encode(text, add_bos=False)]


def test_stop_ids_are_those_named_or_known_by_spelling(smollm: Tokenizer) -> None:
    assert smollm.eos_id == 0
    assert smollm.stop_ids == {0, GPT2["tokens"].index("<|im_end|>")}


@pytest.mark.parametrize("name", ["eos", "eot", "eom"])
def test_each_end_token_of_the_file_stops_regardless_of_spelling(tmp_path: Path, name: str) -> None:
    assert open_vocabulary(tmp_path, BPE, **{f"{name}_token_id": integer(1)}).stop_ids == {1}


def test_an_ordinary_token_spelled_like_an_end_does_not_stop(open_variant: Open) -> None:
    types = [
        4 if token == "<|im_end|>" else kind
        for token, kind in zip(GPT2["tokens"], GPT2["types"], strict=True)
    ]
    assert open_variant(TokenizerVariant("gpt2", "smollm"), types=types).stop_ids == {0}


def test_bos_is_added_as_the_file_or_its_kind_requires_by_default(
    smollm: Tokenizer, sentencepiece: Tokenizer, open_variant: Open
) -> None:
    assert not smollm.add_bos
    assert smollm.encode("", add_bos=True) == [0]
    assert smollm.encode("") == []
    assert sentencepiece.add_bos
    assert sentencepiece.encode("") == [1]
    assert sentencepiece.encode("", add_bos=False) == []
    assert open_variant(TokenizerVariant("gpt2", "llama-bpe")).encode("") == [0]


def test_lone_surrogates_are_rejected(smollm: Tokenizer) -> None:
    with pytest.raises(ValueError, match="surrogates not allowed"):
        smollm.encode("a\ud800b")


@pytest.mark.parametrize("token_id", [-1, len(GPT2["tokens"]), 10**12])
def test_ids_outside_the_vocabulary_are_refused(smollm: Tokenizer, token_id: int) -> None:
    with pytest.raises(ValueError, match=f"token id {token_id} is outside the vocabulary"):
        smollm.decode([token_id])


def test_duplicate_spellings_keep_their_own_text(open_variant: Open) -> None:
    tokens = [*GPT2["tokens"], GPT2["tokens"][10]]
    tokenizer = open_variant(TokenizerVariant("gpt2", "smollm"), tokens=tokens, types=[*GPT2["types"], 1])
    assert tokenizer.decode([10]) == tokenizer.decode([len(tokens) - 1])


def without(kind: str, *lost: str) -> dict[str, Any]:
    """Return a recorded vocabulary without some tokens and their merges."""
    vocabulary = RECORD["vocabularies"][kind]
    tokens = [f"<unused {i}>" if t in lost else t for i, t in enumerate(vocabulary["tokens"])]
    types = [
        1 if t in lost else kind for t, kind in zip(vocabulary["tokens"], vocabulary["types"], strict=True)
    ]
    changes: dict[str, Any] = {"tokens": tokens, "types": types}
    if kind == "gpt2":
        known = set(tokens)
        changes["merges"] = [m for m in vocabulary["merges"] if {*m.split(" "), m.replace(" ", "")} <= known]
    return changes


@pytest.mark.parametrize("name", ["smollm", "sentencepiece"])
def test_a_complete_vocabulary_covers_all_bytes(open_variant: Open, name: str) -> None:
    tokenizer = open_variant(comparison.TOKENIZERS[name])
    assert tokenizer.missing_bytes == b""
    for text in comparison.TEXTS:
        assert tokenizer.encode(text, strict=True) == tokenizer.encode(text)


def test_bytes_without_a_token_are_omitted_and_named(open_variant: Open) -> None:
    """0x01 is written as U+0101, 0xF1 as itself; U+40000 in UTF-8 is f1 80 80 80."""
    tokenizer = open_variant(comparison.TOKENIZERS["smollm"], **without("gpt2", "\u0101", "\u00f1"))
    assert tokenizer.missing_bytes == b"\x01\xf1"
    assert tokenizer.decode(tokenizer.encode("a\x01b")) == "ab"
    with pytest.raises(ValueError, match=r"no token for '\\x01', U\+0001: it lacks some of the bytes 01"):
        tokenizer.encode("a\x01b", strict=True)
    with pytest.raises(ValueError, match=r"U\+40000: it lacks some of the bytes f1 80 80 80"):
        tokenizer.encode("a\U00040000b", strict=True)
    assert tokenizer.encode("ab", strict=True) == tokenizer.encode("ab")


def test_sentencepiece_bytes_without_a_token_are_named(open_variant: Open) -> None:
    tokenizer = open_variant(comparison.TOKENIZERS["sentencepiece"], **without("llama", "<0x01>"))
    assert tokenizer.missing_bytes == b"\x01"
    with pytest.raises(ValueError, match=r"no token for '\\x01', U\+0001"):
        tokenizer.encode("a\x01b", strict=True)


def test_strict_keeps_control_tokens_whole(smollm: Tokenizer) -> None:
    text = "<|im_start|>user\nHi<|im_end|>"
    for parse in (True, False):
        assert smollm.encode(text, parse_special=parse, strict=True) == smollm.encode(
            text, parse_special=parse
        )


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_excessively_long_tokens_are_rejected(open_variant: Open, kind: str) -> None:
    """Each is split everywhere to find its merges: 200,000 characters took 10 s."""
    variant = next(v for v in comparison.TOKENIZERS.values() if v.kind == kind)
    tokens = list(RECORD["vocabularies"][kind]["tokens"])
    tokens[-1] = "x" * 1024
    assert open_variant(variant, tokens=tokens).token(len(tokens) - 1) == "x" * 1024
    tokens[-1] = "x" * 1025
    with pytest.raises(
        GGUFError, match=rf"token {len(tokens) - 1} of .* has 1025 characters, more than 1024"
    ):
        open_variant(variant, tokens=tokens)


BPE = {
    "model": string("gpt2"),
    "pre": string("gpt-2"),
    "tokens": strings("a", "b", "ab"),
    "merges": strings("a b"),
}
SPM = {**BPE, "model": string("llama"), "merges": None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, f"metadata {KEY}model is missing"),
        ({"model": integer(1)}, f"{KEY}model has type uint32, expected string"),
        ({"pre": integer(1)}, f"{KEY}pre has type uint32"),
        ({"tokens": None}, f"metadata {KEY}tokens is missing"),
        ({"tokens": string("a")}, rf"{KEY}tokens has type string, expected array\[string\]"),
        ({"tokens": numbers(U32, 1)}, rf"{KEY}tokens has type array\[uint32\]"),
        ({"token_type": numbers(I32, 1)}, f"{KEY}token_type has 1 entries for 3 tokens"),
        ({"token_type": strings("x")}, rf"{KEY}token_type has type array\[string\], expected an array"),
        ({"token_type": numbers(I32, 1, 7, -1)}, f"token 1 has type 7 in {KEY}token_type, must be 0 to 6"),
        ({"merges": None}, f"metadata {KEY}merges is missing"),
        ({"merges": strings("a b", "a c")}, f"merge 1 of {KEY}merges, 'a c', does not join"),
        ({"merges": strings("b a")}, "merge 0 .*'b a'"),
        ({"merges": strings("ab")}, "merge 0 .*'ab'"),
        ({"merges": strings("")}, "merge 0"),
        ({"bos_token_id": integer(3)}, f"{KEY}bos_token_id is 3, must be between 0 and 2"),
        ({"bos_token_id": (I32, scalar(I32, -1))}, f"{KEY}bos_token_id is -1, must be"),
        ({"bos_token_id": string("a")}, f"{KEY}bos_token_id has type string, expected an integer"),
        ({"bos_token_id": TRUE}, f"{KEY}bos_token_id has type bool, expected an integer"),
        ({"add_bos_token": TRUE}, f"{KEY}add_bos_token is set, but {KEY}bos_token_id is missing"),
        ({"add_bos_token": integer(1)}, "add_bos_token has type uint32"),
        (SPM, f"metadata {KEY}scores is missing"),
        ({**SPM, "scores": numbers(F32, 0, 0)}, f"{KEY}scores has 2 entries for 3 tokens"),
        ({**SPM, "scores": numbers(F32, *[math.nan] * 3)}, "scores contains a value that is not finite"),
    ],
)  # fmt: skip
def test_an_invalid_vocabulary_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(GGUFError, match=message):
        open_vocabulary(tmp_path, BPE, **changes).encode("ab")


def test_unsupported_tokenizers_are_named(tmp_path: Path) -> None:
    message = "tokenizer model rwkv is not supported; supported are gpt2, llama, gemma4, bert, t5"
    with pytest.raises(UnsupportedModelError, match=message):
        open_vocabulary(tmp_path, BPE, model=string("rwkv"))
    message = "pre-tokenizer deepseek-llm is not supported; supported are default"
    with pytest.raises(UnsupportedModelError, match=message):
        open_vocabulary(tmp_path, BPE, pre=string("deepseek-llm"))


def test_a_missing_pre_tokenizer_selects_the_default_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert open_vocabulary(tmp_path, BPE, pre=None).encode("abb") == [2, 1]
    assert "tokenizer.ggml.pre is missing" in caplog.text


def test_requesting_bos_requires_a_bos_token(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no beginning-of-text token"):
        open_vocabulary(tmp_path, BPE).encode("a", add_bos=True)


def test_an_invalid_byte_token_is_an_error(open_variant: Open) -> None:
    tokens = [("<0xZZ>" if token == "<0x41>" else token) for token in LLAMA["tokens"]]
    tokenizer = open_variant(TokenizerVariant("llama"), tokens=tokens)
    with pytest.raises(GGUFError, match="byte token '<0xZZ>' does not have the form <0x0A>"):
        tokenizer.decode([tokens.index("<0xZZ>")])
