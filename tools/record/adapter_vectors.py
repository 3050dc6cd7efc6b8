"""Record vectors of models with adapters, computed by Hugging Face transformers and peft.

Run it when a folder or a text of ``tests/support/adapter_folders.py`` changes.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import transformers
from record import Records, written
from safetensors.torch import load_file
from support.adapter_folders import PROMPTS, RECORD, RECORDED, TASKS, TEXTS
from tokenizers import Tokenizer

BODIES = {"small": "Qwen3", "nano": "EuroBert"}
OWN = ("architectures", "model_type", "task_names")  # fields that only the class of the model has


def vectors(folder: Path, body: str) -> Any:
    """Return the vector of each text with each adapter: the state of its last token, of length 1."""
    config = json.loads((folder / "config.json").read_text())
    settings = getattr(transformers, f"{body}Config")(**{k: v for k, v in config.items() if k not in OWN})
    base = getattr(transformers, f"{body}Model")(settings).float().eval()
    tensors = load_file(folder / "model.safetensors")
    base.load_state_dict({name.removeprefix("model."): tensor for name, tensor in tensors.items()})
    first, *others = TASKS
    model = peft.PeftModel.from_pretrained(base, folder / "adapters" / first, adapter_name=first).eval()
    for task in others:
        model.load_adapter(folder / "adapters" / task, adapter_name=task)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    found = []
    for task in TASKS:
        model.set_adapter(task)
        for text in TEXTS:
            ids = tokenizer.encode(PROMPTS["document"] + text).ids
            with torch.inference_mode():
                state = model(input_ids=torch.tensor([ids])).last_hidden_state[0, -1]
            found.append((state / state.norm()).numpy())
    return np.stack(found).reshape(len(TASKS), len(TEXTS), -1)


def records() -> Records:
    """Yield the record."""
    yield RECORD, {name: vectors(folder, BODIES[name]) for name, folder in written(RECORDED)}
