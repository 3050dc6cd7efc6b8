"""Hugging Face transformers on the CPU, for text embedding.

transformers reads and dequantizes GGUF files of causal models by itself, so the weights are the same; for
encoders, `padded_texts` does. `compute="f32"` selects float32 without a trial.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers

from metal_prefill.bench._engines import Adapter, Options
from metal_prefill.bench._peers.padded_texts import PaddedTexts, load_encoder

TRIAL_TOKENS = 256


def load(options: Options) -> Adapter:
    """Load the model without its output projection."""
    texts = PaddedTexts("transformers", options, causal=True)
    torch.set_num_threads(texts.threads)
    texts.build = f"transformers {transformers.__version__}, torch {torch.__version__}"
    model = _loaded(texts)
    _use(texts, model)
    if options.compute != "f32":
        slow = _trial(texts)
        _use(texts, model.to(torch.bfloat16))
        if _trial(texts) > slow:
            _use(texts, _loaded(texts))
    return texts


def _loaded(texts: PaddedTexts) -> Any:
    if texts.is_encoder:
        return load_encoder(texts.path)
    return transformers.AutoModel.from_pretrained(
        texts.path.parent, gguf_file=texts.path.name, dtype=torch.float32
    ).eval()


def _use(texts: PaddedTexts, model: Any) -> None:
    options = {"use_cache": False} if texts.config.causal else {}

    def states(ids: npt.NDArray[np.int64], mask: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        with torch.inference_mode():
            found = model(input_ids=torch.from_numpy(ids), attention_mask=torch.from_numpy(mask), **options)
            result: npt.NDArray[np.float32] = found.last_hidden_state.float().numpy()
        return result

    texts.states = states
    texts.arithmetic = f"{str(model.dtype).removeprefix('torch.')} arithmetic and weights"


def _trial(texts: PaddedTexts) -> float:
    """Return the seconds that the second run of a text takes."""
    text = np.arange(min(TRIAL_TOKENS, texts.config.context_length), dtype=np.int32)
    texts.embed([text])
    begin = time.perf_counter()
    texts.embed([text])
    return time.perf_counter() - begin
