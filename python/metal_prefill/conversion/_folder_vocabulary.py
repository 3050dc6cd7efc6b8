"""A vocabulary in the terms of a GGUF file: its tokens, special tokens, and tokens around texts."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from metal_prefill.conversion._folder import Fields
from metal_prefill.text._tokenizer import END_TOKENS
from metal_prefill.text._vocabulary import (
    ENCODER_KINDS,
    MARKED_KEY,
    MAX_TOKEN_CHARACTERS,
    SPACE,
    SPELLED_KEY,
    SPELLING_KEYS,
    TYPES_KEY,
    TokenType,
)


@dataclass
class WrittenVocabulary:
    """A vocabulary in the terms of a GGUF file."""

    model: str  # value of ``tokenizer.ggml.model``
    # Text and type of each id.
    tokens: list[str]
    types: list[int]
    # Ids by the spelling in ``tokenizer.json``, which may differ from `tokens`.
    by_text: dict[str, int] = field(default_factory=dict)
    # Further metadata under ``tokenizer.ggml``, first the ids of added tokens by rule of recognition.
    flags: dict[str, Any] = field(default_factory=dict)
    pre: str = "default"  # value of ``tokenizer.ggml.pre``
    # Score of each id, and pairs "left right" in order of rank; empty for models without them.
    scores: list[float] = field(default_factory=list)
    merges: list[str] = field(default_factory=list)
    charsmap: bytes | None = None
    ids: dict[str, int] = field(default_factory=dict)  # special tokens by the names in `NAMES`
    chat_template: Any = None

    def mark_bytes(self) -> None:
        """Set the type of tokens such as ``<0x0A>`` to bytes."""
        for i, text in enumerate(self.tokens):
            if self.types[i] == TokenType.NORMAL and re.fullmatch(r"<0x[0-9A-F]{2}>", text):
                self.types[i] = TokenType.BYTE

    def mark_spaces(self) -> None:
        """Spell user-defined tokens as SentencePiece decodes them; note those spelled with U+2581 in text."""
        marked = [
            i
            for i, text in enumerate(self.tokens)
            if SPACE in text and self.types[i] == TokenType.USER_DEFINED
        ]
        for i in marked:
            self.tokens[i] = self.tokens[i].replace(SPACE, " ")
        if marked:
            self.flags[MARKED_KEY] = marked


def listed_tokens(
    kind: str,  # ``tokenizer.ggml.model`` of the file
    json: Fields,  # contents of ``tokenizer.json``
    ids: Mapping[str, int],  # ids of the model's tokens
    tokens: Sequence[str] | None = None,  # the model's tokens by id, if several have the same text
) -> WrittenVocabulary:
    """Return a vocabulary with the tokens that are added to it."""
    by_id = dict(enumerate(tokens)) if tokens is not None else {i: text for text, i in ids.items()}
    special: dict[int, bool] = {}
    options: dict[int, list[str]] = {}
    for added in json.objects("added_tokens"):
        i, text = added.integer("id", least=0), added.string("content")
        if by_id.setdefault(i, text) != text:
            raise added.error(f"{added.name('content')} is {text!r}, but token {i} is {by_id[i]!r}")
        special[i] = added.boolean("special", default=False)
        options[i] = [name for name in SPELLING_KEYS if added.boolean(name, default=False)]
    if not by_id:
        raise json.error("has no tokens")
    if min(by_id) != 0 or max(by_id) >= len(by_id) + 4096:
        raise json.error(f"{len(by_id)} tokens have the ids {min(by_id)} to {max(by_id)}")
    longest = max(by_id, key=lambda i: len(by_id[i]))
    if len(by_id[longest]) > MAX_TOKEN_CHARACTERS:
        raise json.error(
            f"token {longest} has {len(by_id[longest])} characters, more than {MAX_TOKEN_CHARACTERS}"
        )
    spelling = {name: [i for i, names in options.items() if name in names] for name in SPELLING_KEYS}
    flags = {SPELLING_KEYS[name]: listed for name, listed in spelling.items() if listed}
    found = WrittenVocabulary(kind, [], [], flags=flags)
    own = [i for i in special if not special[i] and by_id[i] not in ids]
    if own and (kind in ENCODER_KINDS or spelling["single_word"] or spelling["normalized"]):
        found.flags[SPELLED_KEY] = own
    for i in range(max(by_id) + 1):
        text = by_id.get(i, f"[PAD{i}]")
        type_of = TokenType.NORMAL if i in by_id else TokenType.UNUSED
        if i in special:
            type_of = TokenType.CONTROL if special[i] else TokenType.USER_DEFINED
        found.tokens.append(text)
        found.types.append(int(type_of))
        found.by_text.setdefault(text, i)
    return found


_STOPS = ("eot", "eom")  # further tokens that end generation
NAMES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_UNUSED_SCORE = -10000.0  # of ids without a token


def steps(json: Fields, name: str, inner: str) -> list[Fields]:
    """Return the steps of a normalizer or pre-tokenizer, which may be a sequence of them."""
    step = json.object(name)
    if not step.values:
        return []
    if step.string("type", default="") != "Sequence":
        return [step]
    return step.objects(inner)


def set_special_tokens(
    found: WrittenVocabulary, json: Fields, settings: Fields, config: Fields, folder: Path
) -> None:
    """Set the ids of special tokens from the settings of the tokenizer."""
    spelled = Fields.read_if_present(folder / "special_tokens_map.json")
    for name in NAMES:
        for source in (settings, spelled):
            text = source.values.get(f"{name}_token")
            text = text.get("content") if isinstance(text, dict) else text
            if isinstance(text, str) and name not in found.ids and text in found.by_text:
                found.ids[name] = found.by_text[text]
        stated = config.values.get(f"{name}_token_id")
        stated = stated[0] if isinstance(stated, list) and stated else stated
        if isinstance(stated, int) and not isinstance(stated, bool) and 0 <= stated < len(found.tokens):
            found.ids.setdefault(name, stated)
    if found.model == "bert":
        unknown = json.object("model").string("unk_token", default="[UNK]")
        if found.types[found.by_text.get(unknown, 0)] != TokenType.CONTROL or unknown not in found.by_text:
            raise json.error(f"the unknown token {unknown} is not among added_tokens")
        found.ids["unk"] = found.by_text[unknown]


def set_stops(found: WrittenVocabulary, config: Fields, folder: Path) -> None:
    """Set the tokens, besides the end of a text, that end generation in transformers."""
    if found.model in ENCODER_KINDS:
        return
    generation = Fields.read_if_present(folder / "generation_config.json")
    source = generation if generation.has("eos_token_id") else config
    stated = source.values.get("eos_token_id")
    others = []
    for i in stated if isinstance(stated, list) else []:
        if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < len(found.tokens):
            raise source.error(f"eos_token_id contains {i!r}, must be ids of tokens")
        known = found.types[i] == TokenType.CONTROL and found.tokens[i] in END_TOKENS
        if i != found.ids.get("eos") and not known:
            others.append(i)
    if len(others) > len(_STOPS):
        raise source.unsupported(f"eos_token_id has {len(others)} tokens besides known ones: {others}")
    found.ids.update(zip(_STOPS, others, strict=False))


def fill(found: WrittenVocabulary, config: Fields) -> None:
    """Add unused tokens for the rows of the embedding beyond the vocabulary."""
    size = config.integer("vocab_size", default=len(found.tokens))
    if size < len(found.tokens):
        raise config.error(f"vocab_size is {size}, but the tokenizer has {len(found.tokens)} tokens")
    if size > 2 * len(found.tokens) + 65536:
        raise config.error(f"vocab_size is {size}, far more than the {len(found.tokens)} of the tokenizer")
    for i in range(len(found.tokens), size):
        found.tokens.append(f"[PAD{i}]")
        found.types.append(int(TokenType.UNUSED))
        if found.scores:
            found.scores.append(_UNUSED_SCORE)


_FIRST, _SECOND = -1, -2  # placeholders of texts among ids


class _Item(NamedTuple):
    id: int  # of a token, or of a text
    type: int


def set_frame(found: WrittenVocabulary, json: Fields, settings: Fields, config: Fields) -> None:
    """Set the tokens that begin, separate and end texts."""
    single, pair = [_Item(_FIRST, 0)], [_Item(_FIRST, 0), _Item(_SECOND, 0)]
    template = False
    for step in steps(json, "post_processor", "processors"):
        kind = step.string("type")
        if kind in ("BertProcessing", "RobertaProcessing"):
            first, last = (_named_id(step, name) for name in ("cls", "sep"))
            second_type = int(kind == "BertProcessing")
            middle = [_Item(last, 0)] * (2 - second_type)
            single = [_Item(first, 0), _Item(_FIRST, 0), _Item(last, 0)]
            pair = [*single[:2], *middle, _Item(_SECOND, second_type), _Item(last, second_type)]
            template = True
        elif kind == "TemplateProcessing":
            single, pair = (_template(step, name, found) for name in ("single", "pair"))
            template = True
        elif kind != "ByteLevel":
            raise step.unsupported(f"{step.name('type')} {kind} is not supported")
    ids = [item.id for item in single]
    begin, end = ids[: ids.index(_FIRST)], ids[ids.index(_FIRST) + 1 :]
    if len(begin) > 1 or len(end) > 1:
        raise json.unsupported("post_processor adds more than one token at an end of a text")
    for name, added in (("bos", begin), ("eos", end)):
        if added:
            found.ids[name] = added[0]
        # As in transformers, flags of the same names in tokenizer_config.json have no effect.
        found.flags[f"add_{name}_token"] = bool(added)
    word_piece = found.model == "bert"
    between = _between(begin, end, [item.id for item in pair])
    problem = _problem(found, end, between) if template else ""
    reads_pairs = any("SequenceClassification" in str(name) for name in config.sequence("architectures"))
    if problem and (word_piece or reads_pairs):  # other models read single texts
        raise json.unsupported(f"post_processor {problem}")
    # In WordPiece, either flag ends a text with the separator, which also separates pairs.
    if word_piece and end and between == 2 * end:
        found.flags["double_separator"] = True
    found.flags["add_sep_token"] = not (word_piece or problem) and len(between or ()) > len(end)
    if word_piece and end:
        found.ids["sep"] = end[0]
    elif between and not problem:
        found.ids["sep"] = between[-1]
    if found.model == "t5" and any(item.type for item in pair):
        found.flags[TYPES_KEY] = True
    if word_piece and not (_reads_types(settings) and any(item.type for item in pair)):
        found.ids.pop("sep", None)  # stated only if second texts have another type
    if config.integer("type_vocab_size", default=1, least=0) > 1 and _reads_types(settings) and template:
        _check_types(found, json, [*single, *(pair if word_piece or reads_pairs else ())])


def _between(begin: list[int], end: list[int], pair: list[int]) -> list[int] | None:
    """Return the tokens between two texts; None if the tokens at the ends of a pair differ from a text's."""
    places = [pair.index(text) for text in (_FIRST, _SECOND) if text in pair]
    if len(places) < 2 or places[0] > places[1] or pair[: places[0]] != begin or pair[places[1] + 1 :] != end:
        return None
    return pair[places[0] + 1 : places[1]]


def _problem(found: WrittenVocabulary, end: list[int], between: list[int] | None) -> str:
    """Return a property of pairs that a file cannot describe; empty if there is none."""
    if between is None:
        return "adds other tokens at the ends of pairs than at those of texts"
    if found.model == "bert":
        return "" if between in (end, 2 * end) else "separates pairs by tokens other than the end of a text"
    if between[: len(end)] == end and len(between) - len(end) in (0, 1):
        return ""
    spelled = ", ".join(found.tokens[i] for i in between) or "none"
    return f"separates pairs by the tokens {spelled}; supported are those that end a text, and one more"


def _reads_types(settings: Fields) -> bool:
    if settings.has("model_input_names"):
        return "token_type_ids" in settings.sequence("model_input_names")
    return "Roberta" not in settings.string("tokenizer_class", default="")


def _check_types(found: WrittenVocabulary, json: Fields, items: list[_Item]) -> None:
    """Raise an error unless only the second text and the tokens after it have type 1, if types are known."""
    second = False
    has_second = "sep" in found.ids and (found.model == "bert" or TYPES_KEY in found.flags)
    for item in items:
        if item.id == _FIRST:
            second = False
        second |= item.id == _SECOND
        expected = int(second and has_second)
        if item.type != expected:
            raise json.unsupported(
                f"post_processor gives {'the second' if second else 'the first'} text of a pair, or tokens "
                f"next to it, the type {item.type}; supported is {expected}"
            )


def _named_id(step: Fields, name: str) -> int:
    match step.values.get(name):
        case [str(), int(i)]:
            return i
    raise step.error(f"{step.name(name)} must be a token and its id")


def _template(step: Fields, name: str, found: WrittenVocabulary) -> list[_Item]:
    items: list[_Item] = []
    for item in step.objects(name):
        if item.has("Sequence"):
            text = item.object("Sequence")
            items.append(_Item(_FIRST if text.string("id") == "A" else _SECOND, _type_of(text)))
            continue
        token = item.object("SpecialToken")
        spelling = token.string("id")
        if spelling not in found.by_text:
            raise item.error(f"{item.name('SpecialToken')} {spelling!r} is not in the vocabulary")
        items.append(_Item(found.by_text[spelling], _type_of(token)))
    if [item.id for item in items].count(_FIRST) != 1:
        raise step.error(f"{step.name(name)} must contain the text A once")
    return items


def _type_of(item: Fields) -> int:
    return item.integer("type_id", default=0, least=0)
