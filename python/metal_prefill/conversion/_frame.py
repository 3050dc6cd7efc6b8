"""Tokens that begin, separate and end texts, as the post-processor of ``tokenizer.json`` defines them."""

from typing import NamedTuple

from metal_prefill.conversion._fields import Fields
from metal_prefill.conversion._folder_vocabulary import FolderVocabulary, steps
from metal_prefill.text._special_tokens import TYPES_KEY

_FIRST, _SECOND = -1, -2  # in place of the ids of texts


class _Item(NamedTuple):
    id: int  # of a token, or of a text
    type: int


def set_frame(found: FolderVocabulary, json: Fields, settings: Fields, config: Fields) -> None:
    """Set which tokens begin, separate and end texts."""
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
        found.ids.pop("sep", None)  # the type of a token is the number of separators before it
    if config.integer("type_vocab_size", default=1, least=0) > 1 and _reads_types(settings) and template:
        _check_types(found, json, [*single, *(pair if word_piece or reads_pairs else ())])


def _between(begin: list[int], end: list[int], pair: list[int]) -> list[int] | None:
    """Return the tokens between two texts; None if a pair has other tokens at its ends than a text."""
    places = [pair.index(text) for text in (_FIRST, _SECOND) if text in pair]
    if len(places) < 2 or places[0] > places[1] or pair[: places[0]] != begin or pair[places[1] + 1 :] != end:
        return None
    return pair[places[0] + 1 : places[1]]


def _problem(found: FolderVocabulary, end: list[int], between: list[int] | None) -> str:
    """Return the property of pairs that a file cannot describe; empty if there is none."""
    if between is None:
        return "adds other tokens at the ends of pairs than at those of texts"
    if found.model == "bert":
        return "" if between in (end, 2 * end) else "separates pairs by tokens other than the end of a text"
    if between[: len(end)] == end and len(between) - len(end) in (0, 1):
        return ""
    spelled = ", ".join(found.tokens[i] for i in between) or "none"
    return f"separates pairs by the tokens {spelled}; supported are those that end a text, and one more"


def _reads_types(settings: Fields) -> bool:
    """Return whether the tokenizer gives a model the types of tokens."""
    if settings.has("model_input_names"):
        return "token_type_ids" in settings.sequence("model_input_names")
    return "Roberta" not in settings.string("tokenizer_class", default="")


def _check_types(found: FolderVocabulary, json: Fields, items: list[_Item]) -> None:
    """Raise an error unless the second text and what follows it alone have type 1, where types are known."""
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


def _template(step: Fields, name: str, found: FolderVocabulary) -> list[_Item]:
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
