"""Hugging Face transformers on the CPU, for text embedding.

transformers reads and dequantizes GGUF files of causal models by itself, so the weights are the same; for
encoders, `padded_texts` does. As in sentence-transformers, texts are sorted by length and computed in
padded batches. Of float32 and bfloat16 the faster one is taken, by a trial when the model is loaded;
`compute="f32"` asks for float32.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers

from metal_prefill.bench._engines import Engine, Options
from metal_prefill.bench._peers.padded_texts import PaddedTexts, load_encoder

TRIAL_TOKENS = 256


class _Transformers(PaddedTexts):
    """transformers model without its output projection."""

    def __init__(self, options: Options) -> None:
        super().__init__("transformers", options, causal=True)
        torch.set_num_threads(self.threads)
        self._model = self._load()
        if options.compute != "f32":
            slow = self._trial()
            self._model.to(torch.bfloat16)
            if self._trial() > slow:
                self._model = self._load()

    def _load(self) -> Any:
        if self.is_encoder:
            return load_encoder(self.path)
        loaded: Any = transformers.AutoModel.from_pretrained(
            self.path.parent, gguf_file=self.path.name, dtype=torch.float32
        )
        return loaded.eval()

    def _trial(self) -> float:
        """Return the seconds that the second run of a text takes."""
        text = np.arange(min(TRIAL_TOKENS, self.config.context_length), dtype=np.int32)
        self.embed([text])
        begin = time.perf_counter()
        self.embed([text])
        return time.perf_counter() - begin

    @property
    def build(self) -> str:
        return f"transformers {transformers.__version__}, torch {torch.__version__}"

    @property
    def arithmetic(self) -> str:
        return f"{str(self._model.dtype).removeprefix('torch.')} arithmetic and weights"

    def states(self, ids: npt.NDArray[np.int64], mask: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        options = {"use_cache": False} if self.config.causal else {}
        with torch.inference_mode():
            result = self._model(
                input_ids=torch.from_numpy(ids), attention_mask=torch.from_numpy(mask), **options
            )
            states: npt.NDArray[np.float32] = result.last_hidden_state.float().numpy()
        return states


def load(options: Options) -> Engine:
    return _Transformers(options)
