"""Prompts of models as their cards define them."""

import re
from collections.abc import Mapping

from metal_prefill.engine import Engine

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


def card_of(engine: Engine) -> Mapping[str, str]:
    """Return the prompts of a model by name; the one without a name is for tasks in words."""
    name = engine.gguf.metadata.get("general.name")
    name = re.sub(r"[^a-z0-9]+", "-", name[:_LONGEST_NAME].lower()) if isinstance(name, str) else ""
    for pattern, prompts in CARDS:
        if re.search(pattern, name):
            return prompts
    return PROMPTS.get(engine.config.architecture, {})
