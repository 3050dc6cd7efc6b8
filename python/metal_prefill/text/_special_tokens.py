"""Special tokens of a file, and those that begin, separate and end texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from metal_prefill.errors import GGUFError
from metal_prefill.files._gguf_file import GGUFFile
from metal_prefill.files._metadata_keys import MAX_INT
from metal_prefill.text._vocabulary import Vocabulary

# Key under tokenizer.ggml of files of folders: whether second texts of pairs have type 1, in Unigram files.
TYPES_KEY = "types_pairs"
_KEYS = {  # keys under tokenizer.ggml, without _token_id
    "bos": "bos",
    "eos": "eos",
    "eot": "eot",
    "eom": "eom",
    "pad": "padding",
    "unk": "unknown",
    "sep": "seperator",
    "cls": "cls",
    "mask": "mask",
}


class TokenPair(NamedTuple):
    """Tokens of two texts that a model reads together."""

    ids: list[int]  # token ids, with those that begin, separate and end the texts
    # Token type of each: 0 for the first text and the tokens around it, 1 for the second text and the tokens
    # after it. All are 0 if the model has a single type, or none.
    types: list[int]


class TokenFrame(NamedTuple):
    """Tokens around a text, or around a pair of texts."""

    # Tokens before the first text, between two texts, and after the last text.
    begin: tuple[int, ...]
    between: tuple[int, ...]
    end: tuple[int, ...]
    second_type: int  # token type of a second text: 1 or 0

    @property
    def pair_tokens(self) -> int:
        """Number of tokens that a pair has in addition to those of its texts."""
        return len(self.begin) + len(self.between) + len(self.end)

    def text(self, ids: Sequence[int]) -> list[int]:
        """Return the tokens of a text, given those of its words."""
        return [*self.begin, *ids, *self.end]

    def pair(self, first: Sequence[int], second: Sequence[int]) -> TokenPair:
        """Return the tokens of a pair, given those of the words of each text."""
        before = [*self.begin, *first, *self.between]
        after = [*second, *self.end]
        return TokenPair(before + after, [0] * len(before) + [self.second_type] * len(after))


class SpecialTokens(NamedTuple):
    """Special tokens of a file."""

    ids: dict[str, int | None]  # by the names in `_KEYS`; None for those that the file does not define
    # Whether a text begins with ``bos``, and whether it ends with ``eos``; see `Tokenizer`.
    add_bos: bool
    add_eos: bool
    frame: TokenFrame

    @classmethod
    def from_gguf(cls, gguf: GGUFFile, vocabulary: Vocabulary) -> SpecialTokens:
        """Read the ids and flags of a file.

        The defaults of flags are those of llama.cpp. Of the flags in a WordPiece file, either ``add_eos`` or
        ``add_sep`` ends a text with ``[SEP]``, which also separates pairs; with ``double_separator``, two of
        them do. In other files, a pair has the end of the first text, if there is one, and the separator.
        """
        tokens = vocabulary.tokens
        ids = {name: gguf.metadata.token_id(key, len(tokens)) for name, key in _KEYS.items()}
        separated = ids["sep"] is not None  # the type of a token is the number of separators before it
        word_piece, unigram = vocabulary.kind == "bert", vocabulary.kind == "t5"
        if word_piece:  # early converters wrote only one of the ids of a token, or none
            spelled = {text: tokens.index(text) for text in ("[CLS]", "[SEP]", "[UNK]") if text in tokens}
            ids["bos"] = _first(ids["bos"], ids["cls"], spelled.get("[CLS]"))
            ids["eos"] = ids["sep"] = _first(ids["sep"], ids["eos"], spelled.get("[SEP]"))
            ids["unk"] = _first(ids["unk"], spelled.get("[UNK]"))
        adds_bos = (vocabulary.kind == "llama" or vocabulary.pre.adds_bos) and ids["bos"] is not None
        add_bos = gguf.metadata.flag("add_bos_token", default=adds_bos or word_piece)
        add_eos = gguf.metadata.flag("add_eos_token", default=unigram and ids["eos"] is not None)
        add_sep = gguf.metadata.flag(
            "add_sep_token", default=word_piece or (unigram and ids["sep"] is not None)
        )
        ids["sep"] = _first(ids["sep"], ids["eos"])
        if word_piece:
            add_eos, add_sep = add_eos or add_sep, False
        added = (("bos", "bos", add_bos), ("eos", "eos", add_eos), ("sep", "seperator", add_sep))
        for name, key, adds in added:
            if adds and ids[name] is None:
                raise GGUFError(
                    f"{gguf.path}: tokenizer.ggml.add_{name}_token is set, "
                    f"but tokenizer.ggml.{key}_token_id is missing"
                )
        end = _known(ids["eos"] if add_eos else None)
        second = (
            ids["eos"] if gguf.metadata.flag("double_separator", default=False) else None
        )  # MPNet's pairs
        separator = (*end, *_known(second if word_piece else ids["sep"] if add_sep else None))
        typed = separated if word_piece else gguf.metadata.flag(TYPES_KEY, default=False)
        types = gguf.metadata.integer("tokenizer.ggml.token_type_count", 0, MAX_INT, default=2)
        frame = TokenFrame(_known(ids["bos"] if add_bos else None), separator, end, int(typed and types > 1))
        return cls(ids, add_bos, add_eos, frame)


def _first(*ids: int | None) -> int | None:
    return next(iter(_known(*ids)), None)


def _known(*ids: int | None) -> tuple[int, ...]:
    return tuple(i for i in ids if i is not None)
