"""Folders of decoders with experts: how they are written as GGUF, and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import expert_folders
from support.expert_folders import RECORDED, WIDTH
from support.model_folders import DIM, Folder, read, values

from metal_prefill import GGUFError, UnsupportedModelError
from metal_prefill.conversion import convert


def test_matrices_of_experts_become_one_tensor(tmp_path: Path) -> None:
    folder = expert_folders.qwen3_moe(tmp_path / "m", count=11, used=3)
    fields, tensors = read(convert(folder.write(), tmp_path / "m.gguf"))
    expected = {"expert_count": 11, "expert_used_count": 3, "expert_feed_forward_length": WIDTH}
    assert {key: fields[f"qwen3moe.{key}"] for key in expected} == expected
    assert fields["qwen3moe.expert_weights_norm"] is True
    name = "model.layers.1.mlp.experts.{}.down_proj.weight"
    matrices = np.stack([folder.tensors[name.format(i)] for i in range(11)])
    np.testing.assert_array_equal(tensors["blk.1.ffn_down_exps.weight"], matrices)


def test_gate_and_up_of_granite_are_divided_for_each_expert(tmp_path: Path) -> None:
    folder = expert_folders.granite_moe(tmp_path / "m", shared=40)
    fields, tensors = read(convert(folder.write(), tmp_path / "m.gguf"))
    assert fields["granitemoe.expert_shared_feed_forward_length"] == 40
    whole = folder.tensors["model.layers.0.block_sparse_moe.input_linear.weight"]
    np.testing.assert_array_equal(tensors["blk.0.ffn_gate_exps.weight"], whole[:, :WIDTH])
    np.testing.assert_array_equal(tensors["blk.0.ffn_up_exps.weight"], whole[:, WIDTH:])
    shared = folder.tensors["model.layers.0.shared_mlp.input_linear.weight"]
    np.testing.assert_array_equal(tensors["blk.0.ffn_up_shexp.weight"], shared[40:])


def test_routers_stay_in_float32(tmp_path: Path) -> None:
    folder = expert_folders.granite_moe(tmp_path / "m")
    _, tensors = read(convert(folder.write(), tmp_path / "m.gguf", tensor_type="BF16"))
    router = folder.tensors["model.layers.0.block_sparse_moe.router.layer.weight"]
    np.testing.assert_array_equal(tensors["blk.0.ffn_gate_inp.weight"], router)


def test_a_folder_of_lfm2_sets_the_rules_of_its_router(tmp_path: Path) -> None:
    folder = expert_folders.lfm2_moe(tmp_path / "m")
    fields, tensors = read(convert(folder.write(), tmp_path / "m.gguf"))
    expected = {
        "leading_dense_block_count": 1,
        "expert_gating_func": 2,
        "expert_weights_scale": 1.5,
        "expert_weights_norm": True,
        "feed_forward_length": 96,
    }
    assert {key: fields[f"lfm2moe.{key}"] for key in expected} == expected
    bias = folder.tensors["model.layers.1.feed_forward.expert_bias"]
    np.testing.assert_array_equal(tensors["blk.1.exp_probs_b.bias"], bias)


def narrower(name: str) -> Callable[[Folder], None]:
    """Give a matrix of an expert fewer rows than those of others."""
    return lambda folder: folder.tensors.__setitem__(name, values((WIDTH - 8, DIM)))


def sets(**fields: Any) -> Callable[[Folder], None]:
    """Change the configuration."""
    return lambda folder: folder.config.update(fields)


_GATE = "model.layers.0.mlp.experts.2.gate_proj.weight"


@pytest.mark.parametrize(
    ("name", "change", "error", "message"),
    [
        ("qwen3_moe", lambda folder: folder.tensors.pop(_GATE), GGUFError, "but none of expert 2"),
        ("qwen3_moe", narrower(_GATE), GGUFError, r"has shape \(16, 32\), but .* has \(24, 32\)"),
        ("qwen3_moe", sets(decoder_sparse_step=2), UnsupportedModelError, "decoder_sparse_step is 2"),
        ("qwen3_moe", sets(mlp_only_layers=[0]), UnsupportedModelError, r"mlp_only_layers is \[0\]"),
        ("qwen3_moe", sets(num_experts=9), GGUFError, r"ffn_gate_inp.weight has shape \(8, 32\)"),
        ("olmoe", sets(clip_qkv=8.0), UnsupportedModelError, "clip_qkv is 8.0; supported: None"),
        ("olmoe", sets(num_experts_per_tok=65), GGUFError, "expert_used_count is 65, must be at most"),
        ("granite_moe", sets(num_local_experts=4), GGUFError, r"has shape \(5, 32\), .*\(4, 32\)"),
        ("lfm2_moe", sets(use_expert_bias=False), UnsupportedModelError, "use_expert_bias is False"),
        ("lfm2_moe", sets(num_dense_layers=3), GGUFError, "leading_dense_block_count is 3, must be 0 to 2"),
        ("granite_hybrid, experts", sets(num_local_experts=-1), GGUFError, "num_local_experts is -1"),
    ],
)
def test_what_contradicts_itself_or_is_not_supported_is_refused(
    tmp_path: Path, name: str, change: Callable[[Folder], object], error: type[Exception], message: str
) -> None:
    folder = RECORDED[name](tmp_path / "m")
    change(folder)
    with pytest.raises(error, match=message):
        convert(folder.write(), tmp_path / "m.gguf")
