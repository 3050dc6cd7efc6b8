"""Prompts of sentence-transformers and settings of late interaction, as metadata."""

import string
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from metal_prefill.conversion._fields import Fields
from metal_prefill.conversion._folder_vocabulary import FolderVocabulary
from metal_prefill.conversion._modules import Modules, transformer_settings, words_of
from metal_prefill.files._metadata_keys import (
    DEFAULT_PROMPT_KEY,
    EXPANSION_KEYS,
    PROMPT_KEYS,
    SIMILARITY_KEY,
    SKIPPED_KEY,
    TRUNCATE_KEY,
)

# Prefixes of PyLate's models, and the prompts that contain them.
_PREFIXES = {"query_prefix": "query", "document_prefix": "document"}
# Settings of PyLate, in whose presence queries are expanded.
_EXPANDS = (
    *_PREFIXES,
    *("query_length", "document_length", "skiplist_words", "do_query_expansion"),
    *("attend_to_expansion_tokens", "attend_to_mask_tokens"),
)


def prompt_metadata(folder: Path, modules: Modules, vocabulary: FolderVocabulary) -> dict[str, Any]:
    """Return metadata, by their full keys."""
    config = Fields.read_if_present(folder / "config_sentence_transformers.json")
    prompts = _prompts(config)
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
    similarity = config.string("similarity_fn_name", default="") if config.has("similarity_fn_name") else ""
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


def skipped_ids(words: Iterable[str], vocabulary: FolderVocabulary) -> list[int]:
    """Return the ids of the words that are tokens of the vocabulary."""
    return [vocabulary.by_text[word] for word in words if word in vocabulary.by_text]


def _expansion(folder: Path, config: Fields, vocabulary: FolderVocabulary) -> Iterator[tuple[str, Any]]:
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


def _prompts(config: Fields) -> dict[str, str]:
    stated = config.object("prompts")
    prompts = {name: stated.string(name) for name in stated.values if stated.has(name)}
    for key, name in _PREFIXES.items():
        if config.has(key):
            prefix = config.string(key)
            prompts[name] = prefix + prompts.get(name, "").removeprefix(prefix)
    return prompts
