"""Bytes that the tokens of a vocabulary represent, and decoding of a stream of tokens."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Container
from typing import NamedTuple

from metal_prefill._support.arguments import token_id as check_token_id
from metal_prefill._support.cached_property import cached_property
from metal_prefill.errors import GGUFError
from metal_prefill.files._gguf_file import GGUFFile
from metal_prefill.text._encoder_vocabulary import SPACE, begins_word
from metal_prefill.text._vocabulary import ENCODER_KINDS, SPECIAL_TYPES, TokenType, Vocabulary


class Piece(NamedTuple):
    """Bytes and kind of a token."""

    raw: bytes
    special: bool  # a control token or the unknown token


def _bytes_of_characters() -> dict[str, int]:
    """Invert GPT-2's byte mapping: printable Latin-1 maps to itself, the rest to U+0100 and up, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTES = _bytes_of_characters()


class TokenBytes:
    """Bytes of tokens, converted when they are first needed."""

    def __init__(self, gguf: GGUFFile, vocabulary: Vocabulary) -> None:
        self._path = gguf.path
        self._vocabulary = vocabulary
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
            raw = bytes(_BYTES[c] for c in text) if _BYTES.keys() >= set(text) else text.encode("utf-8")
        elif kind == TokenType.BYTE:
            raw = bytes([self._byte_value(text)])
        else:
            raw = text.replace(SPACE, " ").encode("utf-8")
        return Piece(raw, special)

    def _byte_value(self, text: str) -> int:
        match = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", text)
        if match is None:
            raise GGUFError(f"{self._path}: byte token {text!r} does not have the form <0x0A>")
        return int(match[1], 16)

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
