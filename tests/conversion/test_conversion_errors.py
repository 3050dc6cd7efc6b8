"""Model folders that cannot be converted: the error names the file, the value and the supported ones."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from support import model_folders
from support.model_folders import DIM, FFN, Folder

from metal_prefill import GGUFError, UnsupportedModelError
from metal_prefill.conversion import convert

BAD, NOT = GGUFError, UnsupportedModelError
ST = "sentence_transformers.models"
LINEAR = {"activation_function": "torch.nn.Identity", "in_features": 5, "out_features": 16, "bias": False}


@pytest.fixture
def bert(tmp_path: Path) -> Folder:
    return model_folders.bert(tmp_path / "bert")


def lose(name: str) -> Callable[[Folder], object]:
    return lambda folder: folder.tensors.pop(name)


def put(name: str, *shape: int) -> Callable[[Folder], object]:
    return lambda folder: folder.tensors.update({name: model_folders.values(shape)})


def setting(**fields: Any) -> Callable[[Folder], None]:
    return lambda folder: folder.config.update(fields)


def tokenizer_with(**fields: Any) -> Callable[[Folder], None]:
    def change(folder: Folder) -> None:
        content = json.loads((folder.path / "tokenizer.json").read_text())
        folder.json("tokenizer.json", {**content, **fields})

    return change


LOST = "model.layers.1.mlp.down_proj.weight"
WRONG = [
    (lose(LOST), BAD, "tensor blk.1.ffn_down.weight is missing"),
    (lose("model.embed_tokens.weight"), BAD, "tensor token_embd.weight is missing"),
    (lambda folder: folder.tensors.clear(), BAD, "block_count is 2, but the file has only 0 tensors"),
    (put(LOST, DIM, FFN + 1), BAD, r"ffn_down.weight has shape \(32, 65\), .* requires \(32, 64\)"),
    (put("extra.weight", 3, 3), NOT, "tensor extra.weight is not part of a llama model"),
    (put("model.layers.2.mlp.up_proj.weight", FFN, DIM), NOT, "model.layers.2.mlp.up_proj"),
    (put("model.norm.scale", DIM), NOT, "tensor model.norm.scale is not part"),
    (put(LOST, 2, 2, 2), BAD, r"has shape \(2, 2, 2\), expected 1 or 2 dimensions"),
    (put("norm.weight", DIM), BAD, "tensors .* are both output_norm.weight"),
    (setting(hidden_size="many"), BAD, "config.json: hidden_size is str, expected an integer"),
    (setting(hidden_size=0), BAD, "hidden_size is 0, must be between 1 and"),
    (setting(rms_norm_eps=-1), BAD, "rms_norm_eps is -1, must be positive"),
    (setting(num_attention_heads=None), BAD, "num_attention_heads is missing"),
    (setting(hidden_act="relu"), NOT, "hidden_act is 'relu'; supported: 'silu'"),
    (setting(architectures=["BloomForCausalLM"]), NOT, "class BloomForCausalLM is not"),
    (setting(architectures=["LlamaForQuestionAnswering"]), NOT, "ForQuestionAnswering"),
    (setting(architectures=[]), BAD, "architectures must name the class"),
    (setting(rope_scaling={"rope_type": "other"}), NOT, "rope_type is 'other'"),
    (setting(rope_scaling=[1]), BAD, "rope_scaling is list, expected an object"),
    (setting(vocab_size=7), BAD, "vocab_size is 7, but the tokenizer has"),
    (setting(vocab_size=10**9), BAD, "vocab_size is 1000000000, far more than"),
    (tokenizer_with(model={"type": "WordLevel"}), NOT, "model.type is 'WordLevel'"),
    (tokenizer_with(model={"type": "BPE", "vocab": {"a": "b"}}), BAD, "model.vocab has no id for 'a'"),
    (tokenizer_with(model={"type": "BPE", "vocab": {"a": 0}, "merges": ["x"]}), BAD, r"merges\[0\] must"),
    (tokenizer_with(pre_tokenizer={"type": "Whitespace"}), NOT, "Whitespace is not"),
    (tokenizer_with(normalizer={"type": "Lowercase"}), NOT, "normalizer is Lowercase"),
    (
        tokenizer_with(added_tokens=[{"id": 5, "content": "x", "special": True}]),
        BAD,
        r"added_tokens\[0\].content is 'x', but token 5 is",
    ),
    (tokenizer_with(added_tokens=[{"id": 10**9, "content": "x"}]), BAD, "have the ids 0 to 1000000000"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "kind", "message"), WRONG)
def test_problems_of_a_folder_are_reported(
    tmp_path: Path, change: Callable[[Folder], object], kind: type[Exception], message: str
) -> None:
    folder = model_folders.llama(tmp_path / "m")
    change(folder)
    with pytest.raises(kind, match=message):
        convert(folder.write(), tmp_path / "m.gguf")
    assert not (tmp_path / "m.gguf").exists()


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
    ],
)
def test_an_index_may_name_only_files_of_its_folder(
    tmp_path: Path, names: dict[str, str], message: str
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


BODY, POOL = {"type": f"{ST}.Transformer", "path": ""}, {"type": f"{ST}.Pooling"}
TWO_MODES = {"pooling_mode_max_tokens": True, "pooling_mode_cls_token": True}


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("modules.json", {}, "modules is dict, expected an array"),
        ("modules.json", [BODY, {**POOL, "path": "../x"}], r"path is '../x', must be a folder"),
        ("modules.json", [BODY, {**POOL, "path": "x\0"}], r"path is 'x\\x00', must be a folder"),
        ("modules.json", [{"type": f"{ST}.CNN", "path": "x"}], r"modules\[0\].type .*CNN is not supported"),
        ("modules.json", [{"type": "custom.Pooling", "path": "x"}], r"type custom.Pooling is not supported"),
        ("1_Pooling/config.json", TWO_MODES, "sets pooling_mode_max_tokens, pooling_mode_cls"),
        ("1_Pooling/config.json", {}, "sets no pooling_mode"),
        ("1_Pooling/config.json", {"include_prompt": "no"}, "include_prompt is str, expected true or false"),
        ("2_Dense/config.json", {"activation_function": "torch.nn.Mish"}, "activation_function is Mish"),
        ("2_Dense/config.json", LINEAR, r"\(16, 32\), expected \(16, 5\)"),
    ],
)  # fmt: skip
def test_unsupported_modules_are_named(
    bert: Folder, tmp_path: Path, file: str, content: Any, message: str
) -> None:
    bert.pool(dense=16)
    bert.json(file, content)
    with pytest.raises((GGUFError, UnsupportedModelError), match=message):
        convert(bert.write(), tmp_path / "m.gguf")


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
