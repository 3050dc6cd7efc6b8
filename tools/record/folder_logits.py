"""Record logits of Hugging Face transformers for small model folders with random weights.

Run it when a folder of ``tests/support/decoder_folders.py`` changes.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from record import Records, written
from support.decoder_folders import IDS, RECORD, RECORDED, ROWS


def logits_of(folder: Path) -> Any:
    """Return the logits after some tokens of a prompt, ``[len(ROWS), vocab]``."""
    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    made = getattr(transformers, name).from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        return made.float().eval()(torch.tensor(IDS[None].astype(np.int64))).logits[0, ROWS].numpy()


def records() -> Records:
    """Yield the record."""
    yield RECORD, {name: logits_of(folder) for name, folder in written(RECORDED)}
