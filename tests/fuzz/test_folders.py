"""Model folders that are almost right: values of another kind in their JSON files, damaged weights.

A folder is converted, or raises an error of the package and leaves no file. Models for late interaction then
rank.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from support import model_folders, recurrent_folders
from support.fuzzing import TIMEOUT, kept, rounds
from support.model_folders import Folder
from support.task_folders import LATE, QUERY, stanford

from metal_prefill import MetalPrefillError, Model
from metal_prefill.conversion import convert

pytestmark = pytest.mark.timeout(TIMEOUT)

RECURRENT = ("lfm2", "qwen35", "granite_hybrid", "mamba2", "falcon_h1")
POOLED = ("config.json", "tokenizer.json", "tokenizer_config.json", "modules.json", "1_Pooling/config.json")
PROJECTED = ("modules.json", "1_Dense/config.json", "config_sentence_transformers.json")
Kind = tuple[Callable[[Path], Folder], tuple[str, ...]]
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 3, 2**31, 2**70, 1.5, -0.0, 1e400),
    *("", "x", "../x", "[UNK]", "Sequence", "ByteLevel", "\x00", [], [1], [["a"]], {}, {"type": "x"}),
]


def changed(content: Any, random: Random) -> Any:
    """Return a copy with another value, or without one, at a random place."""
    content = copy.deepcopy(content)
    place: Any = None
    key: Any = None
    node = content
    while isinstance(node, (dict, list)) and node and random.random() < 0.8:
        place, key = node, random.choice(list(node) if isinstance(node, dict) else range(len(node)))
        node = node[key]
    if place is None:
        return random.choice(VALUES)
    if random.random() < 0.2:
        del place[key]
    else:
        place[key] = random.choice(VALUES)
    return content


def damaged(content: bytes, random: Random) -> bytes:
    """Change bytes of the header, or cut the file."""
    data = bytearray(content)
    header = 8 + int.from_bytes(content[:8], "little")
    for _ in range(random.choice((1, 1, 3))):
        data[random.randrange(header)] = random.choice((0, 32, 34, 49, 91, 93, 125, 255))
    return bytes(data[: random.randrange(len(data))] if random.random() < 0.2 else data)


def pooled(make: Callable[[Path], Folder]) -> Callable[[Path], Folder]:
    def made(path: Path) -> Folder:
        folder = make(path)
        folder.pool(dense=16)
        return folder

    return made


# Folders, and the files of settings that are changed.
KINDS: dict[str, Kind] = {
    "bert": (pooled(model_folders.bert), POOLED),
    "xlm-r": (
        pooled(lambda path: model_folders.bert(path, "XLMRobertaModel", "unigram as written")),
        POOLED,
    ),
    "llama": (pooled(model_folders.llama), POOLED),
    **{name: (pooled(getattr(recurrent_folders, name)), POOLED) for name in RECURRENT},
    "late": (LATE["unseen"], (*PROJECTED, "2_MultiVectorMask/config.json", "sentence_bert_config.json")),
    "PyLate": (LATE["PyLate"], PROJECTED),
    "ColBERT": (stanford, ("config.json", "tokenizer.json", "artifact.metadata")),
}


@pytest.mark.parametrize("kind", KINDS)
def test_folders_are_converted_or_raise_an_error(tmp_path: Path, kind: str) -> None:
    make, names = KINDS[kind]
    folder = make(tmp_path / "m").write()
    weights = (folder / "model.safetensors").read_bytes()
    settings = {name: json.loads((folder / name).read_bytes()) for name in names}
    output = tmp_path / "m.gguf"
    for random in rounds(60):
        name = random.choice((*names, "model.safetensors"))
        if name == "model.safetensors":
            good, bad = weights, damaged(weights, random)
        else:
            good = json.dumps(settings[name]).encode()
            bad = json.dumps(changed(settings[name], random)).encode()
        with kept("folder", name.encode() + b"\n" + bad):
            (folder / name).write_bytes(bad)
            try:
                convert(folder, output)
            except MetalPrefillError:
                assert not output.exists()
            else:
                if names is not POOLED:
                    rank(output)
                output.unlink()
            (folder / name).write_bytes(good)


def rank(path: Path) -> None:
    """Rank by late interaction, whose settings are read by the first call, or raise an error."""
    with suppress(MetalPrefillError, ValueError), Model(path, device="cpu", threads=1) as model:
        scores = [item.score for item in model.rerank(QUERY, ["The king is dead.", ""], how="late")]
        assert np.all(np.isfinite(scores))
