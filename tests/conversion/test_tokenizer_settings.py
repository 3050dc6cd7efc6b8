"""Settings of ``tokenizer.json``, changed one at a time: a vocabulary follows each, or it is refused.

The tokenizers library, which transformers uses, reads the same files.
"""

import itertools
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
from support.files.gguf_bytes import F32, numbers, string, strings
from support.files.gguf_mutator import with_entries
from support.folders import encoder_tokenizers, tokenizer_folders
from support.folders.tokenizer_folders import DECODERS, TOKENIZERS, Json
from support.hostile_texts import hostile_texts
from tokenizers import Tokenizer as HubTokenizer
from tokenizers import processors
from tokenizers.normalizers import BertNormalizer

from metal_prefill import GGUFError, UnsupportedModelError
from metal_prefill.files import GGUFFile
from metal_prefill.text import Tokenizer

TEXTS = [
    *("", " ", "a", " a", "a ", "  two  spaces  ", "Hello World", "don't we'll", "\n\na\r\n c\t\td"),
    *("1,000.50", "e\u0301x y", "\u00e9x \u212b", "\u6f22\u5b57", "foo_bar-baz C++", "\u2581a \u2581 b"),
    *("a\u00a0b\u3000c", "<tool>", "a<tool>b", "a <tool> b", " <tool>\n<tool>  y", "<TOOL>", "the king"),
    *("the the  the", "x" * 101),
    *hostile_texts(seed=5, count=40),
]
SPELLED = ["the<s>king", "a </s> b", "</s></s> a", "a</s>\n b", "a [SEP] b", "a[MASK]b", "a <mask> b"]

Change = Callable[[Json], Any]
_META = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}


def tool(**options: Any) -> Change:
    return lambda made: made["added_tokens"][-1].update(options)


def model(**settings: Any) -> Change:
    return lambda made: made["model"].update(settings)


def top(**settings: Any) -> Change:
    return lambda made: made.update(settings)


def both(*changes: Change) -> Change:
    return lambda made: [change(made) for change in changes]


def words(*steps: Json) -> Change:
    return top(pre_tokenizer={"type": "Sequence", "pretokenizers": steps} if steps[1:] else steps[0])


def normalizers(*first: Json) -> Change:
    def change(made: Json) -> None:
        inner = made["normalizer"]
        steps = inner["normalizers"] if inner and inner["type"] == "Sequence" else [inner] if inner else []
        made["normalizer"] = {"type": "Sequence", "normalizers": [*first, *steps]}

    return change


def template(single: str, pair: str) -> Change:
    def change(made: Json) -> None:
        tokenizer = HubTokenizer.from_str(json.dumps(made))
        names = {word.split(":")[0] for word in f"{single} {pair}".split()} - {"$A", "$B"}
        used = [(name, tokenizer.token_to_id(name)) for name in names]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single, pair=pair, special_tokens=used
        )
        made["post_processor"] = json.loads(tokenizer.to_str())["post_processor"]

    return change


def merges(made: Json) -> None:
    made["model"]["merges"] = made["model"]["merges"][::2]


def interleaved(made: Json) -> None:
    """Add a second way to form a token, after the merges of others."""
    vocab = made["model"]["vocab"]
    known = {tuple(merge) for merge in made["model"]["merges"]}
    made["model"]["merges"] += next(
        [[token[:at], token[at:]]]
        for token in vocab
        for at in range(1, len(token))
        if token[:at] in vocab and token[at:] in vocab and (token[:at], token[at:]) not in known
    )


def replaces(text: str, by: str, kind: str = "String") -> Json:
    return {"type": "Replace", "pattern": {kind: text}, "content": by}


_joins = partial(replaces, " {2,}", kind="Regex")


_STRIP: Json = {"type": "Strip", "strip_left": False, "strip_right": True}
NFC = {"type": "NFC"}
_ALBERT = [
    *(replaces("``", '"'), replaces("''", '"')),
    *({"type": kind} for kind in ("NFKD", "StripAccents", "Lowercase")),
]
FOLLOWED: list[tuple[str, str, Change]] = [
    *((name, "unchanged", lambda made: None) for name in TOKENIZERS),
    ("byte level", "normalized", both(normalizers(NFC), tool(content="\u00e9]", normalized=True))),
    ("byte level", "NFC", normalizers(NFC)),
    ("byte level", "a pair as two texts", template("<s> $A", "<s> $A $B")),
    ("byte level", "an end", template("<s> $A </s>", "<s> $A </s> <s> $B </s>")),
    ("byte level", "no begin", template("$A </s>", "$A </s> $B </s>")),
    ("byte level", "no frame", top(post_processor=None)),
    ("byte level", "some merges", merges),
    *((name, "some merges", merges) for name in ("llama 2", "gemma")),
    *((name, "interleaved merges", interleaved) for name in ("llama 2", "gemma")),
    *(
        ("mistral", f"Metaspace {scheme}", words({**_META, "prepend_scheme": scheme}))
        for scheme in ("always", "first", "never")
    ),
    ("mistral", "Metaspace that does not split", words({**_META, "split": False})),
    ("mistral", "older Metaspace", words({"type": "Metaspace", "replacement": "\u2581"})),
    ("word piece", "a pair without types", template("[CLS] $A [SEP]", "[CLS] $A [SEP] $B [SEP]")),
    ("word piece", "no frame", top(post_processor=None)),
    ("word piece", "another unknown token", model(unk_token="[PAD]")),
    ("unigram", "no space", words({**_META, "prepend_scheme": "never"})),
    ("unigram", "Metaspace alone", words(_META)),
    ("unigram", "no frame", top(post_processor=None)),
    *(
        ("unigram", f"spaces {what}", both(words(_META), top(normalizer=None), normalizers(*steps)))
        for what, steps in {
            "joined": [_joins(" ")],
            "joined otherwise": [_joins("\u2581")],
            "stripped": [_STRIP],
            "stripped and joined": [_STRIP, _joins("\u2581")],
            "joined and stripped": [_joins(" "), _STRIP],
            "of an early DeBERTa": [{**_STRIP, "strip_left": True}, _joins(" ")],
            "of DeBERTa": [replaces(r"\s{2,}|[\n\r\t]", " ", "Regex"), NFC, _STRIP],
            "of an early ALBERT": [*_ALBERT, _joins(" ")],
        }.items()
    ),
    ("unigram", "ALBERT", both(top(normalizer=None), normalizers(*_ALBERT))),
    ("unigram", "spaces of words joined", normalizers(_joins("\u2581"))),
    ("unigram", "spaces of a token", both(normalizers(_joins(" ")), tool(content="a b", normalized=True))),
    ("unigram", "types", template("<s> $A </s>", "<s> $A </s> $B:1 </s>:1")),
]
_DIGITS = {"type": "Split", "pattern": {"Regex": r"\d"}, "behavior": "Isolated", "invert": False}
_OTHER_PREFIX = {"type": "Prepend", "prepend": "_"}
REFUSED: list[tuple[str, Change, str]] = [
    ("unigram", lambda made: made["added_tokens"][1].update(single_word=True), "single_word is True"),
    *((name, model(dropout=0.1), "dropout is 0.1") for name in ("byte level", "gemma")),
    ("byte level", model(end_of_word_suffix="</w>"), "end_of_word_suffix"),
    ("byte level", model(continuing_subword_prefix="##"), "continuing_subword_prefix"),
    ("byte level", normalizers({"type": "NFKC"}), "NFKC"),
    ("llama 2", normalizers(_OTHER_PREFIX), "several steps"),
    ("gemma", normalizers(_OTHER_PREFIX), "'prepend': '_'"),
    *((name, normalizers(replaces("a", "o")), "'a'") for name in ("llama 2", "gemma", "mistral", "unigram")),
    ("gemma", normalizers(replaces(" ", "_")), "'_'"),
    ("gemma", words(_DIGITS), "'Regex'"),
    ("gemma", top(normalizer=None, pre_tokenizer=None), "replaces spaces"),
    ("mistral", words({**_META, "replacement": "_"}), "replacement"),
    ("mistral", words(_META, _META), "several steps"),
    ("byte level", template("<s> $A </s>", "<s> $A </s> $B"), "ends of pairs"),
    ("byte level", template("<s> $A", "$A <s> $B"), "ends of pairs"),
    ("byte level", template("<s> $A", "<s> $B </s> $A"), "ends of pairs"),
    ("byte level", template("$A </s>", "$A </s> </s> </s> $B </s>"), "separates pairs"),
    ("word piece", template("[CLS] $A [SEP]", "[CLS] $A:1 [SEP] $B [SEP]"), "tokens next to it, the type 1"),
    ("word piece", model(unk_token="the"), "the unknown token the"),
    ("unigram", model(unk_id=10), "unk_id is 10"),
    ("unigram", words({**_META, "prepend_scheme": "first"}), "first"),
    ("unigram", words({"type": "Whitespace"}, _META), "pre_tokenizer"),
    ("unigram", words(_META, {"type": "WhitespaceSplit"}), "pre_tokenizer"),
    ("unigram", normalizers({"type": "NFD"}), "NFD is not supported"),
]


def opened(folder: Path, name: str, change: Change) -> tuple[Tokenizer, HubTokenizer]:
    made = TOKENIZERS[name]()
    change(made)
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    architectures = ["LlamaForSequenceClassification"]
    return tokenizer_folders.opened(folder, made, names, architectures=architectures)


@pytest.mark.parametrize(
    ("name", "what", "change"), FOLLOWED, ids=[f"{name}, {what}" for name, what, _ in FOLLOWED]
)
def test_a_changed_setting_is_followed(tmp_path: Path, name: str, what: str, change: Change) -> None:
    ours, theirs = opened(tmp_path, name, change)
    control = [token.content for token in theirs.get_added_tokens_decoder().values() if token.special]
    for text in TEXTS:
        if any(token in text for token in control):
            continue
        assert ours.frame.text(ours.encode(text, add_bos=False)) == theirs.encode(text).ids, repr(text)
    for text in SPELLED:
        expected = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_bos=False, parse_special=True) == expected, repr(text)
    pair = ours.frame.pair(*(ours.encode(text, add_bos=False) for text in ("the king", "b c")))
    expected_pair = theirs.encode("the king", "b c")
    assert pair.ids == expected_pair.ids
    if what == "types" or (name == "word piece" and what != "no frame"):
        assert pair.types == expected_pair.type_ids


@pytest.mark.parametrize(("name", "change", "message"), REFUSED)
def test_a_changed_setting_is_refused(tmp_path: Path, name: str, change: Change, message: str) -> None:
    with pytest.raises((UnsupportedModelError, GGUFError)) as error:
        opened(tmp_path, name, change)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("pattern", "whole", "name"),
    [
        (tokenizer_folders.GPT_4O_PATTERN, True, "granite-embed-multi-97m"),
        (tokenizer_folders.GPT_4O_PATTERN, False, "gpt-4o"),
        (tokenizer_folders.TEKKEN_PATTERN, True, "tekken"),
    ],
)
def test_words_end_where_case_changes(tmp_path: Path, pattern: str, whole: bool, name: str) -> None:
    made = tokenizer_folders.byte_level(pattern)
    made["model"]["ignore_merges"] = whole
    ours, theirs = tokenizer_folders.opened(tmp_path, made)
    assert GGUFFile(tmp_path / "vocabulary.gguf").metadata["tokenizer.ggml.pre"] == name
    for text in (*TEXTS, "HelloWORLDfoo'LL", "a\u00c9b\u0301C", "x//\n\ny", "12345", "\u0c15\u0c4d\u0c37"):
        assert ours.frame.text(ours.encode(text, add_bos=False)) == theirs.encode(text).ids, repr(text)


_SPACED = (
    *("\u2581\u2581", "\u2581" * 4, "\u2581the", "the\u2581", "x\u2581y", "  ", "\u00e9", "a\u00e9", "\n\n"),
)


def _add_spaced(made: Json) -> None:
    """Add tokens of spaces and bytes, some of which segmentation makes, too."""
    added, model = made["added_tokens"], made["model"]
    vocab, options = model["vocab"], added.pop()
    if isinstance(vocab, dict) and "<0x0A>" in vocab:
        pairs = [["\u2581", "\u2581"], ["\u2581" * 2, "\u2581" * 2]]
        model["merges"] = [*pairs, *model["merges"]]
        vocab |= {left + right: len(vocab) + i for i, (left, right) in enumerate(pairs)}
    ids = vocab if isinstance(vocab, dict) else {piece[0]: i for i, piece in enumerate(vocab)}
    new = itertools.count(len(ids))
    for text in ("<tool>", *_SPACED):
        added.append({**options, "id": ids[text] if text in ids else next(new), "content": text})


@pytest.mark.parametrize("name", ["byte level", "llama 2", "mistral", "gemma", "unigram"])
def test_tokens_of_spaces_are_those_of_the_library(tmp_path: Path, name: str) -> None:
    ours, theirs = opened(tmp_path, name, _add_spaced)
    theirs.decoder = DECODERS[name]
    random = Random(7)
    parts = (*_SPACED, "\u2581", " ", " ", "   ", "the", "a", "x", "y", "\u6f22", "\u9ad8", "\n", "<tool>")
    written = [i for i in range(ours.vocab_size) if not str(theirs.id_to_token(i)).startswith("<0x")]
    for _ in range(1000):
        text = "".join(random.choices(parts, k=random.randrange(9)))
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_bos=False) == ids, repr(text)
        assert ours.decode(ids) == theirs.decode(ids), repr(text)
        chosen = random.choices(written, k=5)
        assert ours.decode(chosen, skip_special=False) == theirs.decode(chosen, skip_special_tokens=False), (
            chosen
        )
    if name == "gemma":
        ours.encode("a" + " " * 5, strict=True)  # no text is lost
        spelled: Any = GGUFFile(tmp_path / "vocabulary.gguf").metadata["tokenizer.ggml.tokens"]
        assert spelled[theirs.encode("\u2581" * 4).ids[-1]] == "    "  # as llama.cpp's converter spells it


def test_white_space_of_tokens_in_chats_is_removed(tmp_path: Path) -> None:
    def strip(made: Json) -> None:
        for token in made["added_tokens"][1:3]:
            token["rstrip"] = True

    ours, theirs = opened(tmp_path, "mistral", strip)
    rendered = "<s> \n the king</s>\na <tool> b</s>\n"
    pieces = ours.split(rendered, parse_special=True)
    assert ours.encode_pieces(pieces) == theirs.encode(rendered, add_special_tokens=False).ids


def test_white_space_between_pieces_belongs_to_tokens(tmp_path: Path) -> None:
    def strip(made: Json) -> None:
        made["added_tokens"][1]["lstrip"] = made["added_tokens"][2]["rstrip"] = True
        made["added_tokens"][-1]["content"] = " <tool>"

    ours, theirs = opened(tmp_path, "mistral", strip)
    begin, end = ours.encode("<s></s>", add_bos=False, parse_special=True)
    # The last one begins with white space, which is not removed.
    prompts: list[list[str | int]] = [["the ", begin], [end, "\n the"], [end, " <tool> the"]]
    for pieces in prompts:
        text = "".join(piece if isinstance(piece, str) else ours.token(piece) for piece in pieces)
        assert ours.encode_pieces(pieces) == theirs.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", ["byte level", "llama 2", "mistral"])
def test_spans_leave_out_the_white_space_of_tokens(tmp_path: Path, name: str) -> None:
    ours, _ = opened(tmp_path, name, tool(lstrip=True, rstrip=True))
    text = "a  <tool> \n king"
    spans = ours.encode_spans(text)
    assert [span.id for span in spans] == ours.encode(text, add_bos=False)
    at = next(i for i, span in enumerate(spans) if ours.token(span.id) == "<tool>")
    assert text[spans[at].start : spans[at].end] == "<tool>"
    assert spans[at - 1].end == 1
    assert text[max(spans[at + 1].start, text.index("k")) : spans[-1].end] == "king"


@pytest.mark.parametrize(
    ("config", "generation", "stops"),
    [
        ({}, None, {"</s>"}),
        ({"eos_token_id": 1}, None, {"</s>"}),
        ({"eos_token_id": [1, 300]}, None, {"</s>", 300}),
        ({"eos_token_id": [1, 300]}, {"eos_token_id": [301, 1, 302]}, {"</s>", 301, 302}),
        ({"eos_token_id": [1, 300]}, {"eos_token_id": 1}, {"</s>"}),
    ],
)
def test_generation_ends_where_transformers_ends_it(
    tmp_path: Path, config: Json, generation: Json | None, stops: set[str | int]
) -> None:
    path = tokenizer_folders.write(tmp_path, TOKENIZERS["byte level"](), {"eos_token": "</s>"})
    stated = json.loads((path / "config.json").read_bytes())
    (path / "config.json").write_text(json.dumps(stated | config))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    tokenizer = encoder_tokenizers.open_folder(path)
    assert tokenizer.stop_ids == {1 if stop == "</s>" else stop for stop in stops}


def test_pairs_matter_to_classifiers_only(tmp_path: Path) -> None:
    made = TOKENIZERS["byte level"]()
    template("$A </s>", "$A $B </s>")(made)
    ours, _ = tokenizer_folders.opened(tmp_path, made)
    assert ours.frame.text([5]) == [5, 1]


@pytest.mark.parametrize(
    "step", [None, {"type": "ByteLevel", "trim_offsets": False, "add_prefix_space": False}]
)
@pytest.mark.parametrize("added", [True, False])
def test_the_post_processor_alone_frames_texts(tmp_path: Path, step: Json | None, added: bool) -> None:
    made = TOKENIZERS["byte level"]()
    framed = made["post_processor"]["type"] == "TemplateProcessing"
    assert framed
    flags = {"add_bos_token": added, "add_eos_token": added, "bos_token": "<s>", "eos_token": "</s>"}
    for processor in (step, made["post_processor"]):
        made["post_processor"] = processor
        ours, theirs = tokenizer_folders.opened(tmp_path, made, flags)
        assert ours.frame.text(ours.encode("the king", add_bos=False)) == theirs.encode("the king").ids
        assert ours.encode("the king") == theirs.encode("the king").ids


@pytest.mark.parametrize("generic", [True, False])
def test_settings_of_bert_change_its_own_classes_only(tmp_path: Path, generic: bool) -> None:
    name = "PreTrainedTokenizerFast" if generic else "BertTokenizerFast"
    settings = {"tokenizer_class": name, "do_lower_case": False, "tokenize_chinese_chars": False}
    ours, theirs = tokenizer_folders.opened(tmp_path, TOKENIZERS["word piece"](), settings)
    if not generic:
        theirs.normalizer = BertNormalizer(handle_chinese_chars=False, lowercase=False)
    for text in ("K\u00f6ln The", "\u6f22\u5b57 x", "Hello World"):
        assert ours.encode(text, add_bos=False) == theirs.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("listed", [True, False])
def test_other_files_add_tokens_to_a_list_of_words(tmp_path: Path, listed: bool) -> None:
    made = json.loads(encoder_tokenizers.recorded()["uncased: tokenizer.json"].tobytes())
    words = sorted(made["model"]["vocab"], key=made["model"]["vocab"].get)
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    added = {"content": "<tool>", "normalized": False, "special": False}
    settings = {} if listed else {"added_tokens_decoder": {str(len(words)): added}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "cls_token": "[MASK]"}))
    if listed:
        (tmp_path / "added_tokens.json").write_text(json.dumps({"<tool>": len(words)}))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"sep_token": "[PAD]"}))
    ours = encoder_tokenizers.open_folder(tmp_path)
    at = words.index
    expected = [at("[MASK]"), at("a"), len(words), at("a"), at("[PAD]")]
    assert ours.frame.text(ours.encode("a<tool>a", add_bos=False)) == expected


def test_a_file_of_llama_cpp_with_the_vocabulary_of_gemma4_has_the_same_ids(tmp_path: Path) -> None:
    """It has merges, all scores are equal, and no pre-tokenizer is named."""
    _, theirs = opened(tmp_path, "gemma", lambda made: None)
    made = json.loads((tmp_path / "tokenizer.json").read_text())
    n = len(made["model"]["vocab"]) + 1  # one is added
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in made["model"]["merges"]]
    changed = {
        "tokenizer.ggml.model": string("gemma4"),
        "tokenizer.ggml.scores": numbers(F32, *[-1000.0] * n),
        "tokenizer.ggml.merges": strings(*merges),
        "tokenizer.ggml.pre": None,
    }
    whole = with_entries(tmp_path / "llama.gguf", tmp_path / "vocabulary.gguf", changed)
    ours = Tokenizer(GGUFFile(whole))
    for words in TEXTS:
        assert ours.frame.text(ours.encode(words, add_bos=False)) == theirs.encode(words).ids, repr(words)
    without = with_entries(tmp_path / "none.gguf", whole, {"tokenizer.ggml.merges": None})
    with pytest.raises(GGUFError, match=r"tokenizer\.ggml\.merges is missing, which .* gemma4 needs"):
        Tokenizer(GGUFFile(without))
