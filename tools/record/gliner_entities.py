"""Record entities that the library gliner finds with folders of random weights.

Run it when a folder or a text of `tests/support/entity_folders.py` changes; it needs ``pip install gliner``.
"""

import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gliner
from support import entity_folders
from support.entity_folders import LABELS, TEXTS, calls_of
from support.recorded_json import dumps


def main() -> None:
    """Write the record."""
    record: dict[str, Any] = {}
    for name, make in entity_folders.RECORDED.items():
        with tempfile.TemporaryDirectory() as temporary:
            model = gliner.GLiNER.from_pretrained(str(make(Path(temporary) / "m").write()))
            for call, options in calls_of(name).items():
                found = [model.inference([text], LABELS, **options)[0] for text in TEXTS]
                record[f"{name}/{call}"] = [
                    [[e["label"], round(e["score"], 6), e["start"], e["end"]] for e in entities]
                    for entities in found
                ]
                print(name, call, [len(entities) for entities in found])
    entity_folders.RECORD.write_text(dumps(record) + "\n", encoding="utf-8")
    print(f"gliner {version('gliner')}, {entity_folders.RECORD.stat().st_size:,} bytes")
