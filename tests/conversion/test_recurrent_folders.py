"""Model folders with recurrent layers: what is written, what is refused, and logits of transformers."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import recurrent_folders
from support.gguf_reader import GGUFReader
from support.model_folders import DIM, FFN, Folder, read, save_bfloat16
from support.recurrent_folders import RECORDED

from metal_prefill import GGUFError, Model, UnsupportedModelError
from metal_prefill.conversion import convert

ROTATED = "granite_hybrid, attention with rotation"


def kinds_of(folder: Folder, tmp_path: Path) -> dict[str, str]:
    """Return the types of the tensors of a file in 8 bits."""
    path = convert(folder.write(), tmp_path / "m.gguf", tensor_type="Q8_0")
    return {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(path).tensors}


def test_filters_of_lfm2_stay_in_float32(tmp_path: Path) -> None:
    kinds = kinds_of(recurrent_folders.lfm2(tmp_path / "lfm2"), tmp_path)
    assert kinds["blk.0.shortconv.conv.weight"] == "F32"
    assert kinds["blk.0.shortconv.in_proj.weight"] == "Q8_0"


@pytest.mark.parametrize(
    ("changes", "width"),
    [
        ({"block_auto_adjust_ff_dim": False, "intermediate_size": 96}, 96),
        ({"block_ff_dim": 70, "block_ffn_dim_multiplier": 2.0}, 96),  # before intermediate_size
        ({"layer_types": None, "full_attn_idxs": [1]}, 96),
        ({"rope_theta": None, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, 96),
    ],
)
def test_lfm2_folders_of_other_versions_are_the_same_model(
    tmp_path: Path, changes: dict[str, Any], width: int
) -> None:
    usual = read(convert(recurrent_folders.lfm2(tmp_path / "m").write(), tmp_path / "usual.gguf"))[0]
    folder = recurrent_folders.lfm2(tmp_path / "other" / "m", **changes)
    other = read(convert(folder.write(), tmp_path / "other.gguf"))[0]
    assert other["lfm2.feed_forward_length"] == width
    assert other == usual


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"conv_bias": True}, r"conv_bias is True; supported: False"),
        (
            {"layer_types": ["conv", "other"]},
            "layer_types must have full_attention or conv for each of the 2",
        ),
        ({"layer_types": ["conv"]}, "layer_types must have full_attention or conv for each of the 2 layers"),
    ],
)
def test_features_of_lfm2_that_are_missing_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = recurrent_folders.lfm2(tmp_path / "m", **changes)
    with pytest.raises(UnsupportedModelError, match=message):
        convert(folder.write(), tmp_path / "m.gguf")


@pytest.mark.parametrize("architecture", ["Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"])
def test_the_text_part_of_qwen35_is_written(tmp_path: Path, architecture: str) -> None:
    folder = recurrent_folders.qwen35(tmp_path / "m", architecture)
    kinds = kinds_of(folder, tmp_path)
    fields, _ = read(tmp_path / "m.gguf")
    assert fields["qwen35.rope.dimension_sections"] == [2, 1, 1, 0]
    assert fields["tokenizer.ggml.pre"] == "qwen35"
    assert kinds["blk.0.ssm_conv1d.weight"] == kinds["blk.0.ssm_a"] == kinds["blk.0.ssm_dt.bias"] == "F32"
    assert not any(name.startswith(("v.", "mtp")) for name in kinds)


def test_layers_of_qwen35_without_a_period_are_listed(tmp_path: Path) -> None:
    folder = recurrent_folders.qwen35(
        tmp_path / "m", layer_types=["full_attention", "linear_attention"], num_hidden_layers=2
    )
    swapped = {
        re.sub(r"layers\.(\d)", lambda layer: f"layers.{1 - int(layer[1])}", name): values
        for name, values in folder.tensors.items()
    }
    folder.tensors = swapped
    fields = read(path := convert(folder.write(), tmp_path / "m.gguf"))[0]
    assert list(fields["qwen35.attention.recurrent_layers"]) == [False, True]
    with Model(path, device="cpu") as model:
        assert model.config.layer_kinds == ("attention", "gated_delta")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"attn_output_gate": False}, UnsupportedModelError, "attn_output_gate is False; supported: True"),
        (
            {"layer_types": ["linear_attention"]},
            UnsupportedModelError,
            "layer_types must have full_attention or linear_attention for each of the 2 layers",
        ),
        ({"linear_num_key_heads": 3}, GGUFError, "time_step_rank 4 is not a multiple of .*group_count 3"),
        ({"linear_value_head_dim": 7}, GGUFError, r"has shape \(24, 32\), the metadata requires \(28, 32\)"),
    ],
)
def test_folders_of_qwen35_that_contradict_themselves_are_refused(
    tmp_path: Path, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    folder = recurrent_folders.qwen35(tmp_path / "m", **changes)
    with pytest.raises(error, match=message):
        convert(folder.write(), tmp_path / "m.gguf")


def test_granite_4_writes_gate_and_up_as_two_tensors(tmp_path: Path) -> None:
    kinds = kinds_of(recurrent_folders.granite_hybrid(tmp_path / "m"), tmp_path)
    assert kinds["blk.0.ffn_gate.weight"] == kinds["blk.1.ffn_up.weight"] == "Q8_0"
    fields, tensors = read(tmp_path / "m.gguf")
    assert fields["granitehybrid.rope.scaling.finetuned"] is False
    assert tensors["blk.0.ssm_norm.weight"].shape == (1, 64)


def test_steps_of_mamba2_may_have_infinity_as_their_limit(tmp_path: Path) -> None:
    folder = recurrent_folders.mamba2(tmp_path / "m", time_step_limit=[0.0, {"__float__": "Infinity"}])
    convert(folder.write(), tmp_path / "m.gguf")


@pytest.mark.parametrize("save", ["whole", "bfloat16", "shards"])
def test_parts_of_a_tensor_are_read_from_any_file(tmp_path: Path, save: str) -> None:
    folder = recurrent_folders.granite_hybrid(tmp_path / "m")
    path = folder.write(shards=3 if save == "shards" else 1)
    if save == "bfloat16":
        save_bfloat16(folder.tensors, path / "model.safetensors")
    found = read(convert(path, tmp_path / "m.gguf"))[1]
    in_one = folder.tensors["model.layers.0.shared_mlp.input_linear.weight"]
    if save == "bfloat16":
        in_one = (in_one.view(np.uint32) >> 16 << 16).view(np.float32)
    assert np.array_equal(np.concatenate([found[f"blk.0.ffn_{n}.weight"] for n in ("gate", "up")]), in_one)


def test_granite_4_without_state_space_layers_is_a_granite_model(tmp_path: Path) -> None:
    fields, _ = read(convert(RECORDED[ROTATED](tmp_path / "m").write(), tmp_path / "m.gguf"))
    assert fields["general.architecture"] == "granite"


def test_other_names_of_layers_are_the_same_granite_model(tmp_path: Path) -> None:
    usual = read(convert(recurrent_folders.granite_hybrid(tmp_path / "m").write(), tmp_path / "usual.gguf"))[
        0
    ]
    kinds = {"layer_types": None, "layers_block_type": ["linear_attention", "full_attention"]}
    folder = recurrent_folders.granite_hybrid(tmp_path / "other" / "m", **kinds)
    assert read(convert(folder.write(), tmp_path / "other.gguf"))[0] == usual


@pytest.mark.parametrize(
    ("family", "changes", "error", "message"),
    [
        (
            "granite_hybrid",
            {"layer_types": ["mamba", "other"]},
            UnsupportedModelError,
            "layer_types must have attention or mamba for each of the 2 layers",
        ),
        (
            "granite_hybrid",
            {"layer_types": ["mamba", "mamba"]},
            UnsupportedModelError,
            "head_count_kv is 0 in every layer",
        ),
        (
            "granite_hybrid",
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            UnsupportedModelError,
            "the rotation of a granitehybrid model is scaled",
        ),
        (
            "granite_hybrid",
            {"mamba_n_groups": 3},
            GGUFError,
            r"ssm_norm.weight has shape \(64,\), which 3 groups do not divide",
        ),
        (
            "mamba2",
            {"time_step_limit": [0.01, 0.1]},
            UnsupportedModelError,
            r"time_step_limit is \[0.01, 0.1\]",
        ),
        ("mamba2", {"use_bias": True}, UnsupportedModelError, "use_bias is True; supported: False"),
        (
            "mamba2",
            {"head_dim": 8},
            GGUFError,
            "num_heads and head_dim make 32 values, expand and hidden_size 64",
        ),
        ("falcon_h1", {"mamba_norm_before_gate": True}, UnsupportedModelError, "norm_before_gate is True"),
        (
            "falcon_h1",
            {"tie_word_embeddings": True},
            UnsupportedModelError,
            "embedding_multiplier 2.0 differs from lm_head_multiplier 0.5",
        ),
        (
            "falcon_h1",
            {"mlp_multipliers": [1.0]},
            GGUFError,
            r"mlp_multipliers is \[1.0\], must be 2 numbers",
        ),
        ("falcon_h1", {"ssm_multipliers": ["a"] * 5}, GGUFError, "ssm_multipliers is .*, must be 5 numbers"),
    ],
)
def test_folders_with_state_space_layers_that_are_not_supported_are_refused(
    tmp_path: Path, family: str, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    folder = getattr(recurrent_folders, family)(tmp_path / "m", **changes)
    with pytest.raises(error, match=message):
        convert(folder.write(), tmp_path / "m.gguf")


def test_a_tensor_that_its_parts_do_not_divide_is_refused(tmp_path: Path) -> None:
    folder = recurrent_folders.granite_hybrid(tmp_path / "m")
    name = "model.layers.1.shared_mlp.input_linear.weight"
    folder.tensors[name] = np.zeros((2 * FFN + 1, DIM), np.float32)
    with pytest.raises(GGUFError, match=f"tensor {name} has 129 rows, which 2 parts do not divide"):
        convert(folder.write(), tmp_path / "m.gguf")
