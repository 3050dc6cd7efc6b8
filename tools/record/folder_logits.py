"""Record logits of Hugging Face transformers for small model folders with random weights.

Run it when a folder of ``recurrent_folders.py``, ``decoder_folders.py``, ``expert_folders.py``,
``gpt_folders.py`` or ``layered_folders.py`` in ``tests/support`` changes.
"""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from support import folder_logits, recurrent_folders


def main() -> None:
    """Write the record."""
    record: dict[str, Any] = {}
    for name, make in folder_logits.RECORDED.items():
        with tempfile.TemporaryDirectory() as folder:
            record[name] = recurrent_folders.logits_of_transformers(make(Path(folder) / "m").write())
    np.savez_compressed(recurrent_folders.RECORD, **record)
    print(f"{recurrent_folders.RECORD}: {recurrent_folders.RECORD.stat().st_size:,} bytes")
