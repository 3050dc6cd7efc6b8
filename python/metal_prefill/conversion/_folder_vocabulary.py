"""A vocabulary as a GGUF file describes it: its special tokens, and those around texts."""

from pathlib import Path
from typing import Any

from metal_prefill.conversion._added_tokens import ListedTokens
from metal_prefill.conversion._fields import Fields
from metal_prefill.text._encoder_vocabulary import SPACE
from metal_prefill.text._tokenizer import END_TOKENS
from metal_prefill.text._vocabulary import ENCODER_KINDS, MARKED_KEY, SPELLING_KEYS, TokenType

_STOPS = ("eot", "eom")  # further tokens that end generation
NAMES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_UNUSED_SCORE = -10000.0  # of ids without a token


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
    """

    def __init__(
        self,
        model: str,
        pre: str,
        listed: ListedTokens,
        *,
        scores: list[float] | None = None,
        merges: list[str] | None = None,
    ) -> None:
        self.model, self.pre = model, pre
        self.tokens, self.types = listed.tokens, listed.types
        # Ids by the spelling in ``tokenizer.json``, which `tokens` may change.
        self.by_text: dict[str, int] = {}
        for i, text in enumerate(listed.tokens):
            self.by_text.setdefault(text, i)
        self.scores, self.merges = scores, merges
        self.charsmap: bytes | None = None
        self.ids: dict[str, int] = {}  # special tokens by the names in `NAMES`
        # Further metadata under ``tokenizer.ggml``.
        self.flags: dict[str, Any] = {SPELLING_KEYS[name]: ids for name, ids in listed.spelling.items()}
        self.chat_template: Any = None

    def mark_spaces(self) -> None:
        """Spell user-defined tokens as SentencePiece decodes them, and note which text spells with U+2581."""
        marked = [
            i
            for i, text in enumerate(self.tokens)
            if SPACE in text and self.types[i] == TokenType.USER_DEFINED
        ]
        for i in marked:
            self.tokens[i] = self.tokens[i].replace(SPACE, " ")
        if marked:
            self.flags[MARKED_KEY] = marked


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


def set_stops(found: FolderVocabulary, config: Fields, folder: Path) -> None:
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
