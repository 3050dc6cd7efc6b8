"""Embeddings of texts with llama.cpp."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import llama_cpp as llama
import numpy as np

from metal_prefill.bench._engines import BenchError, Ids, Vectors

FLASH_ATTENTION_ON = 1
# Tokens of a batch of texts. llama-embedding takes 2048, but every token is multiplied with the keys of the
# whole batch, and with 512 the same texts took 0.88 of the time.
EMBEDDING_ROWS, MOST_SEQUENCES = 512, 64


class Embedder:
    """Embedder that works as llama.cpp's own llama-embedding, with smaller batches.

    Each batch is one micro-batch of whole texts with a shared cache. A text must not be longer than a batch.
    """

    def __init__(self, model: Any, threads: int) -> None:
        params = llama.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = EMBEDDING_ROWS
        params.n_seq_max = MOST_SEQUENCES
        params.kv_unified = True
        params.embeddings = True
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = FLASH_ATTENTION_ON
        self._width = llama.llama_model_n_embd(model)
        self._context = llama.llama_init_from_model(model, params)
        if not self._context:
            raise BenchError("llama.cpp cannot create a context for embeddings")
        self._batch = llama.llama_batch_init(EMBEDDING_ROWS, 0, 1)

    def __call__(self, texts: Sequence[Ids]) -> Vectors:
        """Return the vectors, normalized, ``[texts, dim]``."""
        vectors: list[Any] = []
        group: list[Ids] = []
        for text in texts:
            full = sum(map(len, group)) + len(text) > EMBEDDING_ROWS or len(group) == MOST_SEQUENCES
            if group and full:
                vectors += self._run(group)
                group = []
            group.append(text)
        return np.array(vectors + self._run(group), np.float32)

    def _run(self, texts: Sequence[Ids]) -> list[Any]:
        batch, row = self._batch, 0
        for sequence, text in enumerate(texts):
            for position, token in enumerate(text.tolist()):
                batch.token[row], batch.pos[row], batch.logits[row] = token, position, True
                batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
                row += 1
        batch.n_tokens = row
        llama.llama_memory_clear(llama.llama_get_memory(self._context), True)
        status = llama.llama_decode(self._context, batch)
        if status != 0:
            raise BenchError(f"llama_decode failed with status {status} for {len(texts)} texts")
        vectors = []
        for sequence in range(len(texts)):
            pooled = np.ctypeslib.as_array(
                llama.llama_get_embeddings_seq(self._context, sequence), (self._width,)
            )
            vectors.append(pooled / np.linalg.norm(pooled))
        return vectors
