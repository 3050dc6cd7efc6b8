"""Vocabularies of SentencePiece in ``tokenizer.json``: BPE with byte fallback, and Unigram."""

import base64
import binascii
import struct
from collections.abc import Iterator, Mapping, Sequence
from json import dumps
from pathlib import Path
from typing import Any

from metal_prefill.conversion._folder import MAX_TEXT, Fields, is_number
from metal_prefill.conversion._folder_vocabulary import WrittenVocabulary, listed_tokens, steps
from metal_prefill.errors import GGUFError
from metal_prefill.text._segmenters import SPLIT_KEY, STEPS_KEY, normalizer_of
from metal_prefill.text._vocabulary import PREPEND_SCHEMES, SPACE, TokenType


def unigram(json: Fields, model: Fields, settings: Fields) -> WrittenVocabulary:
    pieces = model.sequence("vocab")
    ids: dict[str, int] = {}
    scores: list[float] = []
    for i, piece in enumerate(pieces):
        match piece:
            case [str(text), score] if is_number(score):
                ids.setdefault(text, i)
                scores.append(float(score))
            case _:
                raise model.error(f"{model.name('vocab')}[{i}] must be a token and its score, a number")
    tokens = [piece[0] for piece in pieces]
    found = listed_tokens("t5", json, ids, tokens)
    for added in json.objects("added_tokens"):
        if added.boolean("special", default=False) and added.string("content") in ids:
            # The model produces it if the spelling is not recognized.
            added.require("single_word", (False,), False)
    found.scores = scores + [0.0] * (len(found.tokens) - len(scores))
    unknown = model.integer("unk_id", least=0)
    if unknown >= len(tokens):
        raise model.error(f"{model.name('unk_id')} is {unknown}, must be less than {len(tokens)}")
    if found.types[unknown] == TokenType.NORMAL:
        raise model.unsupported(
            f"{model.name('unk_id')} is {unknown}, {tokens[unknown]!r}, which is not an added token"
        )
    found.types[unknown] = TokenType.UNKNOWN
    if model.boolean("byte_fallback", default=False):
        found.mark_bytes()
    prefix, white_space = _words(json, found)
    _set_normalizer(found, steps(json, "normalizer", "normalizers"), white_space)
    found.flags["add_space_prefix"] = prefix
    found.ids["unk"] = unknown
    found.mark_spaces()
    return found


def _set_normalizer(found: WrittenVocabulary, listed: Sequence[Fields], white_space: bool) -> None:
    """Set the steps of the normalizer; `white_space` is whether words are split at all of it."""
    made = []
    for step in listed:
        kind, values = step.string("type"), step.values
        if kind == "Precompiled":
            found.charsmap = _charsmap(step)
            values = {"type": kind}
            if not found.charsmap:
                continue
        elif normalizer_of(values, None) is None:
            raise step.unsupported(
                f"{step.name('type')} {kind} is not supported with a Unigram model as {values!r:.200}"
            )
        made.append(values)
    # Files of llama.cpp state one flag for all steps that remove spaces.
    removes = any(step.string("type") == "Strip" or step.object("pattern").has("Regex") for step in listed)
    found.flags |= {
        "remove_extra_whitespaces": white_space or removes,
        SPLIT_KEY: white_space,
        STEPS_KEY: dumps(made),
    }


def _charsmap(step: Fields) -> bytes:
    try:
        return base64.b64decode(step.string("precompiled_charsmap", default=""), validate=True)
    except (binascii.Error, ValueError):
        raise step.error(f"{step.name('precompiled_charsmap')} is not valid base64") from None


def _words(json: Fields, found: WrittenVocabulary) -> tuple[bool, bool]:
    """Return whether each word gets a space before it, and whether other spaces are removed."""
    words = steps(json, "pre_tokenizer", "pretokenizers")
    kinds = [step.string("type") for step in words]
    if kinds not in (["Metaspace"], ["WhitespaceSplit", "Metaspace"]):
        raise json.unsupported(
            f"pre_tokenizer is {', '.join(kinds) or 'missing'}; supported with a Unigram model: Metaspace, "
            "or WhitespaceSplit and Metaspace"
        )
    scheme = _prepend_scheme(words[-1], found, splits=True)
    if scheme == "first":
        raise words[-1].unsupported(
            f"{words[-1].name('prepend_scheme')} is 'first'; supported with a Unigram model: always, never"
        )
    return scheme != "never", len(words) > 1


def byte_fallback_bpe(
    json: Fields, ids: Mapping[str, int], merges: Sequence[tuple[str, str]]
) -> WrittenVocabulary:
    """Return a SentencePiece BPE vocabulary.

    Scores, which llama.cpp reads, are the ranks of the first merges that make a token.
    """
    found = listed_tokens("llama", json, ids)
    rank: dict[str, int] = {}
    for i, (left, right) in enumerate(merges):
        rank.setdefault(left + right, i)
    found.mark_bytes()
    found.scores = [-float(rank.get(token, len(merges))) for token in found.tokens]
    found.merges = [f"{left} {right}" for left, right in merges]
    found.flags["add_space_prefix"] = False
    if not _replaces_spaces(json, found):
        raise json.unsupported(f"no step of normalizer or pre_tokenizer replaces spaces by {SPACE}")
    found.mark_spaces()
    return found


def _replaces_spaces(json: Fields, found: WrittenVocabulary) -> bool:
    """Set how a text begins; return whether spaces are replaced."""
    replaced = False
    listed = steps(json, "normalizer", "normalizers") + steps(json, "pre_tokenizer", "pretokenizers")
    kinds = [step.string("type") for step in listed]
    if kinds.count("Prepend") + kinds.count("Metaspace") > 1:
        raise json.unsupported(f"several steps begin a text with a space: {', '.join(kinds)}")
    for step in listed:
        match step.values:
            case {"type": "Prepend", "prepend": "\u2581"}:
                found.flags["add_space_prefix"] = True
            case {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}:
                replaced = True
            case {"type": "Metaspace"}:
                scheme = _prepend_scheme(step, found, splits=False)
                found.flags |= {"add_space_prefix": scheme != "never", "prepend_scheme": scheme}
                replaced = True
            case {"type": "Split", "pattern": {"String": " "}} if replaced:  # no space is left
                pass
            case values:
                kind = f"{step.name('type')} {values['type']}"
                raise step.unsupported(f"{kind} is not supported with byte fallback as {values!r:.200}")
    return replaced


def _prepend_scheme(step: Fields, found: WrittenVocabulary, *, splits: bool) -> str:
    """Return which texts a Metaspace step begins with a space.

    `splits` is whether the tokenizer separates words, which matters if a token contains the end of one.
    """
    step.require("replacement", (SPACE,), SPACE)
    if any(
        kind == TokenType.NORMAL and SPACE in text[1:]
        for text, kind in zip(found.tokens, found.types, strict=True)
    ):
        step.require("split", (splits,), True)
    default = "always" if step.boolean("add_prefix_space", default=True) else "never"
    return step.choice("prepend_scheme", known=PREPEND_SCHEMES, default=default)


FILE = "spm.model"
_VARINT, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5  # kinds of values
_UNIGRAM = 1
_CONTROL = (2, 3)  # types of pieces that text does not produce: unknown, control
_MASK = "[MASK]"


def tokenizer_of_spm(path: Path, settings: Fields) -> Fields:
    """Return the equivalent content of ``tokenizer.json`` for the model of a DeBERTa."""
    settings.require("split_by_punct", (False,), False)
    if path.stat().st_size > MAX_TEXT:
        raise GGUFError(f"{path}: has more than {MAX_TEXT} bytes")
    try:
        message = list(_fields(path.read_bytes()))
        pieces = [dict(_fields(value)) for number, value in message if number == 1]
        training, normalizer = (dict(_fields(b"".join(v for n, v in message if n == i))) for i in (2, 3))
        texts = [piece.get(1, b"").decode() for piece in pieces]
        scores = [piece.get(2, 0.0) for piece in pieces]
        charsmap = base64.b64encode(normalizer.get(2, b"")).decode()
    except (ValueError, IndexError, TypeError, AttributeError, struct.error):
        raise GGUFError(f"{path}: is not a valid model of SentencePiece") from None
    found = Fields(path, {"model_type": training.get(3, _UNIGRAM)})
    found.require("model_type", (_UNIGRAM,), _UNIGRAM)
    special = [i for i, piece in enumerate(pieces) if piece.get(3, 1) in _CONTROL]
    named = {name: settings.string(f"{name}_token", default=f"[{name.upper()}]") for name in ("cls", "sep")}
    for text in named.values():
        if text not in texts:
            raise GGUFError(f"{path}: lacks the token {text}")
    added = [{"id": i, "content": texts[i], "special": True} for i in special]
    if _MASK not in texts:
        added.append({"id": len(texts), "content": _MASK, "special": True})
    frame = {name: [text, texts.index(text)] for name, text in named.items()}
    steps: list[dict[str, Any]] = [{"type": "Strip", "strip_left": True, "strip_right": True}]
    if settings.boolean("do_lower_case", default=False):
        steps.insert(0, {"type": "Lowercase"})
    if charsmap:
        steps.append({"type": "Precompiled", "precompiled_charsmap": charsmap})
    steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    return Fields(
        path,
        {
            "model": {
                "type": "Unigram",
                "vocab": [list(pair) for pair in zip(texts, scores, strict=True)],
                "unk_id": training.get(40, 0),
            },
            "normalizer": {"type": "Sequence", "normalizers": steps},
            "pre_tokenizer": {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "always"},
            "added_tokens": added,
            "post_processor": {"type": "BertProcessing", **frame},
        },
    )


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the number and the value of each field of a message."""
    at = 0
    value: Any
    while at < len(message):
        tag, at = _varint(message, at)
        kind = tag & 7
        if kind == _VARINT:
            value, at = _varint(message, at)
        elif kind == _FOUR:
            (value,), at = struct.unpack_from("<f", message, at), at + 4
        elif kind == _EIGHT:
            (value,), at = struct.unpack_from("<d", message, at), at + 8
        elif kind == _BYTES:
            size, at = _varint(message, at)
            value, at = message[at : at + size], at + size
        else:
            raise ValueError(kind)
        if at > len(message):
            raise ValueError(at)
        yield tag >> 3, value


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """Return a number in groups of seven bits, and the position after it."""
    value = 0
    for i in range(10):
        byte = message[at + i]
        value |= (byte & 127) << 7 * i
        if byte < 128:
            return value, at + i + 1
    raise ValueError(at)
