"""Settings of sentence-transformers, PyLate and Stanford's ColBERT for texts, as metadata.

They are prompts, lengths, the expansion of queries, and the template of pairs.
"""

import string
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from metal_prefill.conversion._folder import Fields, body_folder
from metal_prefill.conversion._folder_vocabulary import WrittenVocabulary
from metal_prefill.conversion._modules import Modules, transformer_settings, words_of
from metal_prefill.errors import ChatTemplateError
from metal_prefill.files._metadata_keys import (
    DEFAULT_PROMPT_KEY,
    EXPANSION_KEYS,
    LENGTH_KEYS,
    PROMPT_KEYS,
    RERANK_TEMPLATE_KEY,
    SIMILARITY_KEY,
    SKIPPED_KEY,
    TRUNCATE_KEY,
)
from metal_prefill.files._task_config import DENSE, NUMBERED_POOLINGS
from metal_prefill.text._chat_template import ChatTemplate
from metal_prefill.text._vocabulary import SPACE, TokenType

# Prefixes of PyLate's models, and the prompts that contain them.
_PREFIXES = {"query_prefix": "query", "document_prefix": "document"}
# Settings of PyLate, in whose presence queries are expanded.
_EXPANDS = (
    *_PREFIXES,
    *("query_length", "document_length", "skiplist_words", "do_query_expansion"),
    *("attend_to_expansion_tokens", "attend_to_mask_tokens"),
)


def prompt_metadata(folder: Path, modules: Modules, vocabulary: WrittenVocabulary) -> dict[str, Any]:
    """Return metadata, by their full keys."""
    config = Fields.read_if_present(folder / "config_sentence_transformers.json")
    stated = config.object("prompts")
    prompts = {name: stated.string(name) for name in stated.values if stated.has(name)}
    for key, name in _PREFIXES.items():
        if config.has(key):
            prefix = config.string(key)
            prompts[name] = prefix + prompts.get(name, "").removeprefix(prefix)
    found: dict[str, Any] = {f"{PROMPT_KEYS}{name}": text for name, text in prompts.items()}
    if config.has("default_prompt_name"):
        name = config.string("default_prompt_name")
        if name not in prompts:
            raise config.error(
                f"default_prompt_name is {name!r}; prompts are {', '.join(map(repr, prompts))}"
            )
        found[DEFAULT_PROMPT_KEY] = name
    if config.has("truncate_dim"):
        found[TRUNCATE_KEY] = config.integer("truncate_dim", least=1)
    for module in transformer_settings(folder):
        if module.boolean("do_lower_case", default=False):
            lowercase = vocabulary.flags.get("normalizer.lowercase", False)
            module.require("do_lower_case", (lowercase,), False)
    similarity = config.string("similarity_fn_name", default="")
    if similarity == "meanmaxsim":
        raise config.unsupported(
            "similarity_fn_name is 'meanmaxsim'; supported with late interaction: 'maxsim'"
        )
    if similarity:
        found[SIMILARITY_KEY] = similarity
    words = modules.skipped_words
    if words is None and config.has("skiplist_words"):
        words = words_of(config)
    elif words is None and any(map(config.has, _PREFIXES)):
        words = list(string.punctuation)  # the default of PyLate
    if skipped := skipped_ids(words or (), vocabulary):
        found[SKIPPED_KEY] = skipped
    if modules.per_token:
        expansion = _expansion(folder, config, vocabulary)
        found |= {f"{EXPANSION_KEYS}{key}": value for key, value in expansion}
    return found


def skipped_ids(words: Iterable[str], vocabulary: WrittenVocabulary) -> list[int]:
    return [vocabulary.by_text[word] for word in words if word in vocabulary.by_text]


def _expansion(folder: Path, config: Fields, vocabulary: WrittenVocabulary) -> Iterator[tuple[str, Any]]:
    """Yield how queries are expanded, by the keys of the metadata."""
    # In the order of sentence-transformers: settings of the Transformer module, of the model, and of PyLate,
    # whose models expand queries to 32 tokens unless they state otherwise.
    module = Fields.read_if_present(folder / "sentence_bert_config.json")
    stated = next((f for f in (module, config) if "query_expansion" in f.values), None)
    if stated is not None and not stated.has("query_expansion"):
        return
    if stated is not None:
        options = stated.object("query_expansion")
        options.require("strategy", ("fixed", "min"), None)
        length, seen = options.integer("length"), options.boolean("attend", default=False)
        fixed = options.string("strategy") == "fixed"
    elif config.values.keys() & set(_EXPANDS) and config.boolean("do_query_expansion", default=True):
        options, fixed = config, True
        length = config.integer("query_length", default=32)
        seen = config.boolean("attend_to_expansion_tokens", "attend_to_mask_tokens", default=False)
    else:
        return
    token = options.string("token", default="")
    ids = vocabulary.ids
    known = vocabulary.by_text.get(token) if token else ids.get("mask", ids.get("eos"))
    if known is None:
        missing = f"token {token!r}" if token else "mask token"
        raise options.error(f"queries are expanded, but the vocabulary has no {missing}")
    yield from {"length": length, "token": known, "seen": seen, "fixed": fixed}.items()


COLBERT_FILE = "artifact.metadata"  # JSON; missing fields have the defaults of the library
# Fields that name the token after the first one, and their defaults, by the prompt that contains it.
_MARKERS = {"query": ("query_token_id", "[unused0]"), "document": ("doc_token_id", "[unused1]")}


def colbert_heads(folder: Path, config: Fields) -> dict[str, Any]:
    """Return the metadata of the projection, without the prefix of the architecture."""
    dim = _colbert_settings(folder).integer("dim", default=128)
    return {
        "pooling_type": NUMBERED_POOLINGS.index("none"),
        "embedding_length_out": dim,
        f"{DENSE[0]}_feat_out": dim,
        f"{DENSE[0]}_feat_in": config.integer("hidden_size"),
    }


def colbert_metadata(folder: Path, vocabulary: WrittenVocabulary) -> dict[str, Any]:
    """Return markers, skipped tokens and the expansion of queries, by their full keys.

    Markers become control tokens of the vocabulary, so that prompts can spell them.
    """
    settings = _colbert_settings(folder)
    settings.require("similarity", ("cosine",), "cosine")
    settings.require("interaction", ("colbert",), "colbert")
    found: dict[str, Any] = {
        f"{PROMPT_KEYS}{prompt}": _marker(settings, key, default, vocabulary)
        for prompt, (key, default) in _MARKERS.items()
    }
    punctuation = string.punctuation if settings.boolean("mask_punctuation", default=True) else ""
    if skipped := skipped_ids(punctuation, vocabulary):
        found[SKIPPED_KEY] = skipped
    if "mask" not in vocabulary.ids:
        raise settings.error("queries are expanded, but the vocabulary has no mask token")
    expansion = {
        "length": settings.integer("query_maxlen", default=32),
        "token": vocabulary.ids["mask"],
        "seen": settings.boolean("attend_to_mask_tokens", default=False),
        "fixed": True,
    }
    return found | {f"{EXPANSION_KEYS}{key}": value for key, value in expansion.items()}


def _colbert_settings(folder: Path) -> Fields:
    return Fields.read_if_present(folder / COLBERT_FILE)


def _marker(settings: Fields, key: str, default: str, vocabulary: WrittenVocabulary) -> str:
    """Return the prompt of a marker: the library replaces the token of the full stop in ". " and the text."""
    text = settings.string(key, default=default)
    for spelling in (text, SPACE + text):
        if spelling in vocabulary.tokens:
            i = vocabulary.tokens.index(spelling)
            vocabulary.tokens[i], vocabulary.types[i] = text, int(TokenType.CONTROL)
            return f"{text} "
    raise settings.error(f"{settings.name(key)} is {text!r}, which the vocabulary does not contain")


_ANSWERS = {"true_token_id": "yes", "false_token_id": "no"}
# Templates with these read the content of a message as a list of parts (sentence_transformers.base.modality).
_OF_PARTS = ("content[0]", "message.content[", ".type", "'type'", '"type"')


def rerank_metadata(folder: Path, place: Path, vocabulary: WrittenVocabulary) -> dict[str, Any]:
    """Return the template of a pair, by its full key, with ``{query}`` and ``{document}``."""
    settings = Fields.read(place / "config.json")
    settings.require("module_input_name", ("causal_logits",), "causal_logits")
    for name, answer in _ANSWERS.items():
        if settings.values.get(name) != vocabulary.by_text.get(answer, -1):
            raise settings.unsupported(f"{name} is not the token {answer!r}")
    stated = Fields.read_if_present(folder / "config_sentence_transformers.json")
    prompt = stated.object("prompts").values.get(stated.string("default_prompt_name", default=""))
    variables: dict[str, Any] = {}
    for module in transformer_settings(folder):
        variables |= module.object("processing_kwargs").object("chat_template").values
    template = _rendered(settings, vocabulary, prompt if isinstance(prompt, str) else "", variables)
    if not all(part in template for part in ("{query}", "{document}")):
        raise settings.unsupported("the chat template has no place for messages of a query and a document")
    return {RERANK_TEMPLATE_KEY: template}


def _rendered(settings: Fields, vocabulary: WrittenVocabulary, prompt: str, variables: dict[str, Any]) -> str:
    source = vocabulary.chat_template
    if not isinstance(source, str):
        raise settings.unsupported("needs a chat template")
    texts = {"system": prompt, "query": "{query}", "document": "{document}"}
    in_parts = any(pattern in source for pattern in _OF_PARTS)
    messages = [
        {"role": role, "content": [{"type": "text", "text": text}] if in_parts else text}
        for role, text in texts.items()
        if text
    ]
    try:
        pieces = ChatTemplate(source, ()).render(messages, variables)
    except ChatTemplateError as error:
        raise settings.unsupported(f"the chat template fails for a pair: {error}") from None
    return "".join(text for text, _ in pieces)


def max_tokens(folder: Path, context: int, expanded: int = 0) -> dict[str, int]:
    """Return the most tokens of texts, queries and documents below the context, by their full keys.

    Queries of late interaction have room for the tokens to which they are `expanded`.
    """
    read = Fields.read_if_present
    modules = transformer_settings(folder)
    models = (*modules, read(folder / "config_sentence_transformers.json"))
    stated = {
        "text": [
            *((module, "max_seq_length") for module in modules),
            (read(body_folder(folder) / "tokenizer_config.json"), "model_max_length"),
        ],
        "query": [(model, "query_length") for model in models],
        "document": [
            *((model, "document_length") for model in models),
            (read(folder / COLBERT_FILE), "doc_maxlen"),
        ],
    }
    found: dict[str, int] = {}
    for name, places in stated.items():
        length = next((_number(fields, key, context) for fields, key in places if fields.has(key)), None)
        # A limit of all texts would hold for queries and documents, too, without theirs.
        if length is not None and (length < context or found):
            found[f"{LENGTH_KEYS}{name}"] = length
    if 0 < found.get(f"{LENGTH_KEYS}text", 0) < expanded:
        query = f"{LENGTH_KEYS}query"
        found[query] = max(found.get(query, 0), expanded)
    return found


def _number(fields: Fields, key: str, context: int) -> int:
    value = fields.values[key]
    # Tokenizers without a limit state a huge number.
    return context if isinstance(value, (int, float)) and value >= context else fields.integer(key)
