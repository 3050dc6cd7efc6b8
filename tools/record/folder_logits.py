"""Record logits of Hugging Face transformers for small model folders with random weights.

Run it when a folder of ``tests/support/decoder_folders.py`` changes.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from support.decoder_folders import IDS, RECORD, RECORDED, ROWS


def logits_of(folder: Path) -> Any:
    """Return the logits after some tokens of a prompt, ``[len(ROWS), vocab]``."""
    import torch
    import transformers

    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    made = getattr(transformers, name).from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        return made.float().eval()(torch.tensor(IDS[None].astype(np.int64))).logits[0, ROWS].numpy()


def main() -> None:
    """Write the record."""
    record: dict[str, Any] = {}
    for name, make in RECORDED.items():
        with tempfile.TemporaryDirectory() as folder:
            record[name] = logits_of(make(Path(folder) / "m").write())
    np.savez_compressed(RECORD, **record)
    print(f"{RECORD}: {RECORD.stat().st_size:,} bytes")
