"""A vocabulary as a GGUF file describes it: its special tokens, and those around texts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from metal_prefill.conversion._fields import Fields
from metal_prefill.text._vocabulary import TokenType

NAMES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_UNUSED_SCORE = -10000.0  # of ids without a token


@dataclass
class FolderVocabulary:
    """A vocabulary as a GGUF file describes it.

    Attributes
    ----------
    model, pre : str
        Values of ``tokenizer.ggml.model`` and ``tokenizer.ggml.pre``.
    tokens : list of str
    types : list of int
    scores : list of float or None
    merges : list of str or None
    ids : dict of str to int
        Special tokens by the names in `NAMES`.
    flags : dict of str to bool
        Further metadata under ``tokenizer.ggml``.
    charsmap : bytes or None
    chat_template : str, list or None
    """

    model: str
    pre: str
    tokens: list[str]
    types: list[int]
    scores: list[float] | None = None
    merges: list[str] | None = None
    ids: dict[str, int] = field(default_factory=dict)
    flags: dict[str, bool] = field(default_factory=dict)
    charsmap: bytes | None = None
    chat_template: Any = None


def steps(json: Fields, name: str, inner: str) -> list[Fields]:
    """Return the steps of a normalizer or pre-tokenizer, which may be a sequence of them."""
    step = json.object(name)
    if not step.values:
        return []
    if step.string("type", default="") != "Sequence":
        return [step]
    return step.objects(inner)


def set_special_tokens(
    found: FolderVocabulary, json: Fields, settings: Fields, config: Fields, folder: Path
) -> None:
    """Set the ids of special tokens, as the settings of the tokenizer name them."""
    spelled = Fields.read_if_present(folder / "special_tokens_map.json")
    by_text = {
        added.string("content"): added.integer("id", least=0) for added in json.objects("added_tokens")
    }
    for name in NAMES:
        for source in (settings, spelled):
            text = source.values.get(f"{name}_token")
            text = text.get("content") if isinstance(text, dict) else text
            if isinstance(text, str) and name not in found.ids:
                i = by_text.get(text)
                if i is None and text in found.tokens:
                    i = found.tokens.index(text)
                if i is not None:
                    found.ids[name] = i
        stated = config.values.get(f"{name}_token_id")
        stated = stated[0] if isinstance(stated, list) and stated else stated
        if isinstance(stated, int) and not isinstance(stated, bool) and 0 <= stated < len(found.tokens):
            found.ids.setdefault(name, stated)
    if found.model == "bert" and "unk" not in found.ids:
        unknown = json.object("model").string("unk_token", default="[UNK]")
        if unknown not in by_text:
            raise json.error(f"the unknown token {unknown} is not among added_tokens")
        found.ids["unk"] = by_text[unknown]


def frame(found: FolderVocabulary, json: Fields, settings: Fields) -> None:
    """Set which tokens begin, separate and end texts, as the post-processor defines them."""
    single: list[int] = []
    pair: list[int] = []
    for step in steps(json, "post_processor", "processors"):
        kind = step.string("type")
        if kind in ("BertProcessing", "RobertaProcessing"):
            first, last = (_named_id(step, name) for name in ("cls", "sep"))
            middle = [last] if kind == "BertProcessing" else [last, last]
            single, pair = [first, -1, last], [first, -1, *middle, -2, last]
        elif kind == "TemplateProcessing":
            single, pair = (_template(step, name, found) for name in ("single", "pair"))
        elif kind != "ByteLevel":
            raise step.unsupported(f"{step.name('type')} {kind} is not supported")
    if not single:
        single = [-1]
    begin, end = single[: single.index(-1)], single[single.index(-1) + 1 :]
    if len(begin) > 1 or len(end) > 1:
        raise json.unsupported("post_processor adds more than one token at an end of a text")
    for name, added in (("bos", begin), ("eos", end)):
        if added:
            found.ids[name] = added[0]
        stated = settings.values.get(f"add_{name}_token") is True
        found.flags[f"add_{name}_token"] = bool(added) or (stated and name in found.ids)
    if pair and found.model in ("bert", "t5", "gpt2") and -2 in pair:
        middle = pair[pair.index(-1) + 1 : pair.index(-2)]
        if found.model == "bert":
            found.ids["sep"] = found.ids.get("eos", found.ids.get("sep", 0))
            if middle != end:
                raise json.unsupported(
                    "post_processor separates pairs by tokens other than the end of a text"
                )
            found.flags["add_sep_token"] = False
        elif middle != begin and middle[: len(end)] == end and len(middle) - len(end) in (0, 1):
            found.flags["add_sep_token"] = len(middle) > len(end)
            found.ids["sep"] = middle[-1] if middle else found.ids.get("sep", found.ids.get("eos", 0))


def _named_id(step: Fields, name: str) -> int:
    match step.values.get(name):
        case [str(), int(i)]:
            return i
    raise step.error(f"{step.name(name)} must be a token and its id")


def _template(step: Fields, name: str, found: FolderVocabulary) -> list[int]:
    """Return the ids of a template, with -1 for the first text and -2 for the second."""
    ids: list[int] = []
    for item in step.objects(name):
        if item.has("Sequence"):
            ids.append(-1 if item.object("Sequence").string("id") == "A" else -2)
            continue
        text = item.object("SpecialToken").string("id")
        if text not in found.tokens:
            raise item.error(f"{item.name('SpecialToken')} {text!r} is not in the vocabulary")
        ids.append(found.tokens.index(text))
    if ids.count(-1) != 1:
        raise step.error(f"{step.name(name)} must contain the text A once")
    return ids


def fill(found: FolderVocabulary, config: Fields) -> None:
    """Add unused tokens for the rows of the embedding beyond the vocabulary."""
    size = config.integer("vocab_size", default=len(found.tokens))
    if size < len(found.tokens):
        raise config.error(f"vocab_size is {size}, but the tokenizer has {len(found.tokens)} tokens")
    if size > 2 * len(found.tokens) + 65536:
        raise config.error(f"vocab_size is {size}, far more than the {len(found.tokens)} of the tokenizer")
    for i in range(len(found.tokens), size):
        found.tokens.append(f"[PAD{i}]")
        found.types.append(int(TokenType.UNUSED))
        if found.scores is not None:
            found.scores.append(_UNUSED_SCORE)
