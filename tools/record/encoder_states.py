"""Record hidden states of Hugging Face transformers on the small encoders of the tests.

Run it when an encoder of the catalogue changes.
"""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from record import Records
from support import comparison, small_models
from support.small_models import SmallModel

from metal_prefill.bench._peers.padded_texts import load_encoder


def states_of(path: Path, model: SmallModel) -> dict[str, npt.NDArray[np.float32]]:
    """Compute the last hidden states of each text, by the number of its tokens."""
    made = load_encoder(path, "eager")
    has_types = any("token_type_embeddings" in name for name in made.state_dict())
    results = {}
    with torch.inference_mode():
        for tokens in comparison.encoder_tokens(model):
            inputs = {"input_ids": torch.from_numpy(tokens)[None]}
            if has_types:
                inputs["token_type_ids"] = torch.from_numpy(comparison.segments_of(tokens))[None]
            results[str(len(tokens))] = made(**inputs).last_hidden_state[0].numpy()
    return results


def records() -> Records:
    """Yield the states of every encoder with matrices in float32."""
    recorded: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, model in comparison.encoders_in_float32():
            path = small_models.write(Path(folder) / "model.gguf", model)
            for length, states in states_of(path, model).items():
                recorded[f"{name}/{length}"] = states
            print(f"{name}: {states.std():.3f}")
    yield comparison.TRANSFORMERS_ENCODERS, recorded
