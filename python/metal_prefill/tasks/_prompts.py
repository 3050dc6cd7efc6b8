"""Prompts that models expect around queries and documents, as their files or cards define them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from metal_prefill.engine import Engine, EngineOwner
from metal_prefill.errors import GGUFError
from metal_prefill.files._metadata_keys import DEFAULT_PROMPT_KEY, PROMPT_KEYS
from metal_prefill.tasks._prompt_rules import PromptRules

if TYPE_CHECKING:
    from metal_prefill.text._tokenizer import Tokenizer

# Names under which sentence-transformers looks for the prompt of a document, in order.
DOCUMENT_NAMES = ("document", "passage", "corpus")

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
_PLAIN = {"query": "{text}", "document": "{text}", "": "{instruction}{text}"}

# The same for models whose architecture does not identify them: a pattern of ``general.name`` in lower case
# with hyphens, and the prompts. The first pattern that occurs in the name counts.
CARDS: tuple[tuple[str, Mapping[str, str]], ...] = (
    (
        r"\be5-.*instruct",
        {**_PLAIN, "query": PROMPTS["qwen3"]["query"], "": "Instruct: {instruction}\nQuery: {text}"},
    ),
    (r"\be5-", {**_PLAIN, "query": "query: {text}", "document": "passage: {text}"}),
    (r"\bbge-m3|\bbge-multilingual", _PLAIN),
    (r"\bbge-.*\bzh\b", {**_PLAIN, "query": "为这个句子生成表示以用于检索相关文章：{text}"}),  # noqa: RUF001
    (r"\bbge-", {**_PLAIN, "query": _SEARCH}),
    (r"\bmxbai-embed", {**_PLAIN, "query": _SEARCH}),
    (r"\barctic-embed-.*v2\b", {**_PLAIN, "query": "query: {text}"}),
    (r"\barctic-embed", {**_PLAIN, "query": _SEARCH}),
    (r"\bnomic-embed-text|\bmodernbert-embed", PROMPTS["nomic-bert"]),
    (
        r"\ball-(minilm|mpnet|distilroberta)|\bparaphrase-|\bgte-(small|base|large|multilingual|modernbert)|\bgranite-embedding|\bjina-embeddings-v2|\bpplx-embed",
        _PLAIN,
    ),
)


_LONGEST_NAME = 200  # characters of a name that are compared; the patterns take quadratic time


class PromptForm(NamedTuple):
    """Text before and after a text.

    Attributes
    ----------
    before, after : str
    spells_tokens : bool
        Whether the spelling of a control token in `before` and `after` is that token, as in the prompts of a
        model. It is not in the text itself, unless the rules say so.
    """

    before: str = ""
    after: str = ""
    spells_tokens: bool = False

    def tokens(self, tokenizer: Tokenizer, text: str, rules: PromptRules) -> list[int]:
        """Return the tokens of a text in this form, without those that begin and end every text."""
        parses = rules.parses(tokenizer)
        if parses or not self.spells_tokens:
            whole = rules.normalized(f"{self.before}{text}{self.after}")
            return tokenizer.encode(whole, add_bos=False, parse_special=parses)
        before = list(tokenizer.split(self.before, parse_special=True))
        after = list(tokenizer.split(self.after, parse_special=True))
        # Text next to the text is tokenized together with it.
        left = before.pop() if before and isinstance(before[-1], str) else ""
        right = after.pop(0) if after and isinstance(after[0], str) else ""
        pieces = (*before, f"{left}{text}{right}", *after)
        return tokenizer.encode_pieces(
            piece if isinstance(piece, int) else rules.normalized(piece) for piece in pieces
        )

    def tokens_of_all(
        self, tokenizer: Tokenizer, texts: Iterable[str], rules: PromptRules
    ) -> Iterator[list[int]]:
        """Yield the tokens of each text, as `tokens` returns them, in less time."""
        around = (tokenizer.split(part, parse_special=True) for part in (self.before, self.after))
        parses = rules.parses(tokenizer)
        spelled = (isinstance(piece, int) for pieces in around for piece in pieces)
        if self.spells_tokens and not parses and any(spelled):
            return (self.tokens(tokenizer, text, rules) for text in texts)
        whole = (rules.normalized(f"{self.before}{text}{self.after}") for text in texts)
        return tokenizer.encode_all(whole, parse_special=parses)


PLAIN = PromptForm()


def prompt_form(
    engine: Engine,
    instruction: str | None,  # see :meth:`metal_prefill.Model.embed`
) -> PromptForm:
    """Return the form of an instruction."""
    if instruction is None:
        prompt = file_prompts(engine).get(default_prompt(engine) or "")
        return PLAIN if prompt is None else PromptForm(prompt, spells_tokens=True)
    if not isinstance(instruction, str):
        raise TypeError(f"instruction must be a string, got {type(instruction).__name__}")
    if "{text}" in instruction:
        before, _, after = instruction.partition("{text}")
        return PromptForm(before, after)
    return _named_form(engine, instruction) or _described_form(engine, instruction)


def unpooled_tokens(engine: Engine, form: PromptForm) -> int:
    """Return the number of first tokens that pooling leaves out: those of the prompt, if the file says so."""
    if engine.head.pools_prompt or not form.before:
        return 0
    prompt = PromptForm(form.before, spells_tokens=form.spells_tokens)
    return len(engine.tokenizer.frame.begin) + len(prompt.tokens(engine.tokenizer, "", PromptRules()))


def _named_form(engine: Engine, name: str) -> PromptForm | None:
    """Return a prompt of the model by its name; None if it has none of this name."""
    stated = file_prompts(engine)
    if name in stated:
        return PromptForm(stated[name], spells_tokens=True)
    if stated and name in ("query", *DOCUMENT_NAMES):
        names = DOCUMENT_NAMES if name in DOCUMENT_NAMES else ("query",)
        return PromptForm(next((stated[n] for n in names if n in stated), ""), spells_tokens=True)
    name = "document" if name == "passage" else name
    card = _card(engine)
    if name and name in card:
        before, _, after = card[name].partition("{text}")
        return PromptForm(before, after)
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
    before, _, after = _card(engine).get("", _PLAIN[""]).replace("{instruction}", task).partition("{text}")
    return PromptForm(before, after)


def has_prompts(engine: Engine) -> bool:
    """Return whether prompts of queries and documents are known for a model."""
    return bool(file_prompts(engine) or _card(engine))


def prompt_names(model: EngineOwner) -> list[str]:
    """Return the names of a model's prompts, such as ``"query"``, that `instruction` accepts.

    See :meth:`metal_prefill.Model.embed`. Empty if neither the file nor a known card defines prompts.
    """
    return prompt_names_of(model.engine)


def prompt_names_of(engine: Engine) -> list[str]:
    """Return what `prompt_names` does, of an engine."""
    stated = file_prompts(engine)
    return sorted({*stated, "query", "document"} if stated else filter(None, _card(engine)))


def default_prompt(engine: Engine) -> str | None:
    """Return the name of the prompt of texts without an instruction; None if the file has none."""
    name = engine.gguf.metadata.get(DEFAULT_PROMPT_KEY)
    return name if isinstance(name, str) else None


def file_prompts(engine: Engine) -> dict[str, str]:
    """Return the prompts of a file by name."""
    prompts: dict[str, str] = {}
    for key in engine.gguf.metadata:
        if key.startswith(PROMPT_KEYS):
            value = engine.gguf.metadata[key]
            if not isinstance(value, str):
                kind = engine.gguf.metadata.type_name(key)
                raise GGUFError(f"{engine.path}: {key} has type {kind}, expected string")
            prompts[key.removeprefix(PROMPT_KEYS)] = value
    return prompts


def _card(engine: Engine) -> Mapping[str, str]:
    name = engine.gguf.metadata.get("general.name")
    name = re.sub(r"[^a-z0-9]+", "-", name[:_LONGEST_NAME].lower()) if isinstance(name, str) else ""
    for pattern, prompts in CARDS:
        if re.search(pattern, name):
            return prompts
    return PROMPTS.get(engine.config.architecture, {})
