"""Record vectors of decoders whose tokens see those after them, computed by Hugging Face transformers.

Run it when a folder or a text of ``tests/support/bidirectional_folders.py`` changes.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from record import Records, written
from safetensors.torch import load_file
from support.bidirectional_folders import RECORD, RECORDED, TEXTS
from tokenizers import Tokenizer


def vectors(folder: Path, last: bool, normalized: bool) -> Any:
    """Return the vector of each text: the mean of the states, or the last one."""
    config = json.loads((folder / "config.json").read_text())
    kind = config["model_type"].removesuffix("_bidirec").removeprefix("bidirectional_pplx_").title()
    settings = getattr(transformers, f"{kind}Config")(
        **{k: v for k, v in config.items() if k != "model_type"}
    )
    settings.is_causal = False
    model = getattr(transformers, f"{kind}Model")(settings).float().eval()
    tensors = load_file(folder / "model.safetensors")
    projection = tensors.pop("linear.weight", None)
    tensors.pop("lm_head.weight", None)
    model.load_state_dict({name.removeprefix("model."): tensor for name, tensor in tensors.items()})
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    found = []
    for text in TEXTS:
        with torch.inference_mode():
            states = model(torch.tensor([tokenizer.encode(text).ids])).last_hidden_state[0]
        states = states if projection is None else states @ projection.T
        vector = states[-1] if last else states.mean(dim=0)
        found.append((vector / vector.norm() if normalized else vector).numpy())
    return np.stack(found)


def records() -> Records:
    """Yield the record."""
    yield (
        RECORD,
        {
            name: vectors(folder, name.endswith("last"), not name.endswith("integers"))
            for name, folder in written(RECORDED)
        },
    )
