"""Tokens of ``tokenizer.json``, with those that are added to the vocabulary and have options."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from metal_prefill.conversion._fields import Fields
from metal_prefill.text._vocabulary import MAX_TOKEN_CHARACTERS, SPELLING_KEYS, TokenType


@dataclass
class ListedTokens:
    """Tokens in the order of their ids."""

    tokens: list[str]  # text of each id, as ``tokenizer.json`` spells it
    types: list[int]
    # Ids of added tokens by the options that change how they are recognized, of `SPELLING_KEYS`.
    spelling: dict[str, list[int]] = field(default_factory=dict)

    def mark_bytes(self) -> None:
        """Give tokens such as ``<0x0A>`` the type of bytes."""
        for i, text in enumerate(self.tokens):
            if self.types[i] == TokenType.NORMAL and re.fullmatch(r"<0x[0-9A-F]{2}>", text):
                self.types[i] = TokenType.BYTE


def listed_tokens(
    json: Fields,  # contents of ``tokenizer.json``
    ids: Mapping[str, int],  # ids of the model's tokens
    tokens: Sequence[str] | None = None,  # the model's tokens by id, if several have the same text
    *,
    # Whether the normalizer keeps a spelling, so that normalized text has it where the text does. None for
    # WordPiece, whose segmenter recognizes added tokens in normalized text.
    survives: Callable[[str], bool] | None,
) -> ListedTokens:
    """Return the token of each id, and its type, with the tokens that are added to the vocabulary."""
    if not json.object("normalizer").values:
        survives = lambda text: True  # noqa: E731
    by_id = dict(enumerate(tokens)) if tokens is not None else {i: text for text, i in ids.items()}
    special: dict[int, bool] = {}
    spelling: dict[str, list[int]] = {}
    for added in json.objects("added_tokens"):
        i, text = added.integer("id", least=0), added.string("content")
        if by_id.setdefault(i, text) != text:
            raise added.error(f"{added.name('content')} is {text!r}, but token {i} is {by_id[i]!r}")
        special[i] = added.boolean("special", default=False)
        for option in (*SPELLING_KEYS, "single_word"):
            if not added.boolean(option, default=False):
                continue
            if option == "normalized" and _makes_no_difference(text, special[i], survives):
                continue
            if option == "single_word" or (option == "normalized" and survives):
                raise added.unsupported(f"{added.name(option)} is true for the token {text!r}")
            spelling.setdefault(option, []).append(i)
        if survives is None and not special[i] and text.isalnum() and text not in ids:
            # The segmenter would also recognize it where normalization makes it.
            added.require("normalized", (True,), False)
    if not by_id:
        raise json.error("has no tokens")
    if min(by_id) != 0 or max(by_id) >= len(by_id) + 4096:
        raise json.error(f"{len(by_id)} tokens have the ids {min(by_id)} to {max(by_id)}")
    longest = max(by_id, key=lambda i: len(by_id[i]))
    if len(by_id[longest]) > MAX_TOKEN_CHARACTERS:
        raise json.error(
            f"token {longest} has {len(by_id[longest])} characters, more than {MAX_TOKEN_CHARACTERS}"
        )
    found = ListedTokens([], [], spelling)
    for i in range(max(by_id) + 1):
        found.tokens.append(by_id.get(i, f"[PAD{i}]"))
        kind = TokenType.NORMAL if i in by_id else TokenType.UNUSED
        if i in special:
            kind = TokenType.CONTROL if special[i] else TokenType.USER_DEFINED
        found.types.append(int(kind))
    return found


def _makes_no_difference(text: str, special: bool, survives: Callable[[str], bool] | None) -> bool:
    # Control tokens are recognized in prompts only, as they are spelled there.
    return special or (survives is not None and survives(text))
