"""The tokenizer of a model folder, and the metadata that describe it in a GGUF file."""

from collections.abc import Sequence
from json import loads
from pathlib import Path
from typing import Any

from tokenizers import BertWordPieceTokenizer

from metal_prefill._support.messages import shortened
from metal_prefill.conversion._folder import Fields, read_text
from metal_prefill.conversion._folder_vocabulary import (
    WrittenVocabulary,
    fill,
    listed_tokens,
    set_frame,
    set_special_tokens,
    set_stops,
    steps,
)
from metal_prefill.conversion._sentencepiece import FILE as SPM_FILE
from metal_prefill.conversion._sentencepiece import byte_fallback_bpe, tokenizer_of_spm, unigram
from metal_prefill.errors import GGUFError
from metal_prefill.text._segmenters import MAX_WORD_CHARACTERS
from metal_prefill.text._vocabulary import PRE_TOKENIZERS, SPACE, TokenType

# Pre-tokenizer of several with the same patterns.
_PREFERRED = ("gpt-2", "llama-bpe", "qwen2", "smollm", "default")
TOKENIZER_FILES = ("tokenizer.json", "vocab.txt", SPM_FILE)  # of which a folder has one
_DIGITS = 10  # of an id
_GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
# A spelling of the contractions in published patterns, and the one of `PRE_TOKENIZERS`.
_CONTRACTIONS = ("(?i:'s|'t|'re|'ve|'m|'ll|'d)", "'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]")


def read_vocabulary(
    folder: Path, config: Fields, *, frames: bool = True, added: Sequence[str] = ()
) -> WrittenVocabulary:
    """Read ``tokenizer.json``, or ``vocab.txt`` of a BERT model, or ``spm.model`` of a DeBERTa.

    Unless texts have `frames`, no tokens are added at their ends. Control tokens in `added` that are missing
    follow the others.
    """
    settings = Fields.read_if_present(folder / "tokenizer_config.json")
    if (folder / "tokenizer.json").is_file():
        json = Fields.read(folder / "tokenizer.json")
    elif (folder / "vocab.txt").is_file():
        json = _tokenizer_of_lines(folder / "vocab.txt", settings)
    elif (folder / SPM_FILE).is_file() and config.values.get("model_type") == "deberta-v2":
        json = tokenizer_of_spm(folder / SPM_FILE, settings)
    else:
        raise GGUFError(
            f"{folder}: has neither tokenizer.json nor vocab.txt; in transformers, "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder) writes tokenizer.json"
        )
    if not frames:
        json = Fields(json.path, {**json.values, "post_processor": None})
    if added:
        json = _with_tokens(json, added)
    model = json.object("model")
    readers = {"WordPiece": _word_piece, "Unigram": unigram, "BPE": _bpe}
    found = readers[model.choice("type", known=readers, default="")](json, model, settings)
    set_special_tokens(found, json, settings, config, folder)
    set_frame(found, json, settings, config)
    fill(found, config)
    set_stops(found, config, folder)
    found.chat_template = _chat_template(folder, settings)
    return found


def _with_tokens(json: Fields, added: Sequence[str]) -> Fields:
    """Return the contents of ``tokenizer.json`` with more control tokens."""
    listed = {token.string("content"): token.integer("id", least=0) for token in json.objects("added_tokens")}
    vocabulary = json.object("model").values.get("vocab")
    items = vocabulary if isinstance(vocabulary, (dict, list)) else ()
    texts = (item[0] if isinstance(item, list) and item else item for item in items)
    known = {*listed, *(text for text in texts if isinstance(text, str))}
    missing = [text for text in dict.fromkeys(added) if text not in known]
    first = max(len(known), *(i + 1 for i in listed.values()), 0)
    more = [{"id": i, "content": text, "special": True} for i, text in enumerate(missing, first)]
    return Fields(json.path, {**json.values, "added_tokens": [*json.sequence("added_tokens"), *more]})


def _tokenizer_of_lines(path: Path, settings: Fields) -> Fields:
    """Return the equivalent content of ``tokenizer.json`` for the vocabulary of a BERT model."""
    lines = read_text(path).replace("\r\n", "\n").removesuffix("\n").split("\n")
    vocabulary = {line: i for i, line in enumerate(lines)}
    mapped = Fields.read_if_present(path.parent / "special_tokens_map.json")

    special = [
        settings.string(key, default=mapped.string(key, default=f"[{key[:-6].upper()}]"))
        for key in ("unk_token", "sep_token", "cls_token", "pad_token", "mask_token")
    ]
    for text in special[:4]:
        if text not in vocabulary:
            raise GGUFError(shortened(f"{path}: lacks the token {text}"))
    values = loads(BertWordPieceTokenizer(vocabulary, *special).to_str())  # options are in `settings`
    values["added_tokens"] += _added_to_lines(path, settings, special)
    return Fields(path, values)


def _added_to_lines(path: Path, settings: Fields, special: list[str]) -> list[dict[str, Any]]:
    """Return the tokens that other files add to the vocabulary of a BERT model."""
    listed = Fields.read_if_present(path.parent / "added_tokens.json").values
    added = [{"id": i, "content": text, "normalized": True} for text, i in listed.items()]
    decoder = settings.object("added_tokens_decoder")
    for key in decoder.values:
        if not key.isdecimal() or len(key) > _DIGITS:
            raise settings.error(f"added_tokens_decoder has the key {key!r}, expected the id of a token")
        added.append({"id": int(key), **decoder.object(key).values})
    by_text = {str(token.get("content")): token for token in added}
    return [token for text, token in by_text.items() if text not in special]


def _word_piece(json: Fields, model: Fields, settings: Fields) -> WrittenVocabulary:
    model.require("continuing_subword_prefix", ("##",), "##")
    model.require("max_input_chars_per_word", (MAX_WORD_CHARACTERS,), MAX_WORD_CHARACTERS)
    normalizer = json.object("normalizer")
    normalizer.require("type", ("BertNormalizer",), None)
    json.object("pre_tokenizer").require("type", ("BertPreTokenizer",), None)
    found = listed_tokens("bert", json, _ids_of(model))

    def stored(text: str, kind: int) -> str:
        if kind == TokenType.CONTROL:
            return text
        continues = text.startswith("##") and kind != TokenType.USER_DEFINED
        return text[2:] if continues else SPACE + text

    if settings.values.get("tokenizer_class") in _GENERIC_CLASSES:
        settings = Fields(settings.path, {})  # those classes take tokenizer.json as it is
    lowercase = settings.boolean("do_lower_case", default=normalizer.boolean("lowercase", default=True))
    accents = settings if settings.has("strip_accents") else normalizer
    found.flags["normalizer.lowercase"] = lowercase
    found.flags["normalizer.strip_accents"] = accents.boolean("strip_accents", default=lowercase)
    for name, key in (("clean_text", "clean_text"), ("handle_chinese_chars", "tokenize_chinese_chars")):
        stated = normalizer.boolean(name, default=True)
        found.flags[f"normalizer.{name}"] = settings.boolean(key, default=stated)
    found.tokens = [stored(text, kind) for text, kind in zip(found.tokens, found.types, strict=True)]
    return found


def _bpe(json: Fields, model: Fields, settings: Fields) -> WrittenVocabulary:
    model.require("dropout", (0.0,), 0.0)
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        model.require(name, ("",), "")
    merges = [_merge(model, i, merge) for i, merge in enumerate(model.sequence("merges"))]
    if model.boolean("byte_fallback", default=False):
        return byte_fallback_bpe(json, _ids_of(model), merges)
    found = listed_tokens("gpt2", json, _ids_of(model))
    found.pre, nfc = _pre_tokenizer(json, model)
    found.merges = [f"{left} {right}" for left, right in merges]
    if nfc != PRE_TOKENIZERS[found.pre].nfc:
        found.flags["normalizer.nfc"] = nfc
    return found


def _merge(model: Fields, index: int, merge: Any) -> tuple[str, str]:
    match merge:
        case str():
            left, space, right = merge.partition(" ")
            if space and left and right:
                return left, right
        case [str(left), str(right)]:
            return left, right
    raise model.error(f"{model.name('merges')}[{index}] must be two tokens")


def _pre_tokenizer(json: Fields, model: Fields) -> tuple[str, bool]:
    """Return the name under which a GGUF file describes how text is split, and whether it is normalized."""
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
    nfc, whole = bool(normal_forms), model.boolean("ignore_merges", default=False)
    same = [
        name
        for name in (*_PREFERRED, *PRE_TOKENIZERS)
        if PRE_TOKENIZERS[name].whole_words == whole
        and [pattern.replace(*_CONTRACTIONS) for pattern in PRE_TOKENIZERS[name].patterns] == patterns
    ]
    if same:
        return next((name for name in same if PRE_TOKENIZERS[name].nfc == nfc), same[0]), nfc
    raise json.unsupported(f"the pre-tokenizer with the patterns {patterns} is not supported")


def _ids_of(model: Fields) -> dict[str, int]:
    vocabulary = model.object("vocab").values
    for text, i in vocabulary.items():
        if isinstance(i, bool) or not isinstance(i, int):
            raise model.error(f"{model.name('vocab')} has no id for {text!r}")
    return vocabulary


def _chat_template(folder: Path, settings: Fields) -> Any:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return read_text(path)
    template = settings.values.get("chat_template")
    named = not isinstance(template, list) or all(
        isinstance(t, dict) and isinstance(t.get("name"), str) and isinstance(t.get("template"), str)
        for t in template
    )
    if not named or not isinstance(template, (str, list, type(None))):
        raise settings.unsupported("chat_template must be a string or a list of named ones")
    return template
