"""Record entities that the library gliner finds with folders of random weights.

Run it when a folder or a text of `tests/support/folders/entity_folders.py` changes. It needs
``pip install gliner``.
"""

from typing import Any

import gliner
from record import Records, written
from support.folders.entity_folders import LABELS, RECORD, RECORDED, TEXTS, calls_of


def records() -> Records:
    """Yield the record."""
    record: dict[str, Any] = {}
    for name, folder in written(RECORDED):
        model = gliner.GLiNER.from_pretrained(str(folder))
        for call, options in calls_of(name).items():
            found = [model.inference([text], LABELS, **options)[0] for text in TEXTS]
            record[f"{name}/{call}"] = [
                [[e["label"], round(e["score"], 6), e["start"], e["end"]] for e in entities]
                for entities in found
            ]
            print(name, call, [len(entities) for entities in found])
    yield RECORD, record
