"""Unigram models of SentencePiece: ``spm.model``, which folders of DeBERTa have for ``tokenizer.json``.

The file is a message of Protocol Buffers. The fields that are read here, by their numbers: pieces (1), each
with a text (1), a score (2) and a type (3); the settings of the training (2) with the type of the model (3)
and the id of the unknown piece (40); and those of the normalizer (3) with its character map (2).
"""

import base64
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from metal_prefill.conversion._fields import MAX_TEXT, Fields
from metal_prefill.errors import GGUFError
from metal_prefill.text._encoder_vocabulary import SPACE

FILE = "spm.model"
_VARINT, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5  # kinds of values
_UNIGRAM = 1
_CONTROL = (2, 3)  # types of pieces that text does not produce: unknown, control
_MASK = "[MASK]"


def tokenizer_of_spm(path: Path, settings: Fields) -> Fields:
    """Return what ``tokenizer.json`` would contain for the model of a DeBERTa."""
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
    first, last = ({"SpecialToken": {"id": text, "type_id": 0}} for text in named.values())
    end = {"SpecialToken": {"id": named["sep"], "type_id": 1}}
    one, two = ({"Sequence": {"id": name, "type_id": i}} for i, name in enumerate("AB"))
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
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [first, one, last],
                "pair": [first, one, last, two, end],
            },
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
