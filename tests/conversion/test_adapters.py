"""LoRA adapters merged into the weights of a folder, next to a folder with the sums."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from support import model_folders
from support.bert_relatives import gte
from support.encoder_folders import RECORDED
from support.model_folders import DIM, Folder, Values, read, values
from support.task_folders import TEXTS

from metal_prefill import GGUFError, Model, UnsupportedModelError
from metal_prefill.cli import main
from metal_prefill.conversion import convert

RANK = 4
CONFIG = {
    "peft_type": "LORA",
    "r": RANK,
    "lora_alpha": 8,
    "bias": "none",
    "base_model_name_or_path": "owner/base",
}
deberta = RECORDED["deberta"]
QUERY = "encoder.layer.0.attention.self.query"
WORDS = "embeddings.word_embeddings"


def adapter(path: Path, shapes: dict[str, tuple[int, int]], **config: Any) -> Path:
    """Write an adapter of matrices ``[out, in]`` of modules; of embeddings, ``[tokens, dim]``."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "adapter_config.json").write_text(json.dumps({**CONFIG, **config}))
    tensors: dict[str, Values] = {}
    for i, (module, (rows, columns)) in enumerate(shapes.items()):
        name = f"base_model.model.{module}."
        if module.endswith(WORDS):
            tensors |= {f"{name}lora_embedding_A": values((RANK, rows), i)}
            tensors |= {f"{name}lora_embedding_B": values((columns, RANK), i)}
        else:
            tensors |= {f"{name}lora_A.weight": values((RANK, columns), i)}
            tensors |= {f"{name}lora_B.weight": values((rows, RANK), i)}
    save_file(tensors, path / "adapter_model.safetensors")
    return path


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
    folder = model_folders.bert(path)
    folder.pool()
    return folder


def test_vectors_are_those_of_the_sums(tmp_path: Path, device: str) -> None:
    folder = bert(tmp_path / "m")
    shapes = {QUERY: (DIM, DIM), WORDS: folder.tensors[f"{WORDS}.weight"].shape}
    added = adapter(tmp_path / "adapter", shapes, lora_alpha=80)
    options: dict[str, Any] = {"device": device, "compute": "f32", "kv_dtype": "f32"}
    if device == "metal":
        del options["compute"]
    with Model(folder.write(), **options) as model:
        plain = model.embed(TEXTS)
    with Model(folder.path, adapter=added, **options) as model:
        found = model.embed(TEXTS)
    with Model(summed(folder, shapes, 20.0).write(), **options) as model:
        expected = model.embed(TEXTS)
    assert (found * expected).sum(axis=1).min() > 0.99999
    assert np.abs(found - plain).max() > 0.01


def test_relative_positions_follow_from_the_sums(tmp_path: Path) -> None:
    folder = deberta(tmp_path / "m")
    shapes = {"encoder.layer.0.attention.self.key_proj": (DIM, DIM)}
    added = adapter(tmp_path / "adapter", shapes, lora_alpha=80)
    _, found = read(convert(folder.write(), tmp_path / "a.gguf", adapter=added))
    _, expected = read(convert(summed(folder, shapes, 20.0).write(), tmp_path / "b.gguf"))
    name = "blk.0.attn_rel_k.weight"
    np.testing.assert_allclose(found[name], expected[name], atol=1e-5)


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({}, 2.0),
        ({"use_rslora": True}, 8 / math.sqrt(RANK)),
        ({"alpha_pattern": {"query": 2}}, 0.5),
        ({"alpha_pattern": {"key": 2}}, 2.0),
    ],
)
def test_the_scale_is_that_of_peft(tmp_path: Path, config: dict[str, Any], scale: float) -> None:
    folder = bert(tmp_path / "m")
    added = adapter(tmp_path / "adapter", {QUERY: (DIM, DIM)}, **config)
    found = read(convert(folder.write(), tmp_path / "found.gguf", adapter=added))[1]["blk.0.attn_q.weight"]
    expected = summed(folder, {QUERY: (DIM, DIM)}, scale).tensors[f"{QUERY}.weight"]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_an_adapter_of_several_projections_in_one_matrix_is_divided_with_it(tmp_path: Path) -> None:
    folder = gte(tmp_path / "m")
    shapes = {"new.encoder.layer.1.attention.qkv_proj": (3 * DIM, DIM)}
    added = adapter(tmp_path / "adapter", shapes)
    found = read(convert(folder.write(), tmp_path / "found.gguf", adapter=added))[1]
    summed(folder, shapes, 2.0, prefix="new.").write()
    expected = read(convert(folder.path, tmp_path / "expected.gguf"))[1]
    for name, tensor in expected.items():
        np.testing.assert_allclose(found[name], tensor, rtol=1e-5, atol=1e-6)


def test_another_adapter_makes_another_conversion(tmp_path: Path) -> None:
    folder = bert(tmp_path / "m").write()
    vectors = []
    for alpha in (8, 80):
        added = adapter(tmp_path / "adapter", {QUERY: (DIM, DIM)}, lora_alpha=alpha)
        with Model(folder, adapter=added, device="cpu") as model:
            vectors.append(model.embed(TEXTS))
    assert not np.array_equal(*vectors)


def test_the_commands_have_the_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = bert(tmp_path / "m").write()
    added = str(adapter(tmp_path / "adapter", {QUERY: (DIM, DIM)}))
    assert main(["convert", str(folder), str(tmp_path / "m.gguf"), "--adapter", added]) == 0
    assert main(["embed", "-m", str(folder), "--adapter", added, "a rose"]) == 0
    assert main(["embed", "-m", str(tmp_path / "m.gguf"), "--adapter", added, "a rose"]) != 0
    assert "needs a model folder" in capsys.readouterr().err


REFUSED: dict[str, tuple[dict[str, Any], Callable[[Path], Any], str]] = {
    "another method": ({"peft_type": "IA3"}, lambda path: None, "peft_type is 'IA3'; supported: 'LORA'"),
    "biases": ({"bias": "all"}, lambda path: None, "bias is 'all'; supported: 'none'"),
    "magnitudes": ({"use_dora": True}, lambda path: None, "use_dora is True"),
    "whole modules": ({"modules_to_save": ["score"]}, lambda path: None, "modules_to_save is "),
    "no weights": (
        {},
        lambda path: (path / "adapter_model.safetensors").unlink(),
        "has no adapter_model.saf",
    ),
    "a module that is not there": (
        {},
        lambda path: adapter(path, {"encoder.layer.9.query": (DIM, DIM)}),
        "changes encoder.layer.9.query, which the model does not have",
    ),
    "another shape": (
        {},
        lambda path: adapter(path, {QUERY: (DIM, DIM + 1)}),
        r"do not fit its shape \(32, 32\)",
    ),
    "one of two matrices": (
        {},
        lambda path: save_file(
            {f"base_model.model.{QUERY}.lora_A.weight": values((RANK, DIM))},
            path / "adapter_model.safetensors",
        ),
        "has one of two matrices",
    ),
    "another tensor": (
        {},
        lambda path: save_file(
            {"prompt_embeddings": values((RANK, DIM))}, path / "adapter_model.safetensors"
        ),
        "has the tensor prompt_embeddings, which is not a matrix of LoRA",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_adapters_are_refused_by_name(tmp_path: Path, name: str) -> None:
    config, change, message = REFUSED[name]
    added = adapter(tmp_path / "adapter", {QUERY: (DIM, DIM)}, **config)
    change(added)
    with pytest.raises((GGUFError, UnsupportedModelError), match=message):
        convert(bert(tmp_path / "m").write(), tmp_path / "m.gguf", adapter=added)
