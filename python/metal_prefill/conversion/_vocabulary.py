"""The tokenizer of a model folder, and the metadata that describe it in a GGUF file."""

from __future__ import annotations

import base64
import binascii
import re
from pathlib import Path
from typing import Any

from metal_prefill.conversion._fields import Fields
from metal_prefill.conversion._folder_vocabulary import (
    FolderVocabulary,
    fill,
    frame,
    set_special_tokens,
    steps,
)
from metal_prefill.errors import GGUFError, UnsupportedModelError
from metal_prefill.text._encoder_vocabulary import MAX_WORD_CHARACTERS, SPACE
from metal_prefill.text._vocabulary import PRE_TOKENIZERS, PreTokenizer, TokenType

# Pre-tokenizer of several with the same patterns.
_PREFERRED = ("gpt-2", "llama-bpe", "qwen2", "smollm", "default")
# A spelling of the contractions in published patterns, and the one of `PRE_TOKENIZERS`.
_CONTRACTIONS = ("(?i:'s|'t|'re|'ve|'m|'ll|'d)", "'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]")


def read_vocabulary(folder: Path, config: Fields) -> FolderVocabulary:
    """Read ``tokenizer.json``, or ``vocab.txt`` of a BERT model.

    Raises
    ------
    GGUFError
        A file is missing or damaged.
    UnsupportedModelError
        The tokenizer has a step that a GGUF file cannot describe.
    """
    settings = Fields.read_if_present(folder / "tokenizer_config.json")
    if (folder / "tokenizer.json").is_file():
        json = Fields.read(folder / "tokenizer.json")
    elif (folder / "vocab.txt").is_file():
        json = _tokenizer_of_lines(folder / "vocab.txt", settings)
    else:
        raise GGUFError(
            f"{folder}: has neither tokenizer.json nor vocab.txt; in transformers, "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder) writes tokenizer.json"
        )
    model = json.object("model")
    kind = model.string("type", default="")
    readers = {"WordPiece": _word_piece, "Unigram": _unigram, "BPE": _bpe}
    if kind not in readers:
        raise json.unsupported(f"{model.name('type')} is {kind!r}; supported: {', '.join(readers)}")
    found = readers[kind](json, model, settings)
    set_special_tokens(found, json, settings, config, folder)
    frame(found, json, settings)
    fill(found, config)
    found.chat_template = _chat_template(folder, settings)
    return found


def _tokenizer_of_lines(path: Path, settings: Fields) -> Fields:
    """Return what ``tokenizer.json`` would contain for the vocabulary of a BERT model."""
    try:
        lines = path.read_bytes().decode().replace("\r\n", "\n").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise GGUFError(f"{path}: is not valid UTF-8 at byte {error.start}") from None
    vocabulary = {line: i for i, line in enumerate(lines)}
    names = {"cls": "[CLS]", "sep": "[SEP]", "pad": "[PAD]", "unk": "[UNK]", "mask": "[MASK]"}
    special = [settings.string(f"{name}_token", default=text) for name, text in names.items()]
    for text in special[:4]:
        if text not in vocabulary:
            raise GGUFError(f"{path}: lacks the token {text}")
    first, last = ({"SpecialToken": {"id": text, "type_id": 0}} for text in special[:2])
    sequences = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
    return Fields(
        path,
        {
            "model": {
                "type": "WordPiece",
                "vocab": vocabulary,
                "unk_token": special[3],
                "continuing_subword_prefix": "##",
                "max_input_chars_per_word": MAX_WORD_CHARACTERS,
            },
            "normalizer": {
                "type": "BertNormalizer",
                "clean_text": True,
                "handle_chinese_chars": settings.boolean("tokenize_chinese_chars", default=True),
                "strip_accents": settings.values.get("strip_accents"),
                "lowercase": settings.boolean("do_lower_case", default=True),
            },
            "pre_tokenizer": {"type": "BertPreTokenizer"},
            "added_tokens": [
                {"id": vocabulary[text], "content": text, "special": True}
                for text in special
                if text in vocabulary
            ],
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [first, sequences[0], last],
                "pair": [first, sequences[0], last, sequences[1], last],
            },
        },
    )


def _word_piece(json: Fields, model: Fields, settings: Fields) -> FolderVocabulary:
    model.require("continuing_subword_prefix", ("##",), "##")
    model.require("max_input_chars_per_word", (MAX_WORD_CHARACTERS,), MAX_WORD_CHARACTERS)
    normalizer = json.object("normalizer")
    normalizer.require("type", ("BertNormalizer",), None)
    json.object("pre_tokenizer").require("type", ("BertPreTokenizer",), None)
    tokens, types = _listed(json, _ids_of(model))
    control = TokenType.CONTROL

    def stored(text: str, kind: int) -> str:
        if kind == control:
            return text
        return text[2:] if text.startswith("##") else SPACE + text

    lowercase = settings.boolean("do_lower_case", default=normalizer.boolean("lowercase", default=True))
    accents = settings if settings.has("strip_accents") else normalizer
    flags = {
        "normalizer.lowercase": lowercase,
        "normalizer.strip_accents": accents.boolean("strip_accents", default=lowercase),
    }
    for name, key in (("clean_text", "clean_text"), ("handle_chinese_chars", "tokenize_chinese_chars")):
        value = settings.boolean(key, default=normalizer.boolean(name, default=True))
        if not value:  # the value of files without the key is true
            flags[f"normalizer.{name}"] = value
    stored_tokens = [stored(text, kind) for text, kind in zip(tokens, types, strict=True)]
    return FolderVocabulary("bert", "default", stored_tokens, types, flags=flags)


def _unigram(json: Fields, model: Fields, settings: Fields) -> FolderVocabulary:
    pieces = model.sequence("vocab")
    ids: dict[str, int] = {}
    scores: list[float] = []
    for i, piece in enumerate(pieces):
        match piece:
            case [str(text), int() | float() as score]:
                ids.setdefault(text, i)
                scores.append(float(score))
            case _:
                raise model.error(f"{model.name('vocab')}[{i}] must be a token and its score")
    tokens = [piece[0] for piece in pieces]
    listed, types = _listed(json, ids, tokens)
    scores += [0.0] * (len(listed) - len(scores))
    unknown = model.integer("unk_id", least=0)
    if unknown >= len(tokens):
        raise model.error(f"{model.name('unk_id')} is {unknown}, must be less than {len(tokens)}")
    types[unknown] = TokenType.UNKNOWN
    if model.boolean("byte_fallback", default=False):
        for text, i in ids.items():
            if re.fullmatch(r"<0x[0-9A-F]{2}>", text):
                types[i] = TokenType.BYTE
    charsmap = _charsmap(json)
    prefix, white_space = _metaspace(json)
    flags = {"add_space_prefix": prefix, "remove_extra_whitespaces": white_space}
    found = FolderVocabulary("t5", "default", listed, types, scores=scores, flags=flags, charsmap=charsmap)
    found.ids["unk"] = unknown
    return found


def _charsmap(json: Fields) -> bytes | None:
    """Return the character map of a Unigram tokenizer; the other steps concern spaces, which are removed."""
    charsmap = None
    for step in steps(json, "normalizer", "normalizers"):
        kind = step.string("type")
        if kind == "Precompiled":
            encoded = step.string("precompiled_charsmap", default="")
            try:
                charsmap = base64.b64decode(encoded, validate=True)
            except (binascii.Error, ValueError):
                raise step.error(f"{step.name('precompiled_charsmap')} is not valid base64") from None
        elif kind not in ("Replace", "Strip"):
            raise step.unsupported(f"{step.name('type')} {kind} is not supported with a Unigram model")
    return charsmap


def _metaspace(json: Fields) -> tuple[bool, bool]:
    """Return whether words begin with a space of their own, and whether other spaces are removed."""
    prefix, white_space = True, False
    for step in steps(json, "pre_tokenizer", "pretokenizers"):
        kind = step.string("type")
        if kind == "Metaspace":
            step.require("replacement", (SPACE,), SPACE)
            scheme = step.string("prepend_scheme", default="")
            prefix = scheme != "never" if scheme else step.boolean("add_prefix_space", default=True)
        elif kind in ("WhitespaceSplit", "Whitespace"):
            white_space = True
        else:
            raise step.unsupported(f"{step.name('type')} {kind} is not supported with a Unigram model")
    # Where nothing splits at white space, the normalizer has removed the spaces that sentencepiece removes.
    return prefix, white_space or any(
        step.string("type") in ("Replace", "Strip") for step in steps(json, "normalizer", "normalizers")
    )


def _bpe(json: Fields, model: Fields, settings: Fields) -> FolderVocabulary:
    ids = _ids_of(model)
    merges = [_merge(model, i, merge) for i, merge in enumerate(model.sequence("merges"))]
    tokens, types = _listed(json, ids)
    if model.boolean("byte_fallback", default=False):
        return _sentencepiece(json, tokens, types, merges)
    pre = _pre_tokenizer(json, model)
    return FolderVocabulary("gpt2", pre, tokens, types, merges=[f"{left} {right}" for left, right in merges])


def _sentencepiece(
    json: Fields, tokens: list[str], types: list[int], merges: list[tuple[str, str]]
) -> FolderVocabulary:
    """Return a SentencePiece BPE vocabulary; a score is the rank of the first merge that makes the token."""
    rank: dict[str, int] = {}
    for i, (left, right) in enumerate(merges):
        rank.setdefault(left + right, i)
    scores = [-float(rank.get(token, len(merges))) for token in tokens]
    for i, token in enumerate(tokens):
        if types[i] == TokenType.NORMAL and re.fullmatch(r"<0x[0-9A-F]{2}>", token):
            types[i] = TokenType.BYTE
    prefix = False
    for step in (*steps(json, "normalizer", "normalizers"), *steps(json, "pre_tokenizer", "pretokenizers")):
        kind = step.string("type")
        if kind == "Prepend":
            prefix = True
        elif kind == "Metaspace":
            prefix = step.string("prepend_scheme", default="first") != "never"
        elif kind not in ("Replace", "Split"):
            raise step.unsupported(f"{step.name('type')} {kind} is not supported with byte fallback")
    return FolderVocabulary(
        "llama", "default", tokens, types, scores=scores, flags={"add_space_prefix": prefix}
    )


def _merge(model: Fields, index: int, merge: Any) -> tuple[str, str]:
    match merge:
        case str():
            left, space, right = merge.partition(" ")
            if space and left and right:
                return left, right
        case [str(left), str(right)]:
            return left, right
    raise model.error(f"{model.name('merges')}[{index}] must be two tokens")


def _pre_tokenizer(json: Fields, model: Fields) -> str:
    """Return the name under which a GGUF file describes how text is split."""
    patterns: list[str] = []
    for step in steps(json, "pre_tokenizer", "pretokenizers"):
        kind = step.string("type")
        if kind == "ByteLevel":
            step.require("add_prefix_space", (False,), False)
            if step.boolean("use_regex", default=True):
                patterns.append(PRE_TOKENIZERS["gpt-2"].patterns[0])
        elif kind == "Digits":
            step.require("individual_digits", (True,), False)
            patterns.append(r"\p{N}")
        elif kind == "Split":
            step.require("behavior", ("Isolated",), None)
            step.require("invert", (False,), False)
            patterns.append(step.object("pattern").string("Regex").replace(*_CONTRACTIONS))
        else:
            raise step.unsupported(f"{step.name('type')} {kind} is not supported")
    normal_forms = [step.string("type") for step in steps(json, "normalizer", "normalizers")]
    if normal_forms not in ([], ["NFC"]):
        raise json.unsupported(f"normalizer is {', '.join(normal_forms)}; supported is NFC, or none")
    whole = model.boolean("ignore_merges", default=False)
    if normal_forms and tuple(patterns) == PRE_TOKENIZERS["modern-bert"].patterns and not whole:
        return "modern-bert"
    for name in (*_PREFERRED, *PRE_TOKENIZERS):
        known: PreTokenizer = PRE_TOKENIZERS[name]
        if known.patterns == tuple(patterns) and known.whole_words == whole:
            return name
    raise json.unsupported(f"the pre-tokenizer with the patterns {patterns} is not supported")


def _ids_of(model: Fields) -> dict[str, int]:
    vocabulary = model.object("vocab").values
    for text, i in vocabulary.items():
        if isinstance(i, bool) or not isinstance(i, int):
            raise model.error(f"{model.name('vocab')} has no id for {text!r}")
    return vocabulary


def _listed(
    json: Fields, ids: dict[str, int], tokens: list[str] | None = None
) -> tuple[list[str], list[int]]:
    """Return the token of each id, and its type, with the tokens that are added to the vocabulary."""
    by_id = dict(enumerate(tokens)) if tokens is not None else {i: text for text, i in ids.items()}
    special = {}
    for added in json.objects("added_tokens"):
        i, text = added.integer("id", least=0), added.string("content")
        if by_id.setdefault(i, text) != text:
            raise added.error(f"{added.name('content')} is {text!r}, but token {i} is {by_id[i]!r}")
        special[i] = added.boolean("special", default=False)
    if not by_id:
        raise json.error("has no tokens")
    if min(by_id) != 0 or max(by_id) >= len(by_id) + 4096:
        raise json.error(f"{len(by_id)} tokens have the ids {min(by_id)} to {max(by_id)}")
    listed, types = [], []
    for i in range(max(by_id) + 1):
        listed.append(by_id.get(i, f"[PAD{i}]"))
        kind = TokenType.NORMAL if i in by_id else TokenType.UNUSED
        if i in special:
            kind = TokenType.CONTROL if special[i] else TokenType.USER_DEFINED
        types.append(int(kind))
    return listed, types


def _chat_template(folder: Path, settings: Fields) -> Any:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.values.get("chat_template")
    match template:
        case None | str():
            return template
        case list() if all(isinstance(t, dict) and {"name", "template"} <= t.keys() for t in template):
            return template
    raise UnsupportedModelError(f"{settings.path}: chat_template must be a string or a list of named ones")
