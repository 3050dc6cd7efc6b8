"""Tokens that are recognized by their spelling are those of the tokenizers library, with all their options.

Folders and texts are generated; the library reads the same ``tokenizer.json``.
"""

from pathlib import Path
from random import Random

import pytest
from support.folders import tokenizer_folders
from support.folders.tokenizer_folders import DECODERS, TOKENIZERS, Json
from tokenizers import Tokenizer as HubTokenizer

from metal_prefill import UnsupportedModelError
from metal_prefill.text import Tokenizer

_OPTIONS = ("lstrip", "rstrip", "single_word", "normalized")
_SPELLINGS = (
    *("<tool>", "[X]", "<|im_end|>", "</x>", "<K", "=", "\u00e9]", "<e\u0301>", "a b", " y"),
    *("z\u2581", "\u2581\u2581", "  ", "\n", "\uff1cw\uff1e", "tool", "n\u00f6", "the", "1", "_", "\u212b"),
)
_BETWEEN = (
    *(" ", " ", "  ", "\u2581", "\n", "\t", "\u00a0", "\u3000", "a", "b", "x", "the", "The ", "king"),
    *("_", "1", "-", "\u0338", "\u0301", "\u00e9", "e\u0301", "\u212a", "\uff1c", "\u6f22", "\u24b6"),
    *("\u00b2", "\u200d", "<", ">", "<s>", "</s>", "[CLS]", "[cls]", "[MASK]", "<mask>", "``"),
)
_META: Json = {"type": "Metaspace", "replacement": "\u2581", "split": False}
_SPLIT_META: Json = {**_META, "split": True, "prepend_scheme": "always"}
_NORMALIZERS: dict[str, list[Json | None]] = {
    "byte level": [None, {"type": "NFC"}, {"type": "Sequence", "normalizers": [{"type": "NFC"}]}],
    "word piece": [
        {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": strips,
            "lowercase": lowers,
        }
        for strips, lowers in ((None, True), (None, False), (False, True))
    ],
    "unigram": [
        None,
        *({"type": kind} for kind in ("NFC", "NFKC", "NFKD", "Lowercase")),
        {"type": "Sequence", "normalizers": [{"type": "NFKD"}, {"type": "StripAccents"}]},
        {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
        {"type": "Strip", "strip_left": True, "strip_right": True},
    ],
}
_PRE_TOKENIZERS: dict[str, list[Json]] = {
    "mistral": [{**_META, "prepend_scheme": scheme} for scheme in ("first", "always", "never")],
    "unigram": [
        _SPLIT_META,
        {**_SPLIT_META, "prepend_scheme": "never"},
        {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, _SPLIT_META]},
    ],
}


def generated(name: str, random: Random) -> Json:
    """Return a tokenizer with random options of tokens, and a random normalizer."""
    made = TOKENIZERS[name]()
    if name in _NORMALIZERS:
        made["normalizer"] = random.choice(_NORMALIZERS[name])
    if name in _PRE_TOKENIZERS:
        made["pre_tokenizer"] = random.choice(_PRE_TOKENIZERS[name])
    vocab = made["model"]["vocab"]
    ids = dict(vocab) if isinstance(vocab, dict) else {piece[0]: i for i, piece in enumerate(vocab)}
    tokens = {token["content"]: token for token in made["added_tokens"]}
    for text in tokens:
        ids.setdefault(text, tokens[text]["id"])
    for text in random.sample(_SPELLINGS, random.randrange(1, 6)):
        special = text not in ids and random.random() < 0.5  # text makes no control token of a vocabulary
        new = {"id": ids.setdefault(text, len(ids)), "content": text, "special": special}
        tokens[text] = tokens.get(text, new)
    likely = random.choice((0.1, 0.5))
    for token in tokens.values():
        token.update({option: random.random() < likely for option in _OPTIONS})
        # The library panics if another token takes white space, or nothing is left of it.
        token["lstrip"] &= not token["content"][0].isspace()
        token["normalized"] &= bool(token["content"].strip())
        token["single_word"] &= name != "unigram" or not token["special"] or token["id"] >= len(vocab)
    made["added_tokens"] = sorted(tokens.values(), key=lambda token: token["id"])
    return made


def a_text(made: Json, random: Random) -> str:
    """Return a text that spells tokens, some of them in another case, next to what can change them."""
    spellings = [token["content"] for token in made["added_tokens"]]
    spellings += [text.swapcase() for text in spellings]
    parts = (random.choice(random.choice((spellings, _BETWEEN))) for _ in range(random.randrange(1, 9)))
    return "".join(parts)


def compare(ours: Tokenizer, theirs: HubTokenizer, text: str, decodes: bool) -> None:
    """Compare the tokens of a text, and the text of the tokens."""
    ids = theirs.encode(text, add_special_tokens=False).ids
    assert ours.encode(text, add_bos=False, parse_special=True) == ids, ascii(text)
    assert [span.id for span in ours.encode_spans(text, parse_special=True)] == ids, ascii(text)
    normal = theirs.normalizer.normalize_str if theirs.normalizer is not None else str
    added = theirs.get_added_tokens_decoder()
    control = {token.content for token in added.values() if token.special}
    spelled = any(token in text or normal(token) in normal(text) for token in control)
    if not (spelled or any(map(ours.is_special, ids))):
        assert ours.encode(text, add_bos=False) == ids, ascii(text)
        assert list(ours.encode_all([text])) == [ids], ascii(text)
    # Releases of the library differ in the text of some.
    if decodes and not any(added[i].normalized for i in ids if i in added):
        for skip in (True, False):
            expected = theirs.decode(ids, skip_special_tokens=skip)
            assert ours.decode(ids, skip_special=skip) == expected, ascii(text)


def _makes_control_tokens(made: Json, theirs: HubTokenizer, text: str) -> bool:
    """Return whether a normalizer makes a control token's spelling, which the library takes for the token."""
    if made["model"]["type"] != "Unigram" or theirs.normalizer is None:
        return False
    normal = theirs.normalizer.normalize_str(text)
    special = [token["content"] for token in made["added_tokens"] if token["special"]]
    return any(normal.count(content) > text.count(content) for content in special)


def soak(folder: Path, name: str, seed: int, texts: int) -> bool:
    """Compare the texts of one folder; return whether it is not refused."""
    random = Random(f"{name} {seed}")
    made = generated(name, random)
    try:
        ours, theirs = tokenizer_folders.opened(folder, made, {"tokenizer_class": "PreTrainedTokenizerFast"})
    except UnsupportedModelError:
        return False
    never = (made["pre_tokenizer"] or {}).get("prepend_scheme") == "never"
    theirs.decoder = DECODERS["gemma"] if never and name == "mistral" else DECODERS[name]
    decodes = not never or name != "unigram"  # `decode` removes a space that begins the text of an encoder
    for _ in range(texts):
        text = a_text(made, random)
        if not _makes_control_tokens(made, theirs, text):
            compare(ours, theirs, text, decodes)
    return True


def opened(folder: Path, name: str, content: str, normalizer: Json | None) -> tuple[Tokenizer, HubTokenizer]:
    """Return tokenizers, ours and the library's, with a control token that normalized text spells."""
    made = TOKENIZERS[name]()
    made["normalizer"] = made["normalizer"] or normalizer
    tool = made["added_tokens"][-1]
    made["added_tokens"].append({**tool, "id": tool["id"] + 1})
    tool.update(content=content, special=True, normalized=True)
    return tokenizer_folders.opened(folder, made)


@pytest.mark.parametrize(
    ("name", "content", "texts"),
    [
        ("llama 2", "<|x|>", ["a <|x|>b", "<|x|> a  <|x|>", "a <|x|>", "</s>b <|x|> </s> <|x|>a"]),
        ("gemma", "<|x|> ", ["a <|x|> b", "<|x|>\u2581 a"]),
        ("byte level", "\u00e9]", ["a e\u0301]b", "\u00e9] a\u0301 e\u0301]", "</s>\u00e9]a"]),
    ],
)
def test_prompts_have_the_tokens_of_normalized_text(
    tmp_path: Path, name: str, content: str, texts: list[str]
) -> None:
    """A prompt is split at its control tokens before text of others comes between them."""
    ours, theirs = opened(tmp_path, name, content, {"type": "NFC"})
    for text in texts:
        pieces = list(ours.split(text, parse_special=True))
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert [i for i in pieces if isinstance(i, int)] == [i for i in ids if ours.is_special(i)], text
        assert ours.encode_pieces(pieces) == ids, text


def test_text_after_a_token_in_normalized_text_spells_others(tmp_path: Path) -> None:
    ours, theirs = opened(tmp_path, "llama 2", "<|x|>", None)
    begin, *rest = theirs.encode("<|x|>b<tool>c", add_special_tokens=False).ids
    assert ours.token(begin) == "<|x|>"
    assert ours.encode_pieces([begin, "b<tool>c"]) == [begin, *rest]


def test_spans_are_those_of_the_text_as_it_is_written(tmp_path: Path) -> None:
    for name, content, text, expected in (
        ("byte level", "\u00e9]", "ae\u0301]o\u0308y", ["a", "e\u0301]", "o", "o", "y"]),
        ("llama 2", "<|x|>", "a <|x|>b", ["a", "<|x|>", "b"]),
    ):
        ours, _ = opened(tmp_path, name, content, {"type": "NFC"})
        spans = ours.encode_spans(text, parse_special=True)
        assert [text[span.start : span.end] for span in spans] == expected


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokens_of_generated_folders_are_those_of_the_library(tmp_path: Path, name: str) -> None:
    followed = sum(soak(tmp_path, name, seed, 40) for seed in range(8))
    assert followed >= 5
