"""The vocabulary of a GGUF file: the segmentation of text into its tokens, and the bytes of these.

There are five kinds. ``gpt2`` is byte-level BPE: a pattern splits the text, bytes are represented by
printable characters, and a list of merges builds the tokens. ``llama`` is SentencePiece BPE: spaces are
represented by U+2581, and among all adjacent pairs that form a token, the one with the best score merges
first. ``gemma4`` is the same with a list of merges. ``bert`` is WordPiece, and ``t5`` is SentencePiece's
Unigram model.
"""

from __future__ import annotations

import codecs
import logging
import re
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from metal_prefill._support.arguments import token_id as check_token_id
from metal_prefill._support.cached_property import cached_property
from metal_prefill.files._gguf_file import GGUFFile
from metal_prefill.files._metadata_keys import ID_KEYS, MAX_INT

_log = logging.getLogger("metal_prefill")

SPACE = "\u2581"  # begins a token at the beginning of a word
# Published vocabularies have runs of up to 256 spaces; finding merges is quadratic.
MAX_TOKEN_CHARACTERS = 1024
MERGES_KEY = "tokenizer.ggml.merges"
ENCODER_KINDS = ("bert", "t5")
KINDS = ("gpt2", "llama", "gemma4", *ENCODER_KINDS)
# Texts that get a space before them, in files that differ from SentencePiece: the whole text, or all between
# spelled tokens; in either case, only texts that begin with another character. In these files, spaces become
# U+2581 after tokens are recognized; in others, before.
PREPEND_SCHEMES = ("first", "always", "never")
PREPEND_KEY = "tokenizer.ggml.prepend_scheme"
# Options of tokens that are recognized by their spelling, and the keys under tokenizer.ggml that list their
# ids: white space before or after the token belongs to it; it is recognized between words only; or in the
# normalized text between tokens without this option, where it has its normalized spelling.
SPELLING_KEYS = {
    "lstrip": "lstrip_tokens",
    "rstrip": "rstrip_tokens",
    "single_word": "single_word_tokens",
    "normalized": "normalized_tokens",
}
# Key under tokenizer.ggml: ids of user-defined tokens that segmentation does not make.
SPELLED_KEY = "spelled_tokens"
# Key under tokenizer.ggml: ids of user-defined tokens of SentencePiece that text spells with U+2581 where the
# file, like those of llama.cpp, which decodes such tokens as they are, has spaces.
MARKED_KEY = "marked_tokens"
_PHI3 = re.compile(r"phi[ -]?3", re.IGNORECASE)
_PHI3_KEEPS_SPACE = ("<unk>", "<s>", "<|endoftext|>")


class TokenType(IntEnum):
    """Values of ``tokenizer.ggml.token_type``."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


SPECIAL_TYPES = (TokenType.CONTROL, TokenType.UNKNOWN)  # no text produces them


@dataclass(frozen=True)
class PreTokenizer:
    """Patterns that split text before merging, applied in order; the text between matches is kept.

    With `whole_words`, a piece that is itself a token is used without applying merges. `adds_bos` is the
    default for files that do not set whether a text starts with the BOS token. With `nfc`, text is
    normalized first.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    adds_bos: bool = False
    nfc: bool = False


# Patterns from the tokenizers published with the models.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K = (
    r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Combining marks are part of a word.
_QWEN35 = (_CL100K % r"\p{N}").replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}")
# Upper and lower case end words; contractions belong to the word before them.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORD = r"[^\r\n\p{L}\p{N}]?%s(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K = "|".join(
    (
        *(_WORD % f"{_UPPER}*{_LOWER}+", _WORD % f"{_UPPER}+{_LOWER}*"),
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = PreTokenizer((_CL100K % r"\p{N}{1,3}",), whole_words=True, adds_bos=True)
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    # Files of Mamba-2 name mpt, files of Pythia olmo.
    **dict.fromkeys(("gpt-2", "mpt", "olmo", "phi-2", "jina-v2-code", "roberta-bpe"), PreTokenizer((_GPT2,))),
    "modern-bert": PreTokenizer((_GPT2,), nfc=True),
    **dict.fromkeys(("smollm", "starcoder", "command-r"), PreTokenizer((r"\p{N}", _GPT2))),
    **dict.fromkeys(("llama-bpe", "llama-v3", "llama3", "falcon3", "falcon-h1", "lfm2"), _LLAMA3),
    # Files of SmolLM3 name the first, files of Granite 4 the second.
    **dict.fromkeys(("smaug-bpe", "dbrx"), PreTokenizer(_LLAMA3.patterns)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2"), PreTokenizer((_CL100K % r"\p{N}",))),
    "qwen35": PreTokenizer((_QWEN35,)),
    "gpt-4o": PreTokenizer((_O200K,)),
    "tekken": PreTokenizer((_TEKKEN,), whole_words=True, adds_bos=True),
    "granite-embed-multi-97m": PreTokenizer((_O200K,), whole_words=True),
}


@dataclass(frozen=True)
class Vocabulary:
    """Tokens of a model file."""

    kind: str  # ``"gpt2"``, ``"llama"``, ``"bert"`` or ``"t5"``
    pre: PreTokenizer  # pre-tokenizer; used for ``gpt2`` only
    tokens: list[str]  # text of each id, as written in the file
    types: npt.NDArray[np.int32]  # `TokenType` of each id

    @classmethod
    def from_gguf(cls, gguf: GGUFFile) -> Vocabulary:
        """Read tokens and types; `model_of` reads merges and scores."""
        kind: str = gguf.metadata.typed("tokenizer.ggml.model", "string")
        if kind not in KINDS:
            raise gguf.unsupported(
                f"tokenizer model {kind} is not supported; supported are {', '.join(KINDS)}"
            )
        if kind == "gemma4":
            if MERGES_KEY not in gguf.metadata:
                raise gguf.error(f"{MERGES_KEY} is missing, which tokenizer model {kind} needs")
            kind = "llama"
        tokens: list[str] = gguf.metadata.typed("tokenizer.ggml.tokens", "array[string]")
        if not tokens:
            raise gguf.error("tokenizer.ggml.tokens is empty")
        longest = max(range(len(tokens)), key=lambda i: len(tokens[i]))
        if len(tokens[longest]) > MAX_TOKEN_CHARACTERS:
            raise gguf.error(
                f"token {longest} of tokenizer.ggml.tokens has {len(tokens[longest])} characters, more than "
                f"{MAX_TOKEN_CHARACTERS}"
            )
        if "tokenizer.ggml.token_type" in gguf.metadata:
            types = gguf.metadata.numbers("tokenizer.ggml.token_type", "integer", len(tokens))
            unknown = np.flatnonzero((types < min(TokenType)) | (types > max(TokenType)))
            if unknown.size:
                raise gguf.error(
                    f"token {unknown[0]} has type {types[unknown[0]]} in "
                    f"tokenizer.ggml.token_type, must be {min(TokenType)} to {max(TokenType)}"
                )
            types = types.astype(np.int32)
        else:
            types = np.full(len(tokens), TokenType.NORMAL, np.int32)
        marked = gguf.metadata.token_ids(MARKED_KEY, len(tokens))
        tokens = [text.replace(" ", SPACE) if i in marked else text for i, text in enumerate(tokens)]
        if kind in ENCODER_KINDS:
            # Early converters declared the special tokens of encoders as normal ones.
            keys = {*ID_KEYS.values()} - {"eot", "eom"}
            named = [i for key in keys if (i := gguf.metadata.token_id(key, len(tokens))) is not None]
            types[[i for i in named if types[i] != TokenType.UNKNOWN]] = TokenType.CONTROL
        return cls(kind, _pre_tokenizer(gguf) if kind == "gpt2" else PreTokenizer(()), tokens, types)

    def spelling(self, gguf: GGUFFile, option: str) -> frozenset[int]:
        """Return the ids of tokens with an option of `SPELLING_KEYS`.

        Files of Phi-3 do not state them. They are found by the name of the model, as in llama.cpp.
        """
        key = SPELLING_KEYS[option]
        name = str(gguf.metadata.get("general.name", ""))
        if option != "rstrip" or f"tokenizer.ggml.{key}" in gguf.metadata or not _PHI3.search(name):
            return gguf.metadata.token_ids(key, len(self.tokens))
        spelled = np.isin(self.types, (*SPECIAL_TYPES, TokenType.USER_DEFINED))
        return frozenset(
            i for i in map(int, np.flatnonzero(spelled)) if self.tokens[i] not in _PHI3_KEEPS_SPACE
        )

    def spelled(self, token_id: int) -> str:
        """Return how text spells a token that is recognized by its spelling."""
        text = self.tokens[token_id]
        word = self.kind == "bert" and self.types[token_id] == TokenType.USER_DEFINED
        return text.removeprefix(SPACE) if word else text

    def prepend_scheme(self, gguf: GGUFFile) -> str:
        """Return one of `PREPEND_SCHEMES`; empty for files that do not state one."""
        scheme: str = gguf.metadata.typed(PREPEND_KEY, "string", default="")
        if scheme and scheme not in PREPEND_SCHEMES:
            known = ", ".join(PREPEND_SCHEMES)
            raise gguf.error(f"{PREPEND_KEY} is {scheme!r}, must be one of {known}")
        return scheme


def _pre_tokenizer(gguf: GGUFFile) -> PreTokenizer:
    key = "tokenizer.ggml.pre"
    if key not in gguf.metadata:
        _log.warning("%s: %s is missing; using the default pre-tokenizer", gguf.path, key)
    name: str = gguf.metadata.typed(key, "string", default="default")
    if name not in PRE_TOKENIZERS:
        raise gguf.unsupported(
            f"pre-tokenizer {name} is not supported; supported are {', '.join(PRE_TOKENIZERS)}"
        )
    return PRE_TOKENIZERS[name]


# Key under tokenizer.ggml of files of folders: whether second texts of pairs have type 1, in Unigram files.
TYPES_KEY = "types_pairs"


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


def special_tokens(
    gguf: GGUFFile, vocabulary: Vocabulary
) -> tuple[dict[str, int | None], bool, bool, TokenFrame]:
    """Return the ids of special tokens by the names in `ID_KEYS`, and attributes of `Tokenizer`.

    The latter are ``add_bos``, ``add_eos`` and ``frame``. The defaults of flags are those of llama.cpp. Of
    the flags in a WordPiece file, either ``add_eos`` or ``add_sep`` ends a text with ``[SEP]``, which also
    separates pairs; with ``double_separator``, two of them do. In other files, a pair has the end of the
    first text, if there is one, and the separator.
    """
    tokens = vocabulary.tokens
    ids = {name: gguf.metadata.token_id(key, len(tokens)) for name, key in ID_KEYS.items()}
    separated = ids["sep"] is not None  # files whose second texts have another type state it
    word_piece, unigram = vocabulary.kind == "bert", vocabulary.kind == "t5"
    if word_piece:  # early converters wrote only one of the ids of a token, or none
        spelled = {text: tokens.index(text) for text in ("[CLS]", "[SEP]", "[UNK]") if text in tokens}
        ids["bos"] = _first(ids["bos"], ids["cls"], spelled.get("[CLS]"))
        ids["eos"] = ids["sep"] = _first(ids["sep"], ids["eos"], spelled.get("[SEP]"))
        ids["unk"] = _first(ids["unk"], spelled.get("[UNK]"))
    adds_bos = (vocabulary.kind == "llama" or vocabulary.pre.adds_bos) and ids["bos"] is not None
    add_bos = gguf.metadata.flag("add_bos_token", default=adds_bos or word_piece)
    add_eos = gguf.metadata.flag("add_eos_token", default=unigram and ids["eos"] is not None)
    add_sep = gguf.metadata.flag("add_sep_token", default=word_piece or (unigram and ids["sep"] is not None))
    ids["sep"] = _first(ids["sep"], ids["eos"])
    if word_piece:
        add_eos, add_sep = add_eos or add_sep, False
    for name, adds in (("bos", add_bos), ("eos", add_eos), ("sep", add_sep)):
        if adds and ids[name] is None:
            raise gguf.error(
                f"tokenizer.ggml.add_{name}_token is set, but tokenizer.ggml.{ID_KEYS[name]}_token_id is "
                "missing"
            )
    end = _known(ids["eos"] if add_eos else None)
    second = ids["eos"] if gguf.metadata.flag("double_separator", default=False) else None  # MPNet's pairs
    separator = (*end, *_known(second if word_piece else ids["sep"] if add_sep else None))
    typed = separated if word_piece else gguf.metadata.flag(TYPES_KEY, default=False)
    types = gguf.metadata.integer("tokenizer.ggml.token_type_count", 0, MAX_INT, default=2)
    frame = TokenFrame(_known(ids["bos"] if add_bos else None), separator, end, int(typed and types > 1))
    return ids, add_bos, add_eos, frame


def _first(*ids: int | None) -> int | None:
    return next(iter(_known(*ids)), None)


def _known(*ids: int | None) -> tuple[int, ...]:
    return tuple(i for i in ids if i is not None)


def begins_word(text: str) -> bool:
    """Return whether a token of WordPiece begins words; a single U+2581 is the character inside a word."""
    return text.startswith(SPACE) and text != SPACE


class Piece(NamedTuple):
    """Bytes and kind of a token."""

    raw: bytes
    special: bool  # a control token or the unknown token


def _bytes_of_characters() -> dict[str, int]:
    """Invert GPT-2's byte mapping: printable Latin-1 maps to itself, the rest to U+0100 and up, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTES = _bytes_of_characters()


class TokenBytes:
    """Bytes of tokens, converted when they are first needed."""

    def __init__(self, gguf: GGUFFile, vocabulary: Vocabulary) -> None:
        self._gguf, self._vocabulary = gguf, vocabulary
        self._pieces: dict[int, Piece] = {}  # tokens converted so far

    def piece(self, token_id: int) -> Piece:
        token_id = check_token_id(token_id, len(self._vocabulary.tokens))
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._converted(token_id)
        return piece

    def _converted(self, token_id: int) -> Piece:
        kind = TokenType(int(self._vocabulary.types[token_id]))
        special = kind in SPECIAL_TYPES
        spelled = special or kind == TokenType.USER_DEFINED
        text = self._vocabulary.spelled(token_id)
        if self._vocabulary.kind == "bert":  # separates all tokens by spaces but for parts of words
            word = spelled or begins_word(text)
            raw = (" " + (text if spelled else text[1:]) if word else text).encode("utf-8")
        elif self._vocabulary.kind == "gpt2":
            raw = bytes(BYTES[c] for c in text) if BYTES.keys() >= set(text) else text.encode("utf-8")
        elif kind == TokenType.BYTE:
            match = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", text)
            if match is None:
                raise self._gguf.error(f"byte token {text!r} does not have the form <0x0A>")
            raw = bytes.fromhex(match[1])
        else:
            raw = text.replace(SPACE, " ").encode("utf-8")
        return Piece(raw, special)

    def first(self, token_id: int) -> bytes:
        """Return the bytes of a token that begins a text, without the space that was put before the text.

        A token of a Unigram vocabulary loses each U+2581, as in transformers.
        """
        raw = self.piece(token_id).raw
        if self._vocabulary.kind != "t5":
            return raw.removeprefix(b" ")
        text = self._vocabulary.tokens[token_id]
        return text.replace(SPACE, "").encode("utf-8") if SPACE in text else raw

    def plain(self, token_id: int) -> bytes:
        """Return the bytes of a token that plain text can produce; empty for other tokens."""
        piece = self.piece(token_id)
        return b"" if piece.special else piece.raw

    @cached_property
    def missing(self) -> bytes:
        """Bytes without a single-byte token, in ascending order; see `Tokenizer.missing_bytes`."""
        if self._vocabulary.kind in ENCODER_KINDS:
            return b""
        single = {raw for i in range(len(self._vocabulary.tokens)) if len(raw := self.plain(i)) == 1}
        return bytes(byte for byte in range(256) if bytes([byte]) not in single)


class TokenDecoder:
    """Incremental decoder of a stream of token ids, which holds incomplete characters back.

    Created by :meth:`Tokenizer.decoder`. `first` returns the bytes of the first token of a text; None
    selects those of `piece_of`. Special tokens in `shown` are not skipped.
    """

    def __init__(
        self,
        piece_of: Callable[[int], Piece],
        skip_special: bool,
        first: Callable[[int], bytes] | None,
        shown: Container[int] = (),
    ) -> None:
        self._piece_of = piece_of
        self._skip_special = skip_special
        self._first = first
        self._shown = shown
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def step(self, token_id: int) -> str:
        """Add one token and return the text that it completes, which may be empty."""
        raw, special = self._piece_of(token_id)
        if special and self._skip_special and token_id not in self._shown:
            return ""
        if self._first is not None:
            raw = self._first(token_id)
            self._first = None
        return self._utf8.decode(raw)

    def flush(self) -> str:
        """End the stream and return the remaining text: U+FFFD for an incomplete character."""
        return self._utf8.decode(b"", final=True)
