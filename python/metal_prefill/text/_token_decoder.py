"""Decoding of a stream of tokens, one at a time."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Container

from metal_prefill.text._token_bytes import Piece


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

    def copy(self) -> TokenDecoder:
        """Return an independent decoder in the same state."""
        other = TokenDecoder(self._piece_of, self._skip_special, self._first, self._shown)
        other._utf8.setstate(self._utf8.getstate())
        return other

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
