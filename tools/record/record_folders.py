"""Record logits of Hugging Face transformers for small model folders with random weights.

Writes ``transformers_folders.npz`` in ``tests/data``, which the tests compare with without needing
transformers. Run it when a folder of ``tests/support/recurrent_folders.py``
or ``tests/support/decoder_folders.py`` changes::

    pip install . torch transformers
    python tools/record/record_folders.py
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from support import folder_logits, recurrent_folders


def main() -> None:
    """Write the record."""
    record: dict[str, Any] = {}
    for name, make in folder_logits.RECORDED.items():
        with tempfile.TemporaryDirectory() as folder:
            record[name] = recurrent_folders.logits_of_transformers(make(Path(folder) / "m").write())
    np.savez_compressed(recurrent_folders.RECORD, **record)
    print(f"{recurrent_folders.RECORD}: {recurrent_folders.RECORD.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
