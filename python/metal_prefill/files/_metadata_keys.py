"""Typed access to the metadata of an architecture."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from metal_prefill._support.messages import Located
from metal_prefill.files._gguf_file import GGUFFile

MAX_INT = 2**31 - 1  # the engines count in 32 bits

# Special tokens, and their keys under tokenizer.ggml, without _token_id.
ID_KEYS = {name: name for name in ("bos", "eos", "eot", "eom", "cls", "mask")}
ID_KEYS |= {"pad": "padding", "unk": "unknown", "sep": "seperator"}

# Keys of this project, written by the conversion of folders of sentence-transformers. The key of a prompt
# ends with its name; its text precedes the text to embed.
PROMPT_KEYS = "metal_prefill.prompts."
# Name of the prompt of texts without an instruction.
DEFAULT_PROMPT_KEY = "metal_prefill.default_prompt"
# Prompt of a query and a document, with ``{query}`` and ``{document}``; a key of llama.cpp.
RERANK_TEMPLATE_KEY = "tokenizer.chat_template.rerank"
# Pooling of a file, if ``pooling_type`` has no number for it.
POOLING_KEY = "metal_prefill.pooling"
# Whether pooling includes the tokens of a prompt; true by default.
POOLS_PROMPT_KEY = "metal_prefill.pools_prompt"
# Name of the similarity for which vectors were trained, such as ``dot``.
SIMILARITY_KEY = "metal_prefill.similarity"
# Number of first values of a vector to keep by default.
TRUNCATE_KEY = "metal_prefill.truncate_dim"
# Ids of tokens of documents that late interaction skips, such as punctuation.
SKIPPED_KEY = "metal_prefill.skipped_tokens"
# How late interaction expands queries: ``length``, ``token``, ``seen`` and ``fixed``.
EXPANSION_KEYS = "metal_prefill.query_expansion."
# How the head of GLiNER finds entities: ``mode``, ``most_words``, ``span_words``, ``label_token``,
# ``separator`` and ``reads_names``.
ENTITY_KEYS = "metal_prefill.entities."
# Prefix of the metadata and the tensors of a second encoder in a file, which reads labels.
LABEL_ENCODER = "labels."
# Maximum number of tokens of a ``text``, a ``query`` and a ``document``.
LENGTH_KEYS = "metal_prefill.max_tokens."

_SMALLEST = float(np.finfo(np.float32).tiny)  # smallest float with full precision


class Keys(Located):
    """Metadata of a file under its architecture's prefix: ``block_count`` reads ``llama.block_count``.

    Every getter raises a `GGUFError` that names the key if it is missing and has no default, has another
    type, or has a value out of range.
    """

    def __init__(self, gguf: GGUFFile) -> None:
        self.gguf, self.path = gguf, gguf.path
        self.architecture: str = gguf.metadata.typed("general.architecture", "string")

    def has(self, suffix: str) -> bool:
        return self._key(suffix) in self.gguf.metadata

    def integer(self, suffix: str, least: int, most: int = MAX_INT, default: int | None = None) -> int:
        """Read an integer from `least` to `most`, stored in any integer type."""
        if default is not None and not self.has(suffix):
            return default
        return int(self.gguf.metadata.integer(self._key(suffix), least, most))

    def positive(self, suffix: str, default: int | None = None) -> int:
        return self.integer(suffix, 1, default=default)

    def list_each_layer(
        self, suffix: str, n_layers: int, default: int | None = None, least: int = 1
    ) -> tuple[int, ...]:
        """Read an integer per layer, stored once or as a list, in which each is `least` or more."""
        if not self._is_list(suffix):
            return (self.positive(suffix, default),) * n_layers
        key = self._key(suffix)
        values = tuple(map(int, self.each_layer(suffix, n_layers, "array[integer]")))
        for value in values:
            if not least <= value <= MAX_INT:
                raise self.error(f"{key} is {value}, must be between {least} and {MAX_INT}")
        return values

    def count_each_layer(
        self, suffix: str, n_layers: int, default: int | None = None, least: int = 0
    ) -> tuple[int, ...]:
        """Read a count per layer, each 0 or the same positive integer, stored once or as a list."""
        counts = self.list_each_layer(suffix, n_layers, default, least)
        if len(set(counts) - {0}) > 1:
            raise self.unsupported(f"{self._key(suffix)} differs between layers, which is not supported")
        return counts

    def each_layer_but_every_nth(
        self, suffix: str, n_layers: int, default: int, *, first: bool = False
    ) -> tuple[bool, ...]:
        """Read a bool per layer, stored as a list, or as the n for which one of n layers has false.

        It is the last of each n layers, or the `first` one.
        """
        if not self._is_list(suffix):
            n = self.positive(suffix, default)
            return tuple((layer + (not first)) % n != 0 for layer in range(n_layers))
        values = self.each_layer(suffix, n_layers, "array[bool]")
        return tuple(bool(value) for value in values)

    def positive_float(self, suffix: str, default: float | None = None) -> float:
        """Read a positive finite float, rounded to 32 bits as in the engines."""
        if default is not None and not self.has(suffix):
            return default
        key = self._key(suffix)
        stated = float(self.gguf.metadata.typed(key, "float"))
        with np.errstate(over="ignore", under="ignore"):
            value = float(np.float32(stated))
        if not _SMALLEST <= value < math.inf:
            raise self.error(f"{key} is {stated}, must be positive and finite in 32 bits")
        return value

    def number(self, suffix: str, default: float) -> float:
        """Read an integer or finite float."""
        key = self._key(suffix)
        value: float = self.gguf.metadata.typed(key, "integer", "float", default=default)
        if not math.isfinite(value):
            raise self.error(f"{key} is {value}, must be finite")
        return value

    def string(self, suffix: str, default: str) -> str:
        return str(self.gguf.metadata.typed(self._key(suffix), "string", default=default))

    def boolean(self, suffix: str, default: bool) -> bool:
        return bool(self.gguf.metadata.typed(self._key(suffix), "bool", default=default))

    def _is_list(self, suffix: str) -> bool:
        return self.has(suffix) and self.gguf.metadata.type_name(self._key(suffix)).startswith("array[")

    def each_layer(self, suffix: str, n_layers: int, *types: str) -> npt.NDArray[Any]:
        key = self._key(suffix)
        values: npt.NDArray[Any] = self.gguf.metadata.typed(key, *types)
        if len(values) != n_layers:
            raise self.error(f"{key} lists {len(values)} values for {n_layers} layers")
        return values

    def _key(self, suffix: str) -> str:
        return f"{self.architecture}.{suffix}"
