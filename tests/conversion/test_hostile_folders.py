"""Values in a model folder that would end a conversion without a named error, or take very long."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import gpt_folders, model_folders, recurrent_folders
from support.model_folders import Folder

from metal_prefill import GGUFError, UnsupportedModelError
from metal_prefill._support.messages import MOST_CHARACTERS
from metal_prefill.conversion import convert
from metal_prefill.conversion._fields import Fields
from metal_prefill.conversion._settings import long_rope_factors

Change = Callable[[Folder], object]
LARGEST = float(np.finfo(np.float32).max)
ABOVE = math.nextafter(LARGEST, math.inf)


def settings(**fields: Any) -> Change:
    return lambda folder: folder.config.update(fields)


def text(name: str, content: bytes) -> Change:
    return lambda folder: (folder.path / name).write_bytes(content)


LLAMA3 = {"rope_type": "llama3", "factor": 2, "low_freq_factor": 1, "high_freq_factor": 4}
HOSTILE: list[tuple[Change, str]] = [
    (settings(num_hidden_layers=4097), "num_hidden_layers is 4097, must be between 1 and 4096"),
    (settings(rms_norm_eps=1e300), r"rms_norm_eps is 1e\+300, must be positive and at most 3.40282e\+38"),
    (settings(rms_norm_eps=ABOVE), r"rms_norm_eps is 3\.40\d*e\+38, must be positive and at most"),
    (settings(rope_theta=10**400), "rope_theta is 1000"),
    (
        settings(head_dim=2**31 - 1, rope_scaling={**LLAMA3, "original_max_position_embeddings": 8}),
        "head_dim is 2147483647, must be between 1 and 65536",
    ),
    (settings(hidden_act="x" * 10**6), "hidden_act is 'xxx"),
    (settings(bos_token="\ud800"), "config.json: is not valid JSON: .*surrogates not allowed"),
    (text("tokenizer_config.json", b"[" * 10**6), "tokenizer_config.json: is not valid JSON"),
    (text("tokenizer_config.json", b"9" * 5000), "tokenizer_config.json: is not valid JSON"),
    (text("tokenizer_config.json", b'{"chat_template": "\xed\xa0\x80"}'), "not valid UTF-8 at byte 19"),
    (text("tokenizer_config.json", '{"chat_template": ""}'.encode("utf-16")), "not valid UTF-8 at byte 0"),
    (text("tokenizer_config.json", b'{"chat_template": [{"name": 5, "template": ""}]}'), "list of named"),
    (text("chat_template.jinja", b"\xff"), "chat_template.jinja: is not valid UTF-8 at byte 0"),
    (text("modules.json", b"\xff"), "modules.json: is not valid UTF-8 at byte 0"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), HOSTILE)
def test_hostile_values_are_named(tmp_path: Path, change: Change, message: str) -> None:
    folder = model_folders.llama(tmp_path / "m")
    change(folder)
    with pytest.raises((GGUFError, UnsupportedModelError), match=message) as caught:
        convert(folder.write(), tmp_path / "m.gguf")
    assert len(str(caught.value)) <= MOST_CHARACTERS + 5
    assert not (tmp_path / "m.gguf").exists()


def test_a_long_value_that_its_reader_refuses_is_cut(tmp_path: Path) -> None:
    folder = gpt_folders.gpt_neox(tmp_path / "m", hidden_act="x" * 5000)
    with pytest.raises(UnsupportedModelError, match=r"gptneox\.hidden_activation is xxx") as caught:
        convert(folder.write(), tmp_path / "m.gguf")
    assert len(str(caught.value)) <= 2 * MOST_CHARACTERS


def test_long_tokens_are_named(tmp_path: Path) -> None:
    """Finding the merges of one takes time quadratic in its length."""
    folder = model_folders.llama(tmp_path / "m")
    content = json.loads((folder.path / "tokenizer.json").read_text())
    content["model"]["vocab"]["x" * 2000] = len(content["model"]["vocab"])
    folder.json("tokenizer.json", content)
    with pytest.raises(GGUFError, match="token 300 has 2000 characters, more than 1024"):
        convert(folder.write(), tmp_path / "m.gguf")


@pytest.mark.parametrize("name", ["config.json", "chat_template.jinja", "modules.json", "tokenizer.json"])
def test_huge_files_of_text_are_not_read(tmp_path: Path, name: str) -> None:
    folder = model_folders.llama(tmp_path / "m").write()
    (folder / name).touch()
    os.truncate(folder / name, 1 << 40)  # takes no space
    with pytest.raises(GGUFError, match=f"{name}: has more than 268435456 bytes"):
        convert(folder, tmp_path / "m.gguf")


def test_metadata_beyond_their_types_are_named(tmp_path: Path) -> None:
    folder = recurrent_folders.lfm2(tmp_path / "m")
    folder.config |= {"block_ffn_dim_multiplier": 1e30, "block_auto_adjust_ff_dim": True}
    with pytest.raises(GGUFError, match=r"lfm2.feed_forward_length would be \d+, which a GGUF file cannot"):
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


@pytest.mark.parametrize("sections", [[1, "a"], ["\x00"], [[1]], [2**40], [0.5, 1], [-1]])
def test_lists_of_other_values_are_named(tmp_path: Path, sections: list[Any]) -> None:
    folder = recurrent_folders.qwen35(tmp_path / "m")
    folder.config["rope_parameters"] = {"rope_theta": 10000.0, "mrope_section": sections}
    with pytest.raises((GGUFError, UnsupportedModelError)):
        convert(folder.write(), tmp_path / "m.gguf")


@pytest.mark.parametrize("factor", [10**400, 1e300, ABOVE, float("nan"), True, "1"])
def test_factors_are_numbers(tmp_path: Path, factor: Any) -> None:
    folder = recurrent_folders.falcon_h1(tmp_path / "m")
    folder.config["mlp_multipliers"] = [1.0, factor]
    with pytest.raises(GGUFError, match=r"mlp_multipliers is .*, must be 2 numbers"):
        convert(folder.write(), tmp_path / "m.gguf")


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


def test_an_index_names_files(tmp_path: Path) -> None:
    folder = model_folders.llama(tmp_path / "m")
    path = folder.write(shards=2)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.norm.weight"] = ["model-00001-of-00002.safetensors"]
    folder.json("model.safetensors.index.json", index)
    with pytest.raises(GGUFError, match="weight_map must name a file for each tensor"):
        convert(path, tmp_path / "m.gguf")
    index["weight_map"]["model.norm.weight"] = "x" * 250 + ".safetensors"  # no file can have this name
    folder.json("model.safetensors.index.json", index)
    with pytest.raises(
        GGUFError, match=r"weight_map names 'xx.*', must name safetensors files in this folder"
    ):
        convert(path, tmp_path / "m.gguf")


@pytest.mark.parametrize("place", ["x" * 256, "x/" * 3000, "..", "/"])
def test_a_module_is_in_a_folder_of_the_model(tmp_path: Path, place: str) -> None:
    folder = model_folders.llama(tmp_path / "m")
    folder.pool()
    modules = json.loads((folder.path / "modules.json").read_text())
    modules[1]["path"] = place
    folder.json("modules.json", modules)
    with pytest.raises(GGUFError, match=r"path is .*must be a folder in this one"):
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
