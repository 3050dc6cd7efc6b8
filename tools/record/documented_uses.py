"""Record the results of sentence-transformers for `tests/support/documented_uses.py`."""

import tempfile
from pathlib import Path

import sentence_transformers
import sentence_transformers.util
from record import Records
from support import task_folders
from support.documented_uses import DATA, USES, Paths, plain

from metal_prefill.hub import resolve_model


def records() -> Records:
    """Yield the record."""
    with tempfile.TemporaryDirectory() as name:
        made = {
            "pairs": task_folders.RANKERS["bert"],
            "classes": task_folders.CLASSIFIERS["bert"],
            "late": task_folders.LATE["as they are"],
        }
        folders = {key: str(make(Path(name) / key).write()) for key, make in made.items()}
        paths = Paths(str(resolve_model("minilm")), **folders)
        yield DATA, {topic: plain(use(sentence_transformers, paths)) for topic, use in USES.items()}
