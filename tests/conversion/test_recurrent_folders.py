"""Model folders with recurrent layers: what is written, what is refused, and logits of transformers."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import recurrent_folders
from support.gguf_reader import GGUFReader
from support.model_folders import DIM, FFN, read, save_bfloat16
from support.recurrent_folders import RECORDED

from metal_prefill import GGUFError, Model, UnsupportedModelError
from metal_prefill.conversion import convert

ROTATED = "granite_hybrid, attention with rotation"


def test_an_lfm2_folder_has_convolutions_and_attention(tmp_path: Path) -> None:
    folder = recurrent_folders.lfm2(tmp_path / "lfm2")
    fields, tensors = read(path := convert(folder.write(), tmp_path / "m.gguf", tensor_type="Q8_0"))
    assert fields["lfm2.attention.head_count_kv"] == [0, 2]
    assert fields["lfm2.feed_forward_length"] == 96
    assert fields["lfm2.shortconv.l_cache"] == 3
    assert fields["lfm2.rope.freq_base"] == 1e6
    kinds = {t.name: t.tensor_type.name for t in GGUFReader(path).tensors}
    assert kinds["blk.0.shortconv.conv.weight"] == "F32"
    assert kinds["blk.0.shortconv.in_proj.weight"] == "Q8_0"
    filters = folder.tensors["model.layers.0.conv.conv.weight"][:, 0]
    assert np.array_equal(tensors["blk.0.shortconv.conv.weight"], filters)


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
def test_a_qwen35_folder_has_delta_rules_and_attention(tmp_path: Path, architecture: str) -> None:
    folder = recurrent_folders.qwen35(tmp_path / "m", architecture)
    fields, tensors = read(path := convert(folder.write(), tmp_path / "m.gguf", tensor_type="Q8_0"))
    expected = {
        "ssm.conv_kernel": 4,
        "ssm.state_size": 8,
        "ssm.group_count": 2,
        "ssm.time_step_rank": 4,
        "ssm.inner_size": 24,
        "full_attention_interval": 2,
        "rope.dimension_count": 8,
        "rope.dimension_sections": [2, 1, 1, 0],
        "rope.freq_base": 1e7,
    }
    assert {key: fields[f"qwen35.{key}"] for key in expected} == expected
    assert fields["tokenizer.ggml.pre"] == "qwen35"
    kinds = {t.name: t.tensor_type.name for t in GGUFReader(path).tensors}
    assert kinds["blk.0.ssm_conv1d.weight"] == kinds["blk.0.ssm_a"] == kinds["blk.0.ssm_dt.bias"] == "F32"
    assert not any(name.startswith(("v.", "mtp")) for name in kinds)
    given = {name.rpartition("layers.")[2]: values for name, values in folder.tensors.items()}
    turns = [0, 2, 1, 3]  # value heads 0 and 1 have key head 0 in the folder, and 0 and 2 in the file
    np.testing.assert_allclose(
        tensors["blk.0.ssm_a"], -np.exp(given["0.linear_attn.A_log"][turns]), rtol=1e-6
    )
    assert np.array_equal(tensors["blk.0.ssm_dt.bias"], given["0.linear_attn.dt_bias"][turns])
    filters = given["0.linear_attn.conv1d.weight"][:, 0]
    keys, values = filters[:32], filters[32:].reshape(4, 6, 4)[turns].reshape(24, 4)
    assert np.array_equal(tensors["blk.0.ssm_conv1d.weight"], np.concatenate([keys, values]))
    assert np.array_equal(tensors["blk.0.ssm_norm.weight"], given["0.linear_attn.norm.weight"])
    assert np.array_equal(tensors["blk.1.attn_q_norm.weight"], given["1.self_attn.q_norm.weight"] + 1)


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
    folder = recurrent_folders.granite_hybrid(tmp_path / "m")
    fields, tensors = read(path := convert(folder.write(), tmp_path / "m.gguf", tensor_type="Q8_0"))
    expected = {
        "attention.head_count_kv": [0, 2],
        "feed_forward_length": FFN,
        "attention.scale": np.float32(0.3),
        "embedding_scale": 12.0,
        "residual_scale": 0.25,
        "logit_scale": 8.0,
        "rope.scaling.finetuned": False,
        "ssm.conv_kernel": 4,
        "ssm.state_size": 8,
        "ssm.group_count": 1,
        "ssm.time_step_rank": 4,
        "ssm.inner_size": 64,
    }
    assert {key: fields[f"granitehybrid.{key}"] for key in expected} == expected
    kinds = {t.name: t.tensor_type.name for t in GGUFReader(path).tensors}
    assert kinds["blk.0.ffn_gate.weight"] == kinds["blk.1.ffn_up.weight"] == "Q8_0"
    in_one = folder.tensors["model.layers.1.shared_mlp.input_linear.weight"]
    exact = read(convert(folder.path, tmp_path / "exact.gguf"))[1]
    assert np.array_equal(exact["blk.1.ffn_gate.weight"], in_one[:FFN])
    assert np.array_equal(exact["blk.1.ffn_up.weight"], in_one[FFN:])
    assert np.array_equal(tensors["blk.0.ssm_d"][:, 0], folder.tensors["model.layers.0.mamba.D"])
    assert tensors["blk.0.ssm_norm.weight"].shape == (1, 64)


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


def test_mamba2_has_no_attention(tmp_path: Path) -> None:
    folder = recurrent_folders.mamba2(tmp_path / "m", time_step_limit=[0.0, {"__float__": "Infinity"}])
    fields, tensors = read(convert(folder.write(), tmp_path / "m.gguf"))
    expected = {
        "attention.head_count": 0,
        "ssm.group_count": 2,
        "ssm.inner_size": 64,
        "ssm.time_step_rank": 4,
    }
    assert {key: fields[f"mamba2.{key}"] for key in expected} == expected
    rates = -np.exp(folder.tensors["backbone.layers.0.mixer.A_log"])
    np.testing.assert_allclose(tensors["blk.0.ssm_a"][:, 0], rates, rtol=1e-6)
    assert tensors["blk.0.ssm_norm.weight"].shape == (2, 32)


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
