"""Model folders that cannot be converted: the error names the file, the value and the supported ones."""

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from support import model_folders

from metal_prefill import GGUFError, UnsupportedModelError
from metal_prefill._support.messages import MOST_CHARACTERS
from metal_prefill.conversion import convert
from metal_prefill.conversion._folder import Fields
from metal_prefill.conversion._rotation import long_rope_factors

LOST = "model.layers.1.mlp.down_proj.weight"
LARGEST = float(np.finfo(np.float32).max)
ABOVE = math.nextafter(LARGEST, math.inf)


def test_a_file_from_an_earlier_version_next_to_an_index_is_named(tmp_path: Path) -> None:
    folder = model_folders.llama(tmp_path / "m")
    folder.write(shards=2)
    lost = folder.tensors.pop(LOST)
    folder.write()
    note = (
        "tensor blk.1.ffn_down.weight is missing (the weights are those of model.safetensors, as in "
        "transformers; model.safetensors.index.json is ignored)"
    )
    with pytest.raises(GGUFError, match=re.escape(note) + "$"):
        convert(folder.path, tmp_path / "m.gguf")
    folder.tensors[LOST] = lost
    assert convert(folder.write(), tmp_path / "m.gguf").exists()


def test_missing_files_are_named(tmp_path: Path) -> None:
    folder = model_folders.llama(tmp_path / "m")
    for name, message in {
        "tokenizer.json": "has neither tokenizer.json nor vocab.txt",
        "model.safetensors": "has neither model.safetensors nor model.safetensors.index.json",
        "config.json": "has no config.json",
    }.items():
        folder.write()
        model_folders.byte_level_tokenizer(folder.path)
        (folder.path / name).unlink()
        with pytest.raises(GGUFError, match=message):
            convert(folder.path, tmp_path / "m.gguf")
    with pytest.raises(GGUFError, match="none: no such folder"):
        convert(tmp_path / "none", tmp_path / "m.gguf")
    (tmp_path / "file.gguf").touch()
    with pytest.raises(GGUFError, match=r"file\.gguf: is a file, not a model folder"):
        convert(tmp_path / "file.gguf", tmp_path / "m.gguf")
    with pytest.raises(ValueError, match=r"tensor_type must be one of auto, F32, .* got 'Q9'"):
        convert(folder.path, tmp_path / "m.gguf", tensor_type="Q9")


def test_pickled_weights_are_rejected(tmp_path: Path) -> None:
    folder = model_folders.llama(tmp_path / "m").write()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    message = r"weights in pytorch_model.bin, a format that can execute code and is never loaded; save"
    with pytest.raises(UnsupportedModelError, match=message):
        convert(folder, tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"a": "../m.safetensors"}, "weight_map names '../m.safetensors', must name safetensors files"),
        ({"a": "weights.bin"}, "weight_map names 'weights.bin'"),
        ({"a": "model-1.safetensors"}, "weight_map names model-1.safetensors, which is missing"),
        ({}, "weight_map names 0 files"),
        ({"a": ["model.safetensors"]}, "weight_map must name a file for each tensor"),
        ({"a": "x" * 250 + ".safetensors"}, "weight_map names 'xx.*', must name safetensors files in this"),
    ],
)
def test_an_index_may_name_only_files_of_its_folder(
    tmp_path: Path, names: dict[str, Any], message: str
) -> None:
    folder = model_folders.llama(tmp_path / "m")
    path = folder.write()
    (path / "model.safetensors").unlink()
    folder.json("model.safetensors.index.json", {"weight_map": names})
    with pytest.raises(GGUFError, match=message):
        convert(path, tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a valid safetensors file"),
        (b"\xff" * 8 + b"{}", "is not a valid safetensors file"),
        (b"\2\0\0\0\0\0\0\0{]", "is not a valid safetensors file"),
    ],
)
def test_damaged_weights_are_an_error(tmp_path: Path, content: bytes, message: str) -> None:
    folder = model_folders.llama(tmp_path / "m").write()
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(GGUFError, match=message):
        convert(folder, tmp_path / "m.gguf")


@pytest.mark.parametrize("content", ["[1]", "{", "\ud800", "[" * 100_000])
def test_damaged_settings_are_an_error(tmp_path: Path, content: str) -> None:
    folder = model_folders.llama(tmp_path / "m").write()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        good = (folder / name).read_bytes()
        (folder / name).write_bytes(content.encode("utf-8", "surrogatepass"))
        with pytest.raises(GGUFError, match=name):
            convert(folder, tmp_path / "m.gguf")
        (folder / name).write_bytes(good)


@pytest.mark.parametrize(("dtype", "value"), [("f4", math.nan), ("f2", -math.inf), ("f8", 1e300)])
def test_a_weight_that_is_not_finite_in_float32_is_named(tmp_path: Path, dtype: str, value: float) -> None:
    folder = model_folders.llama(tmp_path / "m")
    name = next(name for name in folder.tensors if name.endswith("down_proj.weight"))
    folder.tensors[name] = np.zeros(folder.tensors[name].shape, dtype)
    folder.tensors[name][-1, -1] = value
    with pytest.raises(GGUFError, match=f"tensor {name} contains a value that is not finite"):
        convert(folder.write(), tmp_path / "m.gguf")


def test_a_tensor_that_is_in_two_files_is_named(tmp_path: Path) -> None:
    folder = model_folders.llama(tmp_path / "m")
    path = folder.write(shards=2)
    save_file(folder.tensors, path / "model-00002-of-00002.safetensors")
    with pytest.raises(GGUFError, match=r"is also in model-00001-of-00002\.safetensors"):
        convert(path, tmp_path / "m.gguf")


def test_long_tokens_are_named(tmp_path: Path) -> None:
    """Finding the merges of one takes time quadratic in its length."""
    folder = model_folders.llama(tmp_path / "m")
    content = json.loads((folder.path / "tokenizer.json").read_text())
    content["model"]["vocab"]["x" * 2000] = len(content["model"]["vocab"])
    folder.json("tokenizer.json", content)
    with pytest.raises(GGUFError, match="token 300 has 2000 characters, more than 1024"):
        convert(folder.write(), tmp_path / "m.gguf")


def test_deeply_nested_values_are_named(tmp_path: Path) -> None:
    """At some depths JSON can be read, and its value is part of the message."""
    folder = model_folders.llama(tmp_path / "m", hidden_act="X")
    content = (folder.write() / "config.json").read_text()
    messages = []
    for depth in range(700, 1000):
        (folder.path / "config.json").write_text(content.replace('"X"', "[" * depth + "]" * depth))
        with pytest.raises((GGUFError, UnsupportedModelError)) as caught:
            convert(folder.path, tmp_path / "m.gguf")
        messages.append(str(caught.value))
    assert all(str(folder.path) in message and len(message) < 1100 for message in messages)


@pytest.mark.parametrize("factor", [10**400, 1e300, ABOVE, float("nan"), True, "1"])
def test_factors_of_long_rope_are_numbers(tmp_path: Path, factor: Any) -> None:
    config = {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "max_position_embeddings": 40,
        "original_max_position_embeddings": 20,
        "rope_scaling": {"type": "longrope", "long_factor": [1.0, 1.0, 1.0, factor]},
    }
    with pytest.raises(GGUFError, match="long_factor must have positive finite numbers"):
        long_rope_factors(Fields(tmp_path / "config.json", config))
    config["rope_scaling"] = dict.fromkeys(("long_factor", "short_factor"), [LARGEST] * 4) | {"type": "su"}
    found = long_rope_factors(Fields(tmp_path / "config.json", config))
    assert all(np.isfinite(np.asarray(factors)).all() for factors in found.values())


@pytest.mark.parametrize("score", [10**400, 1e300, ABOVE, -ABOVE, float("nan")])
def test_scores_are_numbers(tmp_path: Path, score: float) -> None:
    folder = model_folders.bert(tmp_path / "m", "XLMRobertaModel", "unigram as written")
    content = json.loads((folder.path / "tokenizer.json").read_text())
    content["model"]["vocab"][5][1] = score
    folder.json("tokenizer.json", content)
    with pytest.raises(GGUFError, match=r"model.vocab\[5\] must be a token and its score, a number"):
        convert(folder.write(), tmp_path / "m.gguf")


@pytest.mark.parametrize(("name", "shape"), [("x" * 100_000, (2, 2)), ("x", (1,) * 1000)])
def test_long_names_and_shapes_are_refused(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    path = model_folders.llama(tmp_path / "m").write()
    size = 4 * int(np.prod(shape))
    header = json.dumps({name: {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}}).encode()
    (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(size))
    with pytest.raises(GGUFError, match="the limits are 500 and 8") as caught:
        convert(path, tmp_path / "m.gguf")
    assert len(str(caught.value)) <= 2 * MOST_CHARACTERS


def test_long_ids_of_tokens_are_named(tmp_path: Path) -> None:
    folder = model_folders.bert(tmp_path / "m")
    vocabulary = json.loads((folder.path / "tokenizer.json").read_text())["model"]["vocab"]
    (folder.path / "vocab.txt").write_text(
        "\n".join(sorted(vocabulary, key=lambda word: int(vocabulary[word])))
    )
    (folder.path / "tokenizer.json").unlink()
    folder.json("tokenizer_config.json", {"added_tokens_decoder": {"9" * 5000: {"content": "<a>"}}})
    with pytest.raises(GGUFError, match="added_tokens_decoder has the key '999"):
        convert(folder.write(), tmp_path / "m.gguf")
