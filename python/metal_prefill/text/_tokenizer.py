"""Text to token ids and back, by the vocabulary that a GGUF file carries."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer as Segmenter

from metal_prefill._support.arguments import token_id as check_token_id
from metal_prefill._support.cached_property import cached_property
from metal_prefill.errors import GGUFError
from metal_prefill.files._gguf_file import GGUFFile
from metal_prefill.text._vocabulary import SPACE, TokenType, Vocabulary

if TYPE_CHECKING:
    from metal_prefill.text._chat_template import ChatTemplate

# Control tokens that end a turn or a text in the supported models, for files whose metadata does not
# name them all.
END_TOKENS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "</s>",
)

_SPECIAL = (TokenType.CONTROL, TokenType.UNKNOWN)


class _Piece(NamedTuple):
    """Role of a token in a text."""

    raw: bytes
    special: bool  # a control token or the unknown one
    spelled: bool  # recognized by its spelling, not by segmenting text


def _bytes_of_characters() -> dict[str, int]:
    """Invert GPT-2's writing of bytes: printable Latin-1 is itself, the rest is U+0100 and up, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTES = _bytes_of_characters()


class Tokenizer:
    """The tokenizer of a model file. Made by :meth:`from_gguf`; safe to use from several threads.

    Attributes
    ----------
    vocab_size : int
        Number of tokens.
    bos_id, eos_id, eot_id, eom_id, pad_id, unk_id : int or None
        Ids of the tokens that begin a text, end a text, end a turn, end a message, pad and stand for the
        unknown; None where the file names none.
    stop_ids : frozenset of int
        Tokens after which nothing is to be generated.
    add_bos : bool
        Whether `encode` begins with `bos_id` unless told otherwise.
    add_eos : bool
        Whether a text for an embedding or a class ends with `eos_id`; `encode` never adds it.
    """

    def __init__(self, gguf: GGUFFile) -> None:
        self._gguf = gguf
        self._vocabulary = Vocabulary.from_gguf(gguf)
        self._pieces: dict[int, _Piece] = {}  # of the tokens that were decoded so far
        self.vocab_size = len(self._vocabulary.tokens)
        self.bos_id = self._special_id("bos")
        self.eos_id = self._special_id("eos")
        self.eot_id = self._special_id("eot")
        self.eom_id = self._special_id("eom")
        self.pad_id = self._special_id("padding")
        self.unk_id = self._special_id("unknown")
        sentencepiece = self._vocabulary.kind == "llama"
        self.space_prefix = sentencepiece and self._flag("add_space_prefix", default=True)
        adds_bos = (sentencepiece or self._vocabulary.pre.adds_bos) and self.bos_id is not None
        self.add_bos = self._flag("add_bos_token", default=adds_bos)
        if self.add_bos and self.bos_id is None:
            raise GGUFError(
                f"{gguf.path}: tokenizer.ggml.add_bos_token is set, "
                "but tokenizer.ggml.bos_token_id is missing"
            )
        self.add_eos = self._flag("add_eos_token", default=False)
        if self.add_eos and self.eos_id is None:
            raise GGUFError(
                f"{gguf.path}: tokenizer.ggml.add_eos_token is set, "
                "but tokenizer.ggml.eos_token_id is missing"
            )
        named = {i for i in (self.eos_id, self.eot_id, self.eom_id) if i is not None}
        self.stop_ids = frozenset(named | {i for i in self._special.values() if self.token(i) in END_TOKENS})

    @classmethod
    def from_gguf(cls, gguf: GGUFFile) -> Tokenizer:
        """Read the vocabulary of an open file; what encoding needs beyond it is built on the first `encode`.

        Raises
        ------
        GGUFError
            The file has no vocabulary, or one that contradicts itself.
        UnsupportedModelError
            The kind of tokenizer or its way of splitting text is not implemented.
        """
        return cls(gguf)

    def encode(
        self,
        text: str,
        *,
        add_bos: bool | None = None,
        parse_special: bool = False,
        strict: bool = False,
    ) -> list[int]:
        """Turn text into token ids.

        Text for which the vocabulary has no token is left out, as by other tokenizers of the model, or
        becomes the unknown token where there is one; see :attr:`missing_bytes`.

        Parameters
        ----------
        text
            Any text. Nothing in it is normalized.
        add_bos
            Whether to begin with `bos_id`; by default as the file says.
        parse_special
            Whether the spelling of a control token, such as ``<|im_end|>``, stands for that token. Never set
            it for text that comes from outside.
        strict
            Raise an error instead of leaving text out.

        Raises
        ------
        TypeError
            If `text` is not a str.
        ValueError
            If `add_bos` is set and the vocabulary has no such token, the text holds lone surrogates, or, with
            `strict`, the tokens do not stand for the whole text.
        """
        if not isinstance(text, str):
            raise TypeError(f"a text must be a str, got {type(text).__name__}")
        ids: list[int] = []
        if self.add_bos if add_bos is None else add_bos:
            if self.bos_id is None:
                raise ValueError("the vocabulary has no token that begins a text")
            ids.append(self.bos_id)
        text.encode("utf-8")  # lone surrogates have no tokens; the error names their position
        for piece in self.split(text, parse_special):
            if isinstance(piece, int):
                ids.append(piece)
            else:
                if self.space_prefix:  # a piece is all there is between two tokens
                    piece = " " + piece
                plain = piece.replace(" ", SPACE) if self._vocabulary.kind == "llama" else piece
                made = self._segmenter.encode(plain, add_special_tokens=False).ids
                if strict:
                    self._check_whole(piece, made)
                ids += made
        return ids

    @cached_property
    def missing_bytes(self) -> bytes:
        """Bytes, in order, for which the vocabulary has no token of their own.

        A character that needs one of them is left out by :meth:`encode` unless a longer token contains it,
        and text that is decoded lacks it likewise. Empty for vocabularies that cover all text; SmolLM2's
        lacks 21 of the 256.
        """
        single = {raw for i in range(self.vocab_size) if len(raw := self._plain_bytes(i)) == 1}
        return bytes(byte for byte in range(256) if bytes([byte]) not in single)

    def _plain_bytes(self, token_id: int) -> bytes:
        """Bytes of a token that can come out of plain text; none for others."""
        piece = self._piece(token_id)
        return b"" if piece.spelled else piece.raw

    def _check_whole(self, piece: str, ids: Sequence[int]) -> None:
        # SentencePiece writes a space as U+2581, and cannot write that otherwise.
        wanted = piece.replace(SPACE, " ") if self._vocabulary.kind == "llama" else piece
        if b"".join(map(self._plain_bytes, ids)) == wanted.encode("utf-8"):
            return
        lost = next((c for c in piece if set(c.encode("utf-8")) & set(self.missing_bytes)), None)
        raise ValueError(
            f"the vocabulary has no tokens for {piece[:40]!r}"
            if lost is None
            else f"the vocabulary has no token for {lost!r}, U+{ord(lost):04X}: it lacks some of the bytes "
            f"{lost.encode('utf-8').hex(' ')}"
        )

    @property
    def chat_template(self) -> str | None:
        """Jinja text of the file's chat template; None where it has none."""
        return self._template("tokenizer.chat_template")

    def _template(self, key: str) -> str | None:
        source = self._gguf.metadata.get(key)
        if source is not None and not isinstance(source, str):
            raise GGUFError(
                f"{self._gguf.path}: {key} has type {self._gguf.metadata.type_name(key)}, expected string"
            )
        return source

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[int]:
        """Turn a conversation into token ids, by the file's chat template.

        Control tokens are those that the template writes, never what a message spells like one. A file
        without a template is served with a plain one: each message a paragraph under its role, as in
        ``USER:``; an answer then ends with an empty line.

        Parameters
        ----------
        messages
            In order; each with a ``role`` (``system``, ``user``, ``assistant``, ``tool``, ...) and a
            ``content``. What an assistant called is in its ``tool_calls``, as
            :meth:`metal_prefill.text.ToolCall.as_message` makes them; their arguments may be JSON.
        tools
            What the model may call, each as JSON schema: see :func:`metal_prefill.text.tool_names`.
            Of a file with several templates, the one that is named ``tool_use`` is taken.
        add_generation_prompt
            End with the beginning of an answer.
        variables
            For the template, such as ``enable_thinking``. They are not searched for control tokens: do not
            put text from outside here.

        Raises
        ------
        ChatTemplateError
            The template is not valid, refuses these messages, or takes no tools.
        TypeError, ValueError
            A message or tool is not a mapping, or has no proper role or name.
        """
        ids: list[int] = []
        for text, special in self.chat_pieces(messages, tools, add_generation_prompt, variables):
            ids += [self._special[text]] if special else self.encode(text, add_bos=False)
        return ids

    def chat_pieces(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> list[tuple[str, bool]]:
        """Return the rendered text in pieces, each with whether it is a control token's spelling."""
        template = self._chat_with_tools if tools else self._chat
        return template.render(
            messages,
            {
                "add_generation_prompt": add_generation_prompt,
                "add_bos": self.add_bos,
                "bos_token": self._spelling(self.bos_id),
                "eos_token": self._spelling(self.eos_id),
                "pad_token": self._spelling(self.pad_id),
                "unk_token": self._spelling(self.unk_id),
                "documents": None,
                **variables,
            },
            tools,
        )

    @property
    def chat_stop(self) -> tuple[str, ...]:
        """Strings that end an answer; none where the file has a template, whose control tokens do."""
        from metal_prefill.text._chat_template import PLAIN_STOP

        return () if self.chat_template else (PLAIN_STOP,)

    def check_tools(self, tools: Sequence[Mapping[str, Any]] | None) -> None:
        """Check that the file's chat template passes these tools to the model.

        Raises
        ------
        ChatTemplateError
            It takes no tools.
        TypeError, ValueError
            A tool is not a mapping, or has no name.
        """
        self._chat_with_tools.check_tools(tools)

    @cached_property
    def _chat_with_tools(self) -> ChatTemplate:
        from metal_prefill.text._chat_template import ChatTemplate

        source = self._template("tokenizer.chat_template.tool_use")
        return self._chat if source is None else ChatTemplate(source, self._special)

    @cached_property
    def _chat(self) -> ChatTemplate:
        from metal_prefill.text._chat_template import PLAIN_TEMPLATE, ChatTemplate

        return ChatTemplate(self.chat_template or PLAIN_TEMPLATE, self._special)

    def _spelling(self, token_id: int | None) -> str:
        return "" if token_id is None else self.token(token_id)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Turn token ids into text; the inverse of `encode`.

        Parameters
        ----------
        ids
            Token ids, from the beginning of a text. For a continuation use `decoder`.
        skip_special
            Leave out control tokens instead of spelling them.

        Raises
        ------
        ValueError
            If an id is outside the vocabulary.

        Notes
        -----
        Bytes that are not UTF-8 become U+FFFD.
        """
        decoder = TokenDecoder(self, skip_special, self.space_prefix)
        return "".join([*map(decoder.step, ids), decoder.flush()])

    def decoder(self, *, skip_special: bool = True) -> TokenDecoder:
        """Return a decoder that takes a continuation token by token."""
        return TokenDecoder(self, skip_special, strip_prefix=False)

    def token(self, token_id: int) -> str:
        """Text of a token as the file writes it, such as ``Ġthe`` or ``<0x0A>``."""
        return self._vocabulary.tokens[self._checked(token_id)]

    def is_special(self, token_id: int) -> bool:
        """Whether a token is a control token or the unknown token."""
        return self._piece(token_id).special

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that a token stands for, not always whole characters; of a special token its spelling."""
        return self._piece(token_id).raw

    def __repr__(self) -> str:
        return f"<metal_prefill.Tokenizer {self._vocabulary.kind}, {self.vocab_size} tokens>"

    def _piece(self, token_id: int) -> _Piece:
        token_id = self._checked(token_id)
        piece = self._pieces.get(token_id)
        if piece is None:
            kind = TokenType(int(self._vocabulary.types[token_id]))
            special = kind in _SPECIAL
            spelled = special or kind == TokenType.USER_DEFINED
            raw = self._raw_bytes(self.token(token_id), kind, spelled)
            piece = self._pieces[token_id] = _Piece(raw, special, spelled)
        return piece

    def _raw_bytes(self, text: str, kind: TokenType, spelled: bool) -> bytes:
        if spelled:
            return text.encode("utf-8")
        if self._vocabulary.kind == "gpt2":
            return b"".join(bytes([_BYTES[c]]) if c in _BYTES else c.encode("utf-8") for c in text)
        if kind == TokenType.BYTE:
            return bytes([_byte_value(self._gguf, text)])
        return text.replace(SPACE, " ").encode("utf-8")

    @cached_property
    def _segmenter(self) -> Segmenter:
        return self._vocabulary.segmenter(self._gguf)

    @cached_property
    def _special(self) -> dict[str, int]:
        """Ids of control and unknown tokens by their spelling."""
        ids = np.flatnonzero(np.isin(self._vocabulary.types, _SPECIAL))
        return {self._vocabulary.tokens[i]: int(i) for i in ids if self._vocabulary.tokens[i]}

    @cached_property
    def _user_defined(self) -> dict[str, int]:
        """Ids, by their spelling, of tokens that stand for it wherever it occurs."""
        ids = np.flatnonzero(self._vocabulary.types == TokenType.USER_DEFINED)
        return {self._vocabulary.tokens[i]: int(i) for i in ids if self._vocabulary.tokens[i]}

    @cached_property
    def _patterns(self) -> tuple[re.Pattern[str] | None, re.Pattern[str] | None]:
        """Match a user-defined token, or that or a special one; the longest first. None: there are none."""
        return _alternatives(self._user_defined), _alternatives(self._user_defined | self._special)

    def split(self, text: str, parse_special: bool) -> Iterator[str | int]:
        """Cut out the tokens that are recognized by their spelling."""
        pattern = self._patterns[parse_special]
        end = 0
        for match in pattern.finditer(text) if pattern else ():
            if match.start() > end:
                yield text[end : match.start()]
            found = self._user_defined.get(match[0])
            yield self._special[match[0]] if found is None else found
            end = match.end()
        if end < len(text):
            yield text[end:]

    def _special_id(self, name: str) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        if key not in self._gguf.metadata:
            return None
        value = self._gguf.metadata[key]
        if isinstance(value, bool) or not isinstance(value, int):
            raise GGUFError(
                f"{self._gguf.path}: {key} has type {self._gguf.metadata.type_name(key)}, expected an integer"
            )
        if not 0 <= value < self.vocab_size:
            raise GGUFError(
                f"{self._gguf.path}: {key} is {value}, outside the vocabulary of {self.vocab_size} tokens"
            )
        return value

    def _flag(self, name: str, default: bool) -> bool:
        key = f"tokenizer.ggml.{name}"
        value = self._gguf.metadata.get(key, default)
        if not isinstance(value, bool):
            raise GGUFError(
                f"{self._gguf.path}: {key} has type {self._gguf.metadata.type_name(key)}, expected bool"
            )
        return value

    def _checked(self, token_id: int) -> int:
        return check_token_id(token_id, self.vocab_size)


class TokenDecoder:
    """Turns a stream of token ids into text, never showing an incomplete character.

    Made by :meth:`Tokenizer.decoder`. With `strip_prefix`, the space that `encode` sets before each stretch
    of plain text is taken away again.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool, strip_prefix: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._strip_prefix = strip_prefix
        self._prefix_next = strip_prefix
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def copy(self) -> TokenDecoder:
        """Return one that has taken the same tokens."""
        other = TokenDecoder(self._tokenizer, self._skip_special, self._strip_prefix)
        other._prefix_next = self._prefix_next
        other._utf8.setstate(self._utf8.getstate())
        return other

    def step(self, token_id: int) -> str:
        """Take one token and return the text that is complete with it, which may be empty."""
        raw, special, spelled = self._tokenizer._piece(token_id)
        if self._prefix_next and not spelled:
            raw = raw.removeprefix(b" ")
        self._prefix_next = self._strip_prefix and spelled
        return "" if special and self._skip_special else self._utf8.decode(raw)

    def flush(self) -> str:
        """Return what is left at the end: U+FFFD for a character that was never completed."""
        return self._utf8.decode(b"", final=True)


def _alternatives(tokens: Iterable[str]) -> re.Pattern[str] | None:
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def _byte_value(gguf: GGUFFile, text: str) -> int:
    match = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", text)
    if match is None:
        raise GGUFError(f"{gguf.path}: byte token {text!r} is not of the form <0x0A>")
    return int(match[1], 16)
