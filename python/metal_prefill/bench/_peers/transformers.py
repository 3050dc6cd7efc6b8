"""Hugging Face transformers on the CPU, for text embedding.

transformers reads and dequantizes GGUF files of causal models by itself, so the weights are the same; for
encoders, `torch_encoders` does. As in sentence-transformers, texts are sorted by length and computed in
padded batches. Of float32 and bfloat16 the faster one is taken, by a trial when the model is loaded;
`compute="f32"` asks for float32.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers

from metal_prefill.bench._engines import Identity, Options, TextEngine
from metal_prefill.bench._machine import available_threads, counted, cpu_name
from metal_prefill.bench._peers.padded_texts import PaddedTexts
from metal_prefill.bench._peers.torch_encoders import NAMES, load_encoder

TRIAL_TOKENS = 256
ENCODER_BATCH = 32  # texts, as sentence-transformers takes by default


class Transformers(PaddedTexts):
    """transformers model without its output projection."""

    def __init__(self, options: Options) -> None:
        with_architectures = None
        path = Path(options.path)
        if (architecture := _architecture(path)) in NAMES:
            with_architectures, self.batch = tuple(NAMES), ENCODER_BATCH
        self.read("transformers", options, with_architectures)
        self._threads = options.threads or available_threads()
        torch.set_num_threads(self._threads)
        self._model = _load(path, architecture)
        if options.compute != "f32":
            slow = self._trial()
            self._model.to(torch.bfloat16)
            if self._trial() > slow:
                self._model = _load(path, architecture)

    def _trial(self) -> float:
        """Return the seconds that the second run of a text takes."""
        text = np.arange(min(TRIAL_TOKENS, self.config.context_length), dtype=np.int32)
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
            settings=f"{kind} arithmetic and weights, texts sorted by length, batches of {self.batch}",
        )

    def states(self, ids: npt.NDArray[np.int64], mask: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Return the last hidden states of a batch."""
        options = {"use_cache": False} if self.config.causal else {}
        with torch.inference_mode():
            result = self._model(
                input_ids=torch.from_numpy(ids), attention_mask=torch.from_numpy(mask), **options
            )
            states: npt.NDArray[np.float32] = result.last_hidden_state.float().numpy()
        return states


def _architecture(path: Path) -> str:
    from metal_prefill.files._gguf_file import GGUFFile
    from metal_prefill.files._metadata_keys import Keys

    with GGUFFile(path) as gguf:
        return Keys(gguf).architecture


def _load(path: Path, architecture: str) -> Any:
    if architecture in NAMES:
        return load_encoder(path)
    loaded: Any = transformers.AutoModel.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    return loaded.eval()


def load(options: Options) -> TextEngine:
    """Load the model."""
    return Transformers(options)
