"""Conversion between text and token ids with the vocabulary of a GGUF file."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import models

from metal_prefill._support.arguments import stops_of
from metal_prefill._support.arguments import token_id as check_token_id
from metal_prefill._support.cached_property import cached_property
from metal_prefill.files._architecture import ARCHITECTURES
from metal_prefill.files._gguf_file import GGUFFile
from metal_prefill.text._reasoning import CHANNEL, LAST_TOKENS, THINK, Tags, begins_in
from metal_prefill.text._segmentation import SpelledTokens, TextSegmenter, WordTokens
from metal_prefill.text._segmenters import Pipeline, model_of, pipeline_of
from metal_prefill.text._vocabulary import (
    ENCODER_KINDS,
    SPACE,
    TokenBytes,
    TokenDecoder,
    Vocabulary,
    begins_word,
    special_tokens,
)

if TYPE_CHECKING:
    from metal_prefill.text._chat_template import ChatTemplate

# Control tokens that end a turn or a text in the supported models, for files with incomplete metadata.
END_TOKENS = (
    "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>",
    "<turn|>", "</s>", "<|tool_response>", "<start_function_response>",
)  # fmt: skip

# For files without a template: one paragraph per message, headed by the role, as in a play; and the text that
# ends an answer.
_PLAIN_TEMPLATE = r"""{{ bos_token if add_bos else '' -}}
{% for message in messages -%}
{{ '' if message.role == 'system' else message.role | upper + ':\n' }}{{ message.content }}{{ '\n\n' }}
{%- endfor -%}
{{ 'ASSISTANT:\n' if add_generation_prompt else '' }}"""
_PLAIN_STOP = "\n\n"

# Tokens for filling in the middle, for files whose metadata does not name them.
_FILL_FORMS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<|fim_begin|>", "<|fim_hole|>", "<|fim_end|>"),
)

_BLOCK = 1 << 14  # characters of texts that are encoded together
_MOST_UNCHECKED = 1 << 14  # characters of a text that is encoded even if it cannot fit
_PART = 1 << 16  # characters that the segmenter gets at once, in some 0.1 s
_LETTERS = "A-Za-z\u0410-\u044f"
_BORDER = re.compile(f"(?<=[{_LETTERS}]) (?=[{_LETTERS}])")
_BORDER_IN_TOKEN = re.compile(f"[{_LETTERS}]{SPACE}")
# A token that is recognized at a border, or next to it, may take its space or change the next tokens.
_BORDER_IN_SPELLING = re.compile(f"[{_LETTERS}](?:[ {SPACE}]|$)|^[ {SPACE}](?:[{_LETTERS}]|$)")


class TokenSpan(NamedTuple):
    """A token, and the characters of the text from which it was made."""

    id: int
    # First character, and the one after the last. Tokens that share a character have overlapping spans,
    # as has the space that a vocabulary puts before a text, with its first character.
    start: int
    end: int


class Tokenizer:
    """Tokenizer of a model file. Safe to use from several threads.

    Parameters
    ----------
    gguf
        Open file, whose vocabulary is read. The structures for encoding are built by the first `encode`.

    Attributes
    ----------
    vocab_size : int
        Number of tokens.
    bos_id, eos_id, eot_id, eom_id, pad_id, unk_id, mask_id : int or None
        Ids of the beginning-of-text, end-of-text, end-of-turn, end-of-message, padding, unknown and mask
        tokens; None if the file does not define the token. A WordPiece text begins with ``[CLS]``, which is
        `bos_id`, and ends with ``[SEP]``, which is `eos_id`.
    stop_ids : frozenset of int
        Tokens that end generation.
    add_bos : bool
        Whether `encode` adds `bos_id` by default.
    add_eos : bool
        Whether a text to embed or classify ends with `eos_id`; `encode` never adds it.
    frame : TokenFrame
        Tokens around a text to embed or classify, and around a pair of texts.

    Raises
    ------
    GGUFError
        The vocabulary is missing or inconsistent.
    UnsupportedModelError
        The type of tokenizer or pre-tokenizer is not implemented.
    """

    def __init__(self, gguf: GGUFFile) -> None:
        self._gguf = gguf
        self._vocabulary = Vocabulary.from_gguf(gguf)
        self._bytes = TokenBytes(gguf, self._vocabulary)
        self.vocab_size = len(self._vocabulary.tokens)
        ids, self.add_bos, self.add_eos, self.frame = special_tokens(gguf, self._vocabulary)
        self.bos_id, self.eos_id, self.eot_id, self.eom_id = (ids[n] for n in ("bos", "eos", "eot", "eom"))
        self.pad_id, self.unk_id, self.mask_id = (ids[n] for n in ("pad", "unk", "mask"))
        self.space_prefix = self._vocabulary.kind == "llama" and gguf.metadata.flag(
            "add_space_prefix", default=True
        )
        self._prepend_scheme = self._vocabulary.prepend_scheme(gguf)
        self._spelled = SpelledTokens(gguf, self._vocabulary)
        self._segmenters: dict[tuple[bool, bool], TextSegmenter] = {}
        self._templates: dict[bool, ChatTemplate] = {}  # without and with tools
        named = {i for i in (self.eos_id, self.eot_id, self.eom_id) if i is not None}
        self.stop_ids = frozenset(
            named | {i for i in self._spelled.special.values() if self.token(i) in END_TOKENS}
        )

    def encode(
        self,
        text: str,
        *,
        add_bos: bool | None = None,
        parse_special: bool = False,
        strict: bool = False,
    ) -> list[int]:
        """Convert text to token ids.

        Text without a token in the vocabulary is omitted, as in other tokenizers of the model, or becomes the
        unknown token if the vocabulary has one; see :attr:`missing_bytes`.

        Parameters
        ----------
        text
            Any text. It is not normalized.
        add_bos
            Whether to start with `bos_id`; the default is `Tokenizer.add_bos`.
        parse_special
            Whether the spelling of a control token, such as ``<|im_end|>``, becomes that token. Never set
            this for untrusted text.
        strict
            Raise an error instead of omitting text.

        Raises
        ------
        TypeError
            If `text` is not a str.
        ValueError
            If `add_bos` is set and the vocabulary has no such token, if the text contains lone surrogates,
            or, with `strict`, if the tokens do not represent the whole text.
        """
        if not isinstance(text, str):
            raise TypeError(f"text must be a str, got {type(text).__name__}")
        ids: list[int] = []
        if self.add_bos if add_bos is None else add_bos:
            if self.bos_id is None:
                raise ValueError("add_bos is set, but the vocabulary has no beginning-of-text token")
            ids.append(self.bos_id)
        ids += self._ids(text, parse_special)
        if strict:
            for piece in self.split(text, parse_special):
                if isinstance(piece, str):
                    self._check_whole(piece)
        return ids

    def encode_all(self, texts: Iterable[str], *, parse_special: bool = False) -> Iterator[list[int]]:
        """Yield the result of ``encode(text, add_bos=False)`` for each text, in less time.

        Raises
        ------
        ValueError
            The text that would be next contains lone surrogates.
        """
        for block in _blocks(texts):
            made: list[list[int] | None] = [None] * len(block)
            if self._words is not None:
                made = self._words.encode_all(block, parse_special=parse_special)
            for text, ids in zip(block, made, strict=True):
                yield self.encode(text, add_bos=False, parse_special=parse_special) if ids is None else ids

    def encode_pieces(self, pieces: Iterable[str | int], *, parse_special: bool = False) -> list[int]:
        """Convert texts, and the tokens between them, to token ids, without `bos_id`.

        Raises
        ------
        ValueError
            A text contains lone surrogates.
        """
        ids: list[int] = []
        listed = list(pieces)
        if self._splits_pieces:
            listed = [part for piece in listed for part in self._split_piece(piece, parse_special)]
        for before, piece, after in zip([None, *listed], listed, [*listed[1:], None]):  # noqa: B905
            if isinstance(piece, int):
                ids.append(piece)
                continue
            text = self._spelled.text_between(before, piece, after)
            normalized = self._spelled.normalized
            begins = before is None or (self._prepends and before not in normalized)
            if self._prepends and after in normalized and text.endswith(" "):  # with which the token begins
                text = f" {text[:-1]}" if begins else text[:-1]
                begins = False
            ids += self._ids(text, parse_special, begins=begins)
        return ids

    @cached_property
    def _splits_pieces(self) -> bool:
        """Whether tokens in a text change which space at its ends belongs to the tokens around it."""
        if self._prepends and self._spelled.normalized:
            return True
        spelled = (*self._spelled.special, *self._spelled.user_defined)
        return self._spelled.take_white_space and any(text != text.strip() for text in spelled)

    def _split_piece(self, piece: str | int, parse_special: bool) -> Iterable[str | int]:
        return self.split(piece, parse_special) if isinstance(piece, str) else (piece,)

    def _ids(self, text: str, parse_special: bool, *, begins: bool = True) -> list[int]:
        """Return the tokens of a text; unless it `begins`, it continues another one or follows a token."""
        if self._words is not None:
            made = self._words.encode(text, parse_special=parse_special)
            if made is not None:
                return made
        text.encode("utf-8")  # lone surrogates have no tokens; the error names their position
        ids: list[int] = []
        for _, part in self._parts(text):
            ids += self._segmenter(parse_special, begins).ids(part)
            begins = self._prepends
        return ids

    @property
    def _prepends(self) -> bool:
        """Whether each text between tokens has a space before it, even if it begins with one."""
        return self.space_prefix and not self._prepend_scheme

    @cached_property
    def _model(self) -> models.Model:
        return model_of(self._gguf, self._vocabulary)

    def _segmenter(self, parse_special: bool, begins: bool) -> TextSegmenter:
        key = parse_special, begins or not self.space_prefix
        if key not in self._segmenters:
            pipeline = pipeline_of(self._gguf, self._vocabulary, begins=key[1])
            spelled = self._spelled.recognized(parse_special)
            self._segmenters[key] = TextSegmenter(self._model, pipeline, spelled)
        return self._segmenters[key]

    def least_tokens(self, text: str) -> int:
        """Return a lower bound of the number of tokens of a text, without encoding it.

        It is 0 for short texts, and for vocabularies that omit text or replace any length by one token.
        """
        if len(text) < _MOST_UNCHECKED or self._longest_token == 0:
            return 0
        raw = text.encode("utf-8", "replace")
        # A character that contains a missing byte may be omitted.
        present = len(raw) - 4 * sum(raw.count(byte) for byte in self.missing_bytes)
        return max(present, 0) // self._longest_token

    @cached_property
    def _longest_token(self) -> int:
        """Largest number of bytes that a token can represent; 0 if it is not limited."""
        kind = self._vocabulary.kind
        fuses = kind in ENCODER_KINDS or (kind == "llama" and self.missing_bytes)
        if fuses or self._spelled.take_white_space:
            return 0
        pipeline = pipeline_of(self._gguf, self._vocabulary)
        shrinks = 4 if kind == "gpt2" and pipeline.normalizer is not None else 1  # 9 bytes of Hangul become 3
        return shrinks * max(len(token.encode("utf-8", "replace")) for token in self._vocabulary.tokens)

    def _parts(self, text: str) -> Iterator[tuple[int, str]]:
        """Divide a long text so that Ctrl-C takes effect between its parts, whose tokens are its own.

        A part begins with a space between two letters, where every pattern of `PRE_TOKENIZERS`, WordPiece and
        Unigram begin a word. SentencePiece merges nothing across it if no token has a space after a letter.
        Yields the place of each part, too, which does not contain the space if each text has one of its own.
        """
        start = 0
        while len(text) - start > _PART and self._divisible:
            border = _BORDER.search(text, start + _PART)
            if border is None:
                break
            yield start, text[start : border.start()]
            start = border.end() if self._prepends else border.start()
        if text:
            yield start, text[start:]

    @cached_property
    def _divisible(self) -> bool:
        """Whether words at spaces between letters are independent of each other."""
        kind = self._vocabulary.kind
        if any(map(_BORDER_IN_SPELLING.search, (*self._spelled.special, *self._spelled.user_defined))):
            return False
        if kind == "llama":
            return not any(map(_BORDER_IN_TOKEN.search, self._vocabulary.tokens))
        return kind in ("gpt2", "bert") or self._gguf.metadata.flag("add_space_prefix", default=True)

    def encode_spans(self, text: str, *, parse_special: bool = False) -> list[TokenSpan]:
        """Convert text to tokens with their places in the text.

        The tokens are those of ``encode(text, add_bos=False)``.

        Raises
        ------
        TypeError, ValueError
            See :meth:`encode`.
        """
        if not isinstance(text, str):
            raise TypeError(f"text must be a str, got {type(text).__name__}")
        text.encode("utf-8")
        spans, begins = [], True
        for at, part in self._parts(text):
            made = self._segmenter(parse_special, begins).spans(part)
            for n, (i, (start, end)) in enumerate(made):
                if n == 0 < at and self._prepends:  # the space before the part is that of its first token
                    start, end = -1, 0 if self.token(i) == SPACE else end
                elif i in self._spelled.with_options:
                    start, end = self._spelled.place_of(i, part, start, end)
                spans.append(TokenSpan(i, at + start, at + end))
            begins = self._prepends
        return spans

    def continues_word(self, span: TokenSpan, text: str) -> bool:
        """Return whether a token of `encode_spans` is inside a word of its text, not at the beginning.

        WordPiece marks such tokens. In other vocabularies, words are separated by white space. An unknown
        token begins a word.
        """
        if span.id == self.unk_id:
            return False
        if self._vocabulary.kind == "bert":
            return not begins_word(self.token(span.id))
        around = text[max(span.start - 1, 0) : span.start + 1]
        return span.start > 0 and not any(map(str.isspace, around))

    @property
    def missing_bytes(self) -> bytes:
        """Bytes without a single-byte token in the vocabulary, in ascending order.

        :meth:`encode` omits a character that contains such a byte unless a longer token covers it, so decoded
        text lacks it too. Empty for vocabularies that cover all text; SmolLM2's lacks 21 of the 256 bytes.
        Also empty for the vocabularies of encoders, which replace text without a token by the unknown token.
        """
        return self._bytes.missing

    def _check_whole(self, piece: str) -> None:
        """Raise an error unless the tokens of a text without spelled tokens represent all of it."""
        ids = self._ids(piece, parse_special=False, begins=False)
        if self._vocabulary.kind in ENCODER_KINDS:
            if self.unk_id in ids:
                unknown = next(span for span in self.encode_spans(piece) if span.id == self.unk_id)
                raise ValueError(
                    f"the vocabulary has no tokens for {piece[unknown.start : unknown.end][:40]!r}"
                )
            return
        # SentencePiece represents a space as U+2581, so it cannot represent U+2581 itself.
        wanted = piece.replace(SPACE, " ") if self._vocabulary.kind == "llama" else piece
        made = b"".join(map(self._bytes.plain, ids))
        if made in (wanted.encode("utf-8"), f" {wanted}".encode()):
            return
        lost = next((c for c in piece if set(c.encode("utf-8")) & set(self.missing_bytes)), None)
        raise ValueError(
            f"the vocabulary has no tokens for {piece[:40]!r}"
            if lost is None
            else f"the vocabulary has no token for {lost!r}, U+{ord(lost):04X}: it lacks some of the bytes "
            f"{lost.encode('utf-8').hex(' ')}"
        )

    def _template_source(self, key: str) -> str | None:
        return self._gguf.metadata.typed(key, "string", default=None)

    @cached_property
    def chat_template(self) -> str | None:
        """Jinja source of the file's chat template, or None."""
        return self._template_source("tokenizer.chat_template")

    def _template(self, *, tools: bool) -> ChatTemplate:
        """Return the template of conversations with or without tools."""
        if tools not in self._templates:
            from metal_prefill.text._chat_template import ChatTemplate  # imports jinja2

            own = self._template_source("tokenizer.chat_template.tool_use") if tools else self.chat_template
            self._templates[tools] = (
                self._template(tools=False)
                if tools and own is None
                else ChatTemplate(own or _PLAIN_TEMPLATE, self._spelled.special)
            )
        return self._templates[tools]

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[int]:
        """Convert a conversation to token ids with the file's chat template.

        Only the template can produce control tokens; their spellings in messages remain plain text. A file
        without a template uses a plain one: each message is a paragraph headed by its role, such as
        ``USER:``, and an answer ends with an empty line.

        Parameters
        ----------
        messages
            Conversation in order; mappings with a ``role`` (``system``, ``user``, ``assistant``, ``tool``,
            ...) and a ``content``. The calls of an assistant message are in its ``tool_calls``, in the form
            returned by :meth:`metal_prefill.text.ToolCall.as_message`; their arguments may be JSON.
        tools
            Tools that the model may call, as JSON schemas; see :func:`metal_prefill.text.tool_names`. If the
            file has several templates, the one named ``tool_use`` is used.
        documents
            Texts to answer from, as the template reads them, usually with a ``title`` and a ``text``.
        add_generation_prompt
            Append the assistant header, so that the model continues with its answer.
        variables
            Template variables, such as ``enable_thinking``. They are not searched for control tokens: never
            pass untrusted text here.

        Raises
        ------
        ChatTemplateError
            The template is not valid, rejects these messages, or does not support tools or documents.
        TypeError, ValueError
            A message, tool or document is not a mapping, or has no valid role or name.
        """
        return self.encode_chat(
            self.chat_pieces(messages, tools, add_generation_prompt, variables, documents)
        )

    def encode_chat(self, pieces: Iterable[tuple[str, bool]]) -> list[int]:
        """Convert the pieces of `chat_pieces` to token ids."""
        return self.encode_pieces(
            self._spelled.special[text] if special else text for text, special in pieces
        )

    def chat_pieces(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
        documents: Sequence[Mapping[str, Any]] | None = None,
        *,
        untrusted: Mapping[str, Any] | None = None,
        continues: bool = False,
    ) -> list[tuple[str, bool]]:
        """Render messages to pieces of text, each with a flag for the spelling of a control token.

        `untrusted` are variables that cannot spell control tokens. With `continues`, the text ends with that
        of the last message, for the model to continue.
        """
        return self._template(tools=bool(tools)).render(
            messages,
            {
                "add_generation_prompt": add_generation_prompt,
                "add_bos": self.add_bos,
                "bos_token": self._spelling(self.bos_id),
                "eos_token": self._spelling(self.eos_id),
                "pad_token": self._spelling(self.pad_id),
                "unk_token": self._spelling(self.unk_id),
                **variables,
            },
            tools,
            documents,
            untrusted=untrusted,
            continues=continues,
        )

    def template_reads(self, variable: str, tools: bool) -> bool:
        """Return whether the template of conversations with or without tools reads a variable."""
        return self._template(tools=tools).reads(variable)

    def chat_stop(self, given: str | int | Sequence[str | int] | None = None) -> list[str | int]:
        """Return what ends an answer: the items of a given `stop`, and an empty line without a template.

        The template of a file ends answers with control tokens.
        """
        own: list[str | int] = [] if self.chat_template else [_PLAIN_STOP]
        return own if given is None else [*own, *stops_of(given)]

    def check_tools(self, tools: Sequence[Mapping[str, Any]] | None) -> None:
        """Check that the file's chat template passes these tools to the model.

        Raises
        ------
        ChatTemplateError
            The template does not support tools.
        TypeError, ValueError
            A tool is not a mapping, or has no name.
        """
        self._template(tools=True).check_tools(tools)

    def _spelling(self, token_id: int | None) -> str:
        return "" if token_id is None else self.token(token_id)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Convert token ids to text, as transformers and llama.cpp do.

        The inverse of `encode`, except that with vocabularies that put a space before every text between
        spelled tokens (Llama 2, encoders), only that at the beginning is removed.

        Parameters
        ----------
        ids
            Token ids of a whole text. For a continuation, use `decoder`.
        skip_special
            Omit control tokens instead of spelling them.

        Raises
        ------
        ValueError
            If an id is outside the vocabulary.

        Notes
        -----
        Bytes that are not UTF-8 become U+FFFD.
        """
        decoder = self.decoder(skip_special=skip_special, whole=True)
        return "".join([*map(decoder.step, ids), decoder.flush()])

    def decoder(
        self, *, skip_special: bool = True, whole: bool = False, shown: Container[int] = ()
    ) -> TokenDecoder:
        """Return a decoder that takes a token at a time, for a continuation or for a whole text.

        Special tokens in `shown` are not skipped.
        """
        strips_space = self.space_prefix or self._vocabulary.kind in ENCODER_KINDS
        first = self._bytes.first if whole and strips_space else None
        return TokenDecoder(self._bytes.piece, skip_special, first, shown)

    def turn_ends(self, ids: npt.NDArray[np.int32]) -> list[int]:
        """Return the positions after the end-of-turn tokens of a prompt.

        The first token does not count: in some vocabularies, the same token begins and ends texts.
        """
        return (np.flatnonzero(np.isin(ids[1:], list(self.stop_ids))) + 2).tolist()

    @cached_property
    def reasoning_tags(self) -> Tags | None:
        """Texts around the reasoning in answers; None if the chat template has none."""
        # A template names the end to remove the reasoning of earlier answers.
        template = self.chat_template or ""
        return next((tags for tags in (THINK, CHANNEL) if tags.end in template), None)

    def ends_in_reasoning(self, prompt: Sequence[int]) -> bool:
        """Return whether the tokens of a prompt end within reasoning."""
        tags = self.reasoning_tags
        return tags is not None and begins_in(self.decode(prompt[-LAST_TOKENS:], skip_special=False), tags)

    def shown_tokens(self, *, reasoning: bool, calls: bool) -> frozenset[int]:
        """Return the control tokens that are part of an answer with reasoning, or with calls of tools."""
        special, tags = self._spelled.special, (self.reasoning_tags if reasoning else None) or ()
        shown = {text for text in special if any(tag.startswith(text) for tag in tags)}
        if calls:
            from metal_prefill.text._tool_calls import MARKS  # not for encoders, which need no parser

            shown |= MARKS & special.keys()
        return frozenset(special[text] for text in shown)

    @cached_property
    def fill_tokens(self) -> tuple[int, int, int] | None:
        """Tokens before a prefix, before a suffix, and before the text between them; None without such."""
        keys = ("fim_pre", "fim_suf", "fim_mid")
        ids = [self._gguf.metadata.token_id(key, self.vocab_size) for key in keys]
        spelled = self._spelled.special | self._spelled.user_defined
        for form in _FILL_FORMS:
            ids = [spelled.get(text) if i is None else i for i, text in zip(ids, form, strict=True)]
        before, between, after = ids
        if before is None or between is None or after is None:
            return None
        return before, between, after

    def token(self, token_id: int) -> str:
        """Return the text of a token as written in the file, such as ``Ġthe`` or ``<0x0A>``."""
        return self._vocabulary.tokens[check_token_id(token_id, self.vocab_size)]

    def is_special(self, token_id: int) -> bool:
        """Return whether a token is a control token or the unknown token."""
        return self._bytes.piece(token_id).special

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token, possibly part of a character; for a special token, its spelling."""
        return self._bytes.piece(token_id).raw

    def __repr__(self) -> str:
        return f"<metal_prefill.Tokenizer {self._vocabulary.kind}, {self.vocab_size} tokens>"

    @cached_property
    def causal(self) -> bool:
        """Whether tokens of the model attend only to earlier ones, as in generative models."""
        architecture = str(self._gguf.metadata.get("general.architecture"))
        usual = architecture not in ARCHITECTURES or ARCHITECTURES[architecture].causal
        return bool(self._gguf.metadata.typed(f"{architecture}.attention.causal", "bool", default=usual))

    @cached_property
    def _words(self) -> WordTokens | None:
        if self._vocabulary.kind != "bert":
            return None
        pipeline = pipeline_of(self._gguf, self._vocabulary)
        assert pipeline.normalizer is not None
        normal = pipeline.normalizer.normalize_str
        user_defined, special = self._spelled.user_defined, self._spelled.special
        return WordTokens(
            TextSegmenter(self._model, pipeline),
            lowercase=self._gguf.metadata.flag("normalizer.lowercase", default=True),
            user_defined=[*user_defined, *map(normal, user_defined)],
            special=[*special, *map(normal, special)],
        )

    def split(self, text: str, parse_special: bool) -> Iterator[str | int]:
        """Split text at the tokens that are recognized by their spelling."""
        end = 0
        for i, (start, stop) in self._finders[parse_special].spans(text):
            if i in self._spelled.with_options:
                start, stop = self._spelled.place_of(i, text, start, stop)
            if start > end:
                yield text[end:start]
            yield i
            end = stop
        if end < len(text):
            yield text[end:]

    @cached_property
    def _finders(self) -> list[TextSegmenter]:
        """Segmenters of the tokens that a text spells, without `parse_special` and with it."""
        pipeline = Pipeline(pipeline_of(self._gguf, self._vocabulary).normalizer, None)
        return [
            TextSegmenter(models.BPE(), pipeline, self._spelled.recognized(parse_special))
            for parse_special in (False, True)
        ]


def _blocks(texts: Iterable[str]) -> Iterator[list[str]]:
    """Divide texts into blocks, each of which ends when it has `_BLOCK` characters."""
    block: list[str] = []
    length = 0
    for text in texts:
        block.append(text)
        length += len(text) + 1
        if length >= _BLOCK:
            yield block
            block, length = [], 0
    if block:
        yield block
