"""Model folders that are almost right: values of another kind in their JSON files, damaged weights.

A folder is converted, or raises an error of the package and leaves no file.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
from support import model_folders, recurrent_folders
from support.fuzzing import TIMEOUT, kept, rounds

from metal_prefill import MetalPrefillError
from metal_prefill.conversion import convert

pytestmark = pytest.mark.timeout(TIMEOUT)

RECURRENT = ("lfm2", "qwen35", "granite_hybrid", "mamba2", "falcon_h1")
SETTINGS = ("config.json", "tokenizer.json", "tokenizer_config.json", "modules.json", "1_Pooling/config.json")
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


@pytest.mark.parametrize("kind", ["bert", "xlm-r", "llama", *RECURRENT])
def test_folders_are_converted_or_raise_an_error(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "m"
    if kind == "llama":
        made = model_folders.llama(folder)
    elif kind in RECURRENT:
        made = getattr(recurrent_folders, kind)(folder)
    elif kind == "bert":
        made = model_folders.bert(folder)
    else:
        made = model_folders.bert(folder, "XLMRobertaModel", "unigram as written")
    made.pool(dense=16)
    made.write()
    weights = (folder / "model.safetensors").read_bytes()
    settings = {name: json.loads((folder / name).read_bytes()) for name in SETTINGS}
    output = tmp_path / "m.gguf"
    for random in rounds(60):
        name = random.choice((*SETTINGS, "model.safetensors"))
        if name == "model.safetensors":
            good, bad = weights, damaged(weights, random)
        else:
            good = json.dumps(settings[name]).encode()
            bad = json.dumps(changed(settings[name], random)).encode()
        with kept("folder", name.encode() + b"\n" + bad):
            (folder / name).write_bytes(bad)
            try:
                convert(folder, output).unlink()
            except MetalPrefillError:
                assert not output.exists()
            (folder / name).write_bytes(good)
