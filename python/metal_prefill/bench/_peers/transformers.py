"""Hugging Face transformers on the CPU, for text embedding.

transformers reads and dequantizes the GGUF file by itself, so the weights are the same. As in
sentence-transformers, texts are sorted by length and computed in padded batches. Of float32 and bfloat16 the
faster one is taken, by a trial when the model is loaded; `compute="f32"` asks for float32.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from metal_prefill.bench._engines import Identity, Ids, Options, TextEngine, Vectors
from metal_prefill.bench._errors import BenchError
from metal_prefill.bench._machine import available_threads, counted, cpu_name
from metal_prefill.files._architecture import read_config
from metal_prefill.files._gguf_file import GGUFFile
from metal_prefill.files._pooled_head import read_head

BATCH = 8  # texts of a padded batch, which takes 0.64 of the time of single texts
TRIAL_TOKENS = 256


class Transformers(TextEngine):
    """transformers model without its output projection."""

    def __init__(self, options: Options) -> None:
        path = Path(options.path)
        with GGUFFile(path) as gguf:
            config = read_config(gguf)
            head = read_head(gguf, config.architecture, config.dim)
        if head.pooling not in ("last", "mean") or head.dense or not config.causal:
            raise BenchError(
                "comparing with transformers takes causal attention, pooling last or mean, no dense "
                f"layers; {path.name} is another kind of model"
            )
        self._pooling = head.pooling
        self._threads = options.threads or available_threads()
        torch.set_num_threads(self._threads)
        self._model = _load(path)
        if options.compute != "f32":
            slow = self._trial()
            self._model.to(torch.bfloat16)
            if self._trial() > slow:
                self._model = _load(path)

    def _trial(self) -> float:
        """Return the seconds that the second run of a text takes."""
        text = np.arange(TRIAL_TOKENS, dtype=np.int32)
        self.embed([text])
        begin = time.perf_counter()
        self.embed([text])
        return time.perf_counter() - begin

    def identity(self) -> Identity:
        """Return the identity of the engine."""
        kind = str(self._model.dtype).removeprefix("torch.")
        return Identity(
            build=f"transformers {transformers.__version__}, torch {torch.__version__}",
            device=f"CPU ({cpu_name()}, {counted(self._threads, 'thread')})",
            threads=self._threads,
            settings=f"{kind} arithmetic and weights, texts sorted by length, batches of {BATCH}",
        )

    def clear(self) -> None:
        """Do nothing: there is no context."""

    def prefill(self, ids: Ids) -> None:
        """Raise NotImplementedError; `engines.KINDS` says that prompts are not measured."""
        raise NotImplementedError

    def decode(self, ids: Ids) -> None:
        """Raise NotImplementedError; `engines.KINDS` says that decoding is not measured."""
        raise NotImplementedError

    def embed(self, texts: list[Ids]) -> Vectors:
        """Return the pooled vectors of texts, normalized, float32 ``[texts, dim]``."""
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        vectors: list[Any] = [None] * len(texts)
        with torch.inference_mode():
            for begin in range(0, len(order), BATCH):
                group = order[begin : begin + BATCH]
                for i, vector in zip(group, self._run([texts[i] for i in group]), strict=True):
                    vectors[i] = vector
        return np.array(vectors, np.float32)

    def _run(self, texts: Sequence[Ids]) -> Vectors:
        lengths = torch.tensor([len(text) for text in texts])
        ids = torch.zeros(len(texts), int(lengths.max()), dtype=torch.long)
        for row, text in zip(ids, texts, strict=True):
            row[: len(text)] = torch.from_numpy(text)
        mask = torch.arange(ids.shape[1]) < lengths[:, None]
        states = self._model(input_ids=ids, attention_mask=mask.long(), use_cache=False).last_hidden_state
        if self._pooling == "mean":
            pooled = (states.float() * mask[..., None]).sum(dim=1) / lengths[:, None]
        else:
            pooled = states[torch.arange(len(texts)), lengths - 1].float()
        vectors: Vectors = torch.nn.functional.normalize(pooled, dim=1).numpy()
        return vectors


def _load(path: Path) -> Any:
    loaded: Any = transformers.AutoModel.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    return loaded.eval()


def load(options: Options) -> TextEngine:
    """Load the model."""
    return Transformers(options)
