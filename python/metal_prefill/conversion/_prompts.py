"""Prompts of sentence-transformers, and the tokens that late interaction leaves out, as metadata."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

from metal_prefill.conversion._fields import Fields
from metal_prefill.conversion._folder_vocabulary import FolderVocabulary
from metal_prefill.conversion._modules import Modules, words_of
from metal_prefill.files._metadata_keys import PROMPT_KEYS, SKIPPED_KEY
from metal_prefill.text._encoder_vocabulary import SPACE

# Prefixes of PyLate's models, and the prompts that contain them.
_PREFIXES = {"query_prefix": "query", "document_prefix": "document"}


def prompt_metadata(folder: Path, modules: Modules, vocabulary: FolderVocabulary) -> dict[str, Any]:
    """Return metadata, by their full keys.

    Raises
    ------
    GGUFError
        A prompt, a prefix or a skipped word is not a string.
    """
    config = Fields.read_if_present(folder / "config_sentence_transformers.json")
    found: dict[str, Any] = {f"{PROMPT_KEYS}{name}": text for name, text in _prompts(config).items()}
    words = modules.skipped_words
    if words is None and config.has("skiplist_words"):
        words = words_of(config)
    elif words is None and any(map(config.has, _PREFIXES)):
        words = list(string.punctuation)  # the default of PyLate
    begin = SPACE if vocabulary.model == "bert" else ""
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    skipped = [ids[begin + word] for word in words or () if begin + word in ids]
    return {**found, SKIPPED_KEY: skipped} if skipped else found


def _prompts(config: Fields) -> dict[str, str]:
    stated = config.object("prompts")
    prompts = {name: stated.string(name) for name in stated.values if stated.has(name)}
    for key, name in _PREFIXES.items():
        if config.has(key):
            prefix = config.string(key)
            prompts[name] = prefix + prompts.get(name, "").removeprefix(prefix)
    return prompts
