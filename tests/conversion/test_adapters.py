"""LoRA adapters merged into the weights of a folder, next to a folder with the sums."""

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.folders import adapter_folders, model_folders
from support.folders.adapter_folders import RANK, TASKS, WORDS, adapter
from support.folders.encoder_folders import RECORDED
from support.folders.model_folders import DIM, Folder, assert_same_tensors, read, values

from metal_prefill import GGUFError, Model, UnsupportedModelError
from metal_prefill.cli import main
from metal_prefill.conversion import convert
from metal_prefill.sentence_transformers import SentenceTransformer

QUERY, PREFIX = "encoder.layer.0.attention.self.query", "new."
VOCAB = 1517  # of `bert`


def summed(folder: Folder, shapes: dict[str, tuple[int, int]], scale: float, prefix: str = "") -> Folder:
    """Return a folder of which the products are a part."""
    tensors = dict(folder.tensors)
    for i, (module, (rows, columns)) in enumerate(shapes.items()):
        name = f"{module.removeprefix(prefix)}.weight"
        down, up = (values(s, i).astype(np.float64) for s in ((RANK, columns), (rows, RANK)))
        if module.endswith(WORDS):
            down, up = (values(s, i).astype(np.float64) for s in ((RANK, rows), (columns, RANK)))
        product = up @ down
        change = product.T if module.endswith(WORDS) else product
        tensors[name] = np.ascontiguousarray(tensors[name] + scale * change, np.float32)
    return Folder(folder.path, folder.config, tensors)


def bert(path: Path) -> Folder:
    return model_folders.bert(path).pool()


# Folders, modules with an adapter, settings, and the factor of the products.
ADDED: list[tuple[Callable[[Path], Folder], dict[str, tuple[int, int]], dict[str, Any], float]] = [
    (bert, {QUERY: (DIM, DIM), WORDS: (VOCAB, DIM)}, {}, 2.0),
    (bert, {QUERY: (DIM, DIM)}, {"use_rslora": True}, 8 / math.sqrt(RANK)),
    (bert, {QUERY: (DIM, DIM)}, {"alpha_pattern": {"query": 2}}, 0.5),
    (bert, {QUERY: (DIM, DIM)}, {"alpha_pattern": {"key": 2}}, 2.0),
    # Relative positions follow from the sums.
    (RECORDED["deberta"], {"encoder.layer.0.attention.self.key_proj": (DIM, DIM)}, {"lora_alpha": 80}, 20.0),
    # Several projections in one matrix are divided with it.
    (RECORDED["gte"], {f"{PREFIX}encoder.layer.1.attention.qkv_proj": (3 * DIM, DIM)}, {}, 2.0),
]


@pytest.mark.parametrize(("make", "shapes", "config", "scale"), ADDED)
def test_products_are_added_to_the_weights_as_by_peft(
    tmp_path: Path,
    make: Callable[[Path], Folder],
    shapes: dict[str, tuple[int, int]],
    config: dict[str, Any],
    scale: float,
) -> None:
    folder = make(tmp_path / "m")
    added = adapter(tmp_path / "adapter", shapes, **config)
    found = read(convert(folder.write(), tmp_path / "found.gguf", adapter=added))[1]
    whole = summed(folder, shapes, scale, PREFIX).write()
    expected = read(convert(whole, tmp_path / "expected.gguf"))[1]
    assert_same_tensors(found, expected, near=1e-5)


def test_the_commands_have_the_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = bert(tmp_path / "m").write()
    added = str(adapter(tmp_path / "adapter", {QUERY: (DIM, DIM)}))
    assert main(["convert", str(folder), str(tmp_path / "m.gguf"), "--adapter", added]) == 0
    assert main(["embed", "-m", str(folder), "--adapter", added, "a rose"]) == 0
    assert main(["embed", "-m", str(tmp_path / "m.gguf"), "--adapter", added, "a rose"]) != 0
    assert "needs a model folder" in capsys.readouterr().err


EXACT: dict[str, Any] = {"compute": "f32", "kv_dtype": "f32"}


@pytest.mark.parametrize("name", adapter_folders.RECORDED)
def test_vectors_of_each_task_are_those_of_peft(
    tmp_path: Path, own_cache: Path, device: str, name: str
) -> None:
    folder = adapter_folders.RECORDED[name](tmp_path / "m").write()
    options = EXACT if device == "cpu" else {"kv_dtype": "f32"}
    with np.load(adapter_folders.RECORD) as record:
        expected = record[name]
    for task, wanted in zip(TASKS, expected, strict=True):
        with Model(folder, adapter=task, device=device, **options) as model:
            found = model.embed(adapter_folders.TEXTS, instruction="document")
            assert model.engine.config.causal == (name == "small")
        assert (found * wanted).sum(axis=1).min() >= {"cpu": 0.999999, "metal": 0.9999}[device]
    # Adapters have an effect that no error of the engine reaches.
    assert (expected[:-1] * expected[1:]).sum(axis=2).max() < 0.99


def test_a_folder_with_adapters_needs_the_name_of_one(
    tmp_path: Path, own_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = adapter_folders.nano(tmp_path / "m").write()
    names = ", ".join(sorted(TASKS))
    with pytest.raises(UnsupportedModelError, match=f"m: has the adapters {names}; name one of them as"):
        Model(folder)
    with pytest.raises(GGUFError, match=f"adapter query is neither a folder nor one of {names}"):
        Model(folder, adapter="query")
    with pytest.raises(GGUFError, match="adapter query is not a folder"):
        Model(bert(tmp_path / "b").write(), adapter="query")
    assert main(["embed", "-m", str(folder), "--adapter", "retrieval", "a rose"]) == 0
    assert main(["convert", str(folder), str(tmp_path / "m.gguf"), "--adapter", "clustering"]) == 0


def test_the_class_pools_without_a_list_of_modules(tmp_path: Path, own_cache: Path) -> None:
    folder = adapter_folders.nano(tmp_path / "m").write()
    found = []
    for listed in (True, False):
        if not listed:
            (folder / "modules.json").unlink()
        with Model(folder, adapter=TASKS[0], device="cpu") as model:
            found.append(model.embed(adapter_folders.TEXTS))
    np.testing.assert_array_equal(*found)


def test_a_folder_with_a_merged_adapter_opens_without_a_name(tmp_path: Path, own_cache: Path) -> None:
    folder = adapter_folders.small(tmp_path / "m").write()
    whole = convert(folder, tmp_path / "a.gguf", adapter=folder / "adapters" / TASKS[1])
    assert convert(folder, tmp_path / "b.gguf", adapter=TASKS[1]).read_bytes() == whole.read_bytes()
    shutil.rmtree(folder / "adapters")
    with Model(folder, device="cpu") as model:
        assert model.engine.head.pooling == "last"


def test_sentence_transformers_choose_an_adapter_when_a_model_is_opened(
    tmp_path: Path, own_cache: Path
) -> None:
    folder = adapter_folders.small(tmp_path / "m").write()
    kwargs = {"default_task": "retrieval", "dtype": "float32"}
    model = SentenceTransformer(folder, device="cpu", model_kwargs=kwargs)
    with np.load(adapter_folders.RECORD) as record:
        expected = record["small"][TASKS.index("retrieval")]
    for found in (model.encode(adapter_folders.TEXTS, task="retrieval"), model.encode(adapter_folders.TEXTS)):
        assert (found * expected).sum(axis=1).min() >= 0.999999
    message = r"task 'clustering' is not .*: open one with model_kwargs=\{'default_task': 'clustering'\}"
    with pytest.raises(NotImplementedError, match=message):
        model.encode(adapter_folders.TEXTS, task="clustering")
