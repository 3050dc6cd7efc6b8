"""Model folders that are almost right: other values in their JSON files, damaged weights, other files.

A folder is converted, or raises an error of the package and leaves no file. The converted model then computes
vectors or scores, or raises such an error.
"""

import json
import os
import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from support.files.json_mutator import changed
from support.folders import decoder_folders, entity_folders, model_folders
from support.folders.encoder_folders import RECORDED, private_parts
from support.folders.model_folders import Folder
from support.folders.task_folders import LATE, QUERY, stanford
from support.fuzzing import fuzz

from metal_prefill import MetalPrefillError, Model
from metal_prefill.conversion import convert

POOLED = ("config.json", "tokenizer.json", "tokenizer_config.json", "modules.json", "1_Pooling/config.json")
PROJECTED = ("modules.json", "1_Dense/config.json", "config_sentence_transformers.json")
Kind = tuple[Callable[[Path], Folder], tuple[str, ...]]
NAMES = ("type", "vocab", "hidden_size", "dtype")
DEEP = "a value in very many arrays"  # which `json.dumps` cannot write
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 3, 2**30, 2**31, 2**70, 10**400, 1.5, -0.0, 1e-300, 1e300, 1e400),
    *("", "x", "../x", "[UNK]", "Sequence", "ByteLevel", "\x00", "\ud800", "9" * 5000, "x" * 100_000, DEEP),
    *([], [1], [["a"]], [1, "a"], [0.5, None], {}, {"type": "x"}, {"9" * 5000: {}}, {"\ud800": 0}),
]


def written(content: Any, random: Random) -> bytes:
    """Write JSON, sometimes with a value in many arrays, a name that occurs twice, or damaged bytes."""
    deep = random.choice((200, 900, 980, 100_000))
    text = json.dumps(content).replace(json.dumps(DEEP), "[" * deep + "]" * deep)
    if random.random() < 0.1:
        names = [m.end() for m in re.finditer(r"{(?=\")", text)]
        at = random.choice(names) if names else 0
        text = text[:at] + json.dumps(dict.fromkeys(NAMES, random.choice(VALUES)))[1:-1] + "," + text[at:]
    data = bytearray(text.encode())
    if random.random() < 0.1:
        data[random.randrange(len(data))] = random.choice((0, 32, 34, 49, 91, 93, 125, 255))
    return bytes(data)


def damaged(content: bytes, random: Random) -> bytes:
    """Change values or bytes of the header, or cut the file."""
    header = 8 + int.from_bytes(content[:8], "little")
    if random.random() < 0.4:
        other = json.dumps(changed(json.loads(content[8:header]), random, VALUES)).encode()
        size = len(other) + random.choice((0, 0, 0, 1, -1, 2**40, 2**63))
        return (max(size, 0) % 2**64).to_bytes(8, "little") + other + content[header:]
    data = bytearray(content)
    for _ in range(random.choice((1, 1, 3))):
        data[random.randrange(header)] = random.choice((0, 32, 34, 49, 91, 93, 125, 255))
    return bytes(data[: random.randrange(len(data))] if random.random() < 0.2 else data)


def misplace(path: Path, random: Random) -> None:
    """Replace a file by something else: a folder, a link, a pipe, or a huge file without contents."""
    path.unlink()
    match random.randrange(6):
        case 0:
            path.mkdir()
        case 1:
            path.symlink_to(random.choice(("/dev/zero", "/dev/null", path.name, "..", "missing")))
        case 2:
            os.mkfifo(path)
        case 3:
            path.touch()
            os.truncate(path, 1 << 40)
        case 4:
            path.write_bytes(random.randbytes(random.randrange(100)))


def restore(path: Path, content: bytes) -> None:
    """Write the right contents of a file that may be something else."""
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    path.unlink(missing_ok=True)
    path.write_bytes(content)


def sharded(path: Path) -> Folder:
    """Return a folder that is written with its weights in two files."""
    folder = model_folders.llama(path)
    folder.write = partial(folder.write, shards=2)  # type: ignore[method-assign]
    return folder


def lines(path: Path) -> Folder:
    """Return a folder with a list of tokens instead of a tokenizer."""
    folder = model_folders.bert(path).list_words()
    folder.json("tokenizer_config.json", {"added_tokens_decoder": {"400": {"content": "<a>"}}})
    folder.json("special_tokens_map.json", {"cls_token": "[CLS]"})
    return folder


def pooled(make: Callable[[Path], Folder]) -> Callable[[Path], Folder]:
    return lambda path: make(path).pool(dense=16)


def calibrated(path: Path) -> Folder:
    """Return a folder that labels tokens, with biases of sequences of tags."""
    folder = private_parts(path)
    biases = {"transition_bias_background_stay": -1.5, "transition_bias_end_to_start": 1}
    folder.json("viterbi_calibration.json", {"operating_points": {"default": {"biases": biases}}})
    return folder


# Folders, and the files of settings that are changed.
KINDS: dict[str, Kind] = {
    "bert": (pooled(model_folders.bert), POOLED),
    "xlm-r": (pooled(lambda path: model_folders.bert(path, "XLMRobertaModel", "unigram as written")), POOLED),
    "llama": (pooled(model_folders.llama), POOLED),
    "sharded": (sharded, ("config.json", "model.safetensors.index.json")),
    "list of tokens": (lines, ("config.json", "tokenizer_config.json", "special_tokens_map.json")),
    **{name: (pooled(make), POOLED) for name, make in decoder_folders.RECORDED.items()},
    **{name: (pooled(RECORDED[name]), POOLED) for name in ("albert", "t5", "deberta", "privacy filter")},
    "tags": (calibrated, ("config.json", "tokenizer.json", "viterbi_calibration.json")),
    "late": (LATE["unseen"], (*PROJECTED, "2_MultiVectorMask/config.json", "sentence_bert_config.json")),
    "PyLate": (LATE["PyLate"], PROJECTED),
    "ColBERT": (stanford, ("config.json", "tokenizer.json", "artifact.metadata")),
    "GLiNER": (
        entity_folders.RECORDED["modernbert and bert"],
        ("gliner_config.json", "tokenizer.json", "labels_tokenizer/tokenizer.json"),
    ),
}


LATE_KINDS = ("late", "PyLate", "ColBERT")
MISPLACED = b"misplaced"  # in place of contents


@pytest.mark.parametrize("kind", KINDS)
def test_folders_are_converted_or_raise_an_error(tmp_path: Path, kind: str) -> None:
    make, names = KINDS[kind]
    folder = make(tmp_path / "m").write()
    good = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    settings = {name: json.loads(good[Path(name)]) for name in names}
    weights = [str(path) for path in good if path.suffix == ".safetensors"]
    output = tmp_path / "m.gguf"

    def make_bad(random: Random) -> bytes:
        """Return the name of a file, and its contents."""
        name = random.choice((*names, *weights))
        if random.random() < 0.1:
            name, bad = str(random.choice(list(good))), MISPLACED
        elif name in weights:
            bad = damaged(good[Path(name)], random)
        else:
            bad = written(changed(settings[name], random, VALUES), random)
        return name.encode() + b"\n" + bad

    def use(path: Path, random: Random) -> None:
        name, bad = path.read_bytes().split(b"\n", 1)
        file = folder / name.decode()
        if bad == MISPLACED:
            misplace(file, random)
        else:
            file.write_bytes(bad)
        message = ""
        try:
            convert(folder, output)
        except MetalPrefillError as error:
            message = str(error)
        if not message:
            compute(output, late=kind in LATE_KINDS)
        assert output.exists() == (not message)
        assert len(message) < 3000
        output.unlink(missing_ok=True)
        restore(file, good[file.relative_to(folder)])

    # Decoders differ in rows of tables, and the generators are the same for each kind.
    fuzz(f"folder-{kind}", 6 if kind in decoder_folders.RECORDED else 15, make_bad, use)


def compute(path: Path, *, late: bool) -> None:
    """Rank by late interaction, whose settings the first call reads, label, embed, or raise an error."""
    with suppress(MetalPrefillError, ValueError), Model(path, device="cpu", threads=1) as model:
        if late:
            numbers = [item.score for item in model.rerank(QUERY, ["The king is dead.", ""], how="late")]
        elif model.engine.head.entities is not None:
            (entities,) = model.find_entities(["The king is dead."], ["a king"], threshold=0.0)
            numbers = [entity.score for entity in entities]
        elif model.engine.head.labels:
            (entities,) = model.label_tokens(["The king is dead."], ignore=())
            numbers = [entity.score for entity in entities]
        else:
            numbers = model.embed(["The king is dead."])
        assert np.all(np.isfinite(numbers))
