"""Record vectors of decoders whose tokens see those after them, computed by Hugging Face transformers.

Run it when a folder or a text of ``tests/support/bidirectional_folders.py`` changes.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file
from support import bidirectional_folders
from support.bidirectional_folders import TEXTS
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


def main() -> None:
    """Write the record."""
    record = {}
    for name, make in bidirectional_folders.RECORDED.items():
        with tempfile.TemporaryDirectory() as temporary:
            folder = make(Path(temporary) / "m").write()
            record[name] = vectors(folder, name.endswith("last"), not name.endswith("integers"))
    np.savez_compressed(bidirectional_folders.RECORD, **record)
    print(f"transformers {transformers.__version__}, {bidirectional_folders.RECORD.stat().st_size:,} bytes")
