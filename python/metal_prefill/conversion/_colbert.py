"""Settings of Stanford's ColBERT (arXiv:2112.01488), whose checkpoints contain the projection of tokens."""

import string
from pathlib import Path
from typing import Any

from metal_prefill.conversion._fields import Fields
from metal_prefill.conversion._folder_vocabulary import FolderVocabulary
from metal_prefill.conversion._prompts import skipped_ids
from metal_prefill.files._metadata_keys import EXPANSION_KEYS, PROMPT_KEYS, SKIPPED_KEY
from metal_prefill.files._task_config import DENSE, NUMBERED_POOLINGS
from metal_prefill.text._encoder_vocabulary import SPACE
from metal_prefill.text._vocabulary import TokenType

FILE = "artifact.metadata"  # JSON; missing fields have the defaults of the library
# Fields that name the token after the first one, and their defaults, by the prompt that contains it.
_MARKERS = {"query": ("query_token_id", "[unused0]"), "document": ("doc_token_id", "[unused1]")}


def colbert_heads(folder: Path, config: Fields) -> dict[str, Any]:
    """Return the metadata of the projection, without the prefix of the architecture."""
    dim = _settings(folder).integer("dim", default=128)
    return {
        "pooling_type": NUMBERED_POOLINGS.index("none"),
        "embedding_length_out": dim,
        f"{DENSE[0]}_feat_out": dim,
        f"{DENSE[0]}_feat_in": config.integer("hidden_size"),
    }


def colbert_metadata(folder: Path, vocabulary: FolderVocabulary) -> dict[str, Any]:
    """Return markers, skipped tokens and the expansion of queries, by their full keys.

    Markers become control tokens of the vocabulary, so that prompts can spell them.
    """
    settings = _settings(folder)
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


def _settings(folder: Path) -> Fields:
    return Fields.read_if_present(folder / FILE)


def _marker(settings: Fields, key: str, default: str, vocabulary: FolderVocabulary) -> str:
    """Return the prompt of a marker: the library replaces the token of the full stop in ". " and the text."""
    text = settings.string(key, default=default)
    for spelling in (text, SPACE + text):
        if spelling in vocabulary.tokens:
            i = vocabulary.tokens.index(spelling)
            vocabulary.tokens[i], vocabulary.types[i] = text, int(TokenType.CONTROL)
            return f"{text} "
    raise settings.error(f"{settings.name(key)} is {text!r}, which the vocabulary does not contain")
