"""Prompts of texts: the text around them, limits of their length, and queries that tokens expand.

Models for late interaction add tokens to queries (ColBERT, arXiv:2004.12832, section 3.2).
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from tokenizers import normalizers

from metal_prefill._support.arguments import one_of
from metal_prefill.engine import Engine, EngineOwner
from metal_prefill.errors import ContextOverflowError, GGUFError, UnsupportedModelError
from metal_prefill.files._metadata_keys import EXPANSION_KEYS, MAX_INT, SKIPPED_KEY
from metal_prefill.files._task_config import Pooling

if TYPE_CHECKING:
    from metal_prefill.text._tokenizer import Tokenizer

Item = TypeVar("Item")

# Prompts as the cards of the models define them, by architecture. Qwen3-Embedding: documents stay as they
# are. EmbeddingGemma: the title of a document that has none is "none".
PROMPTS: dict[str, dict[str, str]] = {
    "qwen3": {
        "query": "Instruct: Given a web search query, retrieve relevant passages that answer the query\n"
        "Query:{text}",
        "document": "{text}",
        "": "Instruct: {instruction}\nQuery:{text}",
    },
    "gemma-embedding": {
        "query": "task: search result | query: {text}",
        "document": "title: none | text: {text}",
        "classification": "task: classification | query: {text}",
        "clustering": "task: clustering | query: {text}",
        "": "task: {instruction} | query: {text}",
    },
    "nomic-bert": {
        "query": "search_query: {text}",
        "document": "search_document: {text}",
        "classification": "classification: {text}",
        "clustering": "clustering: {text}",
        "": "{instruction}{text}",
    },
}

_SEARCH = "Represent this sentence for searching relevant passages: {text}"
PLAIN_CARD = {"query": "{text}", "document": "{text}", "": "{instruction}{text}"}

# The same for models whose architecture does not identify them: a pattern of ``general.name`` in lower case
# with hyphens, and the prompts. The first pattern that occurs in the name counts.
CARDS: tuple[tuple[str, Mapping[str, str]], ...] = (
    (
        r"\be5-.*instruct",
        {**PLAIN_CARD, "query": PROMPTS["qwen3"]["query"], "": "Instruct: {instruction}\nQuery: {text}"},
    ),
    (r"\be5-", {**PLAIN_CARD, "query": "query: {text}", "document": "passage: {text}"}),
    (r"\bbge-m3|\bbge-multilingual", PLAIN_CARD),
    (r"\bbge-.*\bzh\b", {**PLAIN_CARD, "query": "为这个句子生成表示以用于检索相关文章：{text}"}),  # noqa: RUF001
    (r"\bbge-", {**PLAIN_CARD, "query": _SEARCH}),
    (r"\bmxbai-embed", {**PLAIN_CARD, "query": _SEARCH}),
    (r"\barctic-embed-.*v2\b", {**PLAIN_CARD, "query": "query: {text}"}),
    (r"\barctic-embed", {**PLAIN_CARD, "query": _SEARCH}),
    (r"\bnomic-embed-text|\bmodernbert-embed", PROMPTS["nomic-bert"]),
    (
        r"\ball-(minilm|mpnet|distilroberta)|\bparaphrase-|\bgte-(small|base|large|multilingual|modernbert)|\bgranite-embedding|\bjina-embeddings-v2|\bpplx-embed",
        PLAIN_CARD,
    ),
)

_LONGEST_NAME = 200  # characters of a name that are compared; the patterns take quadratic time

# Names under which sentence-transformers looks for the prompt of a document, in order.
DOCUMENT_NAMES = ("document", "passage", "corpus")
# As in the tokenizers of models that normalize. `unicodedata.normalize` takes quadratic time for a sequence
# of combining marks.
_NFC = normalizers.NFC()


@contextmanager
def errors_of(name: str) -> Iterator[None]:
    """Put the name of an item before the message of a TypeError or ValueError about it."""
    try:
        yield
    except GGUFError:  # one of the vocabulary, which is read for the first text
        raise
    except (TypeError, ValueError) as error:
        # Others, such as a UnicodeEncodeError, have more arguments than a message.
        kind = type(error) if isinstance(error, (TypeError, ContextOverflowError)) else ValueError
        raise kind(f"{name}: {error}") from None


def numbered(items: Iterable[Item], noun: str) -> Iterator[Item]:
    """Yield items; the message of an error about the next one begins with `noun` and its number."""
    done = 0
    try:
        for item in items:
            yield item
            done += 1
    except (TypeError, ValueError):
        with errors_of(f"{noun} {done}"):
            raise


class PromptRules(NamedTuple):
    """Options for turning texts into prompts; see :meth:`metal_prefill.Model.embed`."""

    truncate: str = "error"
    unicode: str | None = None
    split_special_tokens: bool | None = None

    def checked(self) -> PromptRules:
        """Return the rules; raises ValueError for an unknown one."""
        one_of("truncate", self.truncate, ("error", "end"))
        if self.unicode is not None:
            one_of("unicode", self.unicode, ("NFC",))
        if self.split_special_tokens not in (True, False, None):
            kind = type(self.split_special_tokens).__name__
            raise TypeError(f"split_special_tokens must be a bool or None, got {kind}")
        return self

    def parses(self, tokenizer: Tokenizer) -> bool:
        """Return whether texts spell special tokens: by default only with encoders, as in transformers."""
        return not (tokenizer.causal if self.split_special_tokens is None else self.split_special_tokens)

    def normalized(self, text: str) -> str:
        """Return a text in the requested Unicode form."""
        return text if self.unicode is None else _NFC.normalize_str(text)


def shortened(tokenizer: Tokenizer, text: str, excess_of: Callable[[str], int]) -> str:
    """Cut off the end of a text, so that the prompt that contains it fits.

    `excess_of` returns by how many tokens the prompt of a text exceeds the context.
    """
    while text and (excess := excess_of(text)) > 0:
        spans = tokenizer.encode_spans(text)
        # The tokens at the cut may change, and some are parts of characters: the rest is counted again.
        end = spans[max(len(spans) - excess, 0)].start if spans else 0
        text = text[: min(end, len(text) - 1)]
    return text


def cut_notes(cut: Sequence[int], count: int, context: int, noun: str = "text") -> list[str]:
    """Return a note that counts and names the texts that lost their ends, if there are any."""
    fate = f"did not fit the context of {context} tokens and lost their ends"
    return [f"{len(cut)} of {count} {noun}s {fate}: {named(cut, noun)}"] if cut else []


def warn(notes: Iterable[str]) -> None:
    """Warn the caller of a model's method."""
    for note in notes:
        warnings.warn(note, stacklevel=3)


def named(indices: Sequence[int], noun: str) -> str:
    """Name texts in a message: all of a few, the first ones of many."""
    return f"{noun} {', '.join(map(str, indices[:10]))}{', ...' if len(indices) > 10 else ''}"


class PromptForm(NamedTuple):
    """Text before and after a text."""

    before: str = ""
    after: str = ""
    # Whether the spelling of a control token in `before` and `after` is that token, as in the prompts of a
    # model. It is not in the text itself, unless the rules say so.
    spells_tokens: bool = False

    def tokens(self, tokenizer: Tokenizer, text: str, rules: PromptRules) -> list[int]:
        """Return the tokens of a text in this form, without those that begin and end every text."""
        return next(self.tokens_of_all(tokenizer, [text], rules))

    def tokens_of_all(
        self, tokenizer: Tokenizer, texts: Iterable[str], rules: PromptRules
    ) -> Iterator[list[int]]:
        """Yield the tokens of each text, as `tokens` returns them."""
        parses = rules.parses(tokenizer)
        before, after = list[str | int](), list[str | int]()
        if self.spells_tokens and not parses:
            before += tokenizer.split(self.before, parse_special=True)
            after += tokenizer.split(self.after, parse_special=True)
        if not any(isinstance(piece, int) for piece in (*before, *after)):
            whole = (rules.normalized(f"{self.before}{text}{self.after}") for text in texts)
            return tokenizer.encode_all(whole, parse_special=parses)
        # Text next to the text is tokenized together with it.
        left = before.pop() if before and isinstance(before[-1], str) else ""
        right = after.pop(0) if after and isinstance(after[0], str) else ""
        return (
            tokenizer.encode_pieces(
                piece if isinstance(piece, int) else rules.normalized(piece)
                for piece in (*before, f"{left}{text}{right}", *after)
            )
            for text in texts
        )


PLAIN = PromptForm()


def prompt_form(engine: Engine, instruction: str | None) -> PromptForm:
    """Return the form that an instruction selects; see :meth:`metal_prefill.Model.embed`."""
    if instruction is None:
        prompt = engine.prompts.by_name.get(engine.prompts.default or "")
        return PLAIN if prompt is None else PromptForm(prompt, spells_tokens=True)
    if not isinstance(instruction, str):
        raise TypeError(f"instruction must be a string, got {type(instruction).__name__}")
    if "{text}" in instruction:
        return _filled(instruction)
    return _named_form(engine, instruction) or _described_form(engine, instruction)


def _filled(template: str) -> PromptForm:
    before, _, after = template.partition("{text}")
    return PromptForm(before, after)


def unpooled_tokens(engine: Engine, form: PromptForm) -> int:
    """Return the number of first tokens that pooling omits: those of the prompt, if the file requires it."""
    if engine.head.pools_prompt or not form.before:
        return 0
    prompt = PromptForm(form.before, spells_tokens=form.spells_tokens)
    return len(engine.tokenizer.frame.begin) + len(prompt.tokens(engine.tokenizer, "", PromptRules()))


def _named_form(engine: Engine, name: str) -> PromptForm | None:
    """Return a prompt of the model by its name; None if it has none of this name."""
    stated = engine.prompts.by_name
    if name in stated:
        return PromptForm(stated[name], spells_tokens=True)
    if stated and name in ("query", *DOCUMENT_NAMES):
        names = DOCUMENT_NAMES if name in DOCUMENT_NAMES else ("query",)
        return PromptForm(next((stated[n] for n in names if n in stated), ""), spells_tokens=True)
    name = "document" if name == "passage" else name
    card = card_of(engine)
    if name and name in card:
        return _filled(card[name])
    if name in ("query", "document"):
        raise ValueError(
            f"no prompts of queries and documents are known for {engine.config.architecture}: "
            f"{engine.name} has none, and its general.name is not that of a model whose card is known. "
            "Give the text itself, such as 'query: {text}'"
        )
    return None


def _described_form(engine: Engine, task: str) -> PromptForm:
    """Return the form for a task in words, or a prefix if the model has no such form."""
    if re.fullmatch(r"[\w-]+", task, re.ASCII):
        known = ", ".join(map(repr, prompt_names_of(engine))) or "none"
        raise ValueError(
            f"instruction {task!r} is not a prompt of {engine.name}, whose prompts are: {known}. "
            "A task has several words; a text to put before each one is a template, such as "
            f"'{task}: {{text}}'"
        )
    return _filled(card_of(engine).get("", PLAIN_CARD[""]).replace("{instruction}", task))


def card_of(engine: Engine) -> Mapping[str, str]:
    """Return the prompts of a model by name; the one without a name is for tasks in words."""
    name = engine.gguf.metadata.get("general.name")
    name = re.sub(r"[^a-z0-9]+", "-", name[:_LONGEST_NAME].lower()) if isinstance(name, str) else ""
    for pattern, prompts in CARDS:
        if re.search(pattern, name):
            return prompts
    return PROMPTS.get(engine.config.architecture, {})


def prompt_names(model: EngineOwner) -> list[str]:
    """Return the names of a model's prompts, such as ``"query"``, that `instruction` accepts.

    See :meth:`metal_prefill.Model.embed`. Empty if neither the file nor a known card defines prompts.
    """
    return prompt_names_of(model.engine)


def prompt_names_of(engine: Engine) -> list[str]:
    stated = engine.prompts.by_name
    return sorted({*stated, "query", "document"} if stated else filter(None, card_of(engine)))


class QueryExpansion(NamedTuple):
    """How a model expands queries."""

    length: int  # number of tokens of an expanded query
    token: int  # token that fills it
    # Whether tokens attend to the expansion. Otherwise all tokens attend to the text alone.
    seen: bool
    fixed: bool  # whether `length` is also the limit of longer queries

    def added(self, tokens: int) -> int:
        return max(self.length - tokens, 0) if tokens else 0


def query_expansion(engine: Engine) -> QueryExpansion | None:
    """Return how a model expands queries; None if it does not."""
    if f"{EXPANSION_KEYS}length" not in engine.gguf.metadata:
        return None
    metadata = engine.gguf.metadata
    found = QueryExpansion(
        metadata.integer(f"{EXPANSION_KEYS}length", 1, MAX_INT),
        metadata.integer(f"{EXPANSION_KEYS}token", 0, engine.config.vocab_size - 1),
        metadata.typed(f"{EXPANSION_KEYS}seen", "bool"),
        metadata.typed(f"{EXPANSION_KEYS}fixed", "bool"),
    )
    if engine.config.causal and not found.seen:
        raise UnsupportedModelError(
            f"{engine.path}: {EXPANSION_KEYS}seen is false, which is not supported if attention is causal"
        )
    return found


class TextRole(NamedTuple):
    """How texts become tokens."""

    plural: str  # name of such texts in messages
    limit: int  # most tokens, with those that begin and end every text
    form: PromptForm = PLAIN
    expansion: QueryExpansion | None = None  # how texts are expanded
    skipped: tuple[int, ...] = ()  # ids of tokens without vectors in late interaction
    framed: bool = True  # whether texts have the tokens that the file adds at their ends


def role_of(engine: Engine, pooling: Pooling, instruction: str | None) -> TextRole:
    """Return the role that an instruction selects; see :meth:`metal_prefill.Model.embed`."""
    form = prompt_form(engine, instruction)
    if instruction == "query":
        return query_role(engine, form, expanded=pooling == "none")
    return document_role(engine, form) if instruction in DOCUMENT_NAMES else text_role(engine, form)


def text_role(engine: Engine, form: PromptForm = PLAIN) -> TextRole:
    """Return the role of texts that are neither queries nor documents."""
    return TextRole("texts", _limit(engine, engine.lengths.text), form)


def query_role(engine: Engine, form: PromptForm, *, expanded: bool = True) -> TextRole:
    """Return the role of queries, expanded as in late interaction or not."""
    expansion = query_expansion(engine) if expanded else None
    lengths = (engine.lengths.query, engine.lengths.text)
    if expansion is not None and expansion.fixed:
        lengths = (expansion.length, None)
    return TextRole("queries", _limit(engine, *lengths), form, expansion)


def document_role(engine: Engine, form: PromptForm) -> TextRole:
    limit = _limit(engine, engine.lengths.document, engine.lengths.text)
    skipped = engine.gguf.metadata.typed(SKIPPED_KEY, "array[integer]", default=())
    return TextRole("documents", limit, form, skipped=tuple(map(int, skipped)))


def _limit(engine: Engine, *lengths: int | None) -> int:
    """Return the first length that is known, at most the context."""
    return min(next((length for length in lengths if length), engine.max_context), engine.max_context)
