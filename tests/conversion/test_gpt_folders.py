"""Folders of decoders with LayerNorm: how they are written as GGUF, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.gpt_folders import RECORDED
from support.model_folders import DIM, HEADS, check_refused, read, values

from metal_prefill import GGUFError, UnsupportedModelError
from metal_prefill.conversion import convert


def test_columns_of_gpt2_become_rows(tmp_path: Path) -> None:
    folder = RECORDED["gpt2"](tmp_path / "m")
    _, tensors = read(convert(folder.write(), tmp_path / "m.gguf"))
    for theirs, ours in {
        "attn.c_attn": "attn_qkv",
        "attn.c_proj": "attn_output",
        "mlp.c_fc": "ffn_up",
        "mlp.c_proj": "ffn_down",
    }.items():
        np.testing.assert_array_equal(
            tensors[f"blk.1.{ours}.weight"], folder.tensors[f"h.1.{theirs}.weight"].T
        )
        np.testing.assert_array_equal(tensors[f"blk.1.{ours}.bias"], folder.tensors[f"h.1.{theirs}.bias"])


def test_names_of_gpt2_may_have_a_prefix_and_masks(tmp_path: Path) -> None:
    folder = RECORDED["gpt2"](tmp_path / "m")
    expected = read(convert(folder.write(), tmp_path / "m.gguf"))[1]
    folder.tensors = {f"transformer.{name}": tensor for name, tensor in folder.tensors.items()}
    folder.tensors["transformer.h.0.attn.bias"] = values((1, 1, 40, 40))
    folder.tensors["transformer.h.0.attn.masked_bias"] = values((1,))
    folder.tensors["lm_head.weight"] = folder.tensors["transformer.wte.weight"].copy()
    tensors = read(convert(folder.write(), tmp_path / "other.gguf"))[1]
    np.testing.assert_array_equal(tensors.pop("output.weight"), tensors["token_embd.weight"])
    assert tensors.keys() == expected.keys()


def test_heads_of_gpt_neox_are_stacked_by_their_part(tmp_path: Path) -> None:
    folder = RECORDED["gpt_neox"](tmp_path / "m")
    fields, tensors = read(convert(folder.write(), tmp_path / "m.gguf"))
    name, width = "gpt_neox.layers.0.attention.query_key_value", DIM // HEADS
    for end in ("weight", "bias"):
        theirs, ours = folder.tensors[f"{name}.{end}"], tensors[f"blk.0.attn_qkv.{end}"]
        for part in range(3):
            for head in range(HEADS):
                row, first = DIM * part + width * head, width * (3 * head + part)
                np.testing.assert_array_equal(ours[row : row + width], theirs[first : first + width])
    assert fields["gptneox.use_parallel_residual"] is True
    assert fields["gptneox.rope.dimension_count"] == width // 4


@pytest.mark.parametrize(
    ("name", "changes", "error", "message"),
    [
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, UnsupportedModelError, "layer_idx is True"),
        ("gpt2", {"add_cross_attention": True}, UnsupportedModelError, "add_cross_attention is True"),
        ("gpt2", {"activation_function": "relu"}, UnsupportedModelError, "hidden_activation is relu"),
        ("gpt2", {"n_head": 3}, GGUFError, "is not a multiple of attention.head_count"),
        ("gpt_neox", {"rotary_pct": 1.5}, GGUFError, "rotary_pct is 1.5, must be at most 1"),
        ("gpt_neox", {"attention_bias": False}, UnsupportedModelError, "attention_bias is False"),
        ("gpt_neox", {"num_attention_heads": 5}, GGUFError, "is not a multiple of attention.head_count"),
        ("starcoder2", {"use_bias": False}, UnsupportedModelError, "use_bias is False"),
        ("phi", {"qk_layernorm": True}, UnsupportedModelError, "qk_layernorm is True"),
        ("stablelm", {"qk_layernorm": True}, UnsupportedModelError, "qk_layernorm is True"),
        ("stablelm", {"use_parallel_residual": True}, UnsupportedModelError, "parallel_residual is True"),
        ("stablelm", {"use_qkv_bias": False}, GGUFError, "use_qkv_bias is not true, but the weights have"),
        ("cohere2", {"attention_bias": True}, UnsupportedModelError, "attention_bias is True"),
        ("cohere2", {"layer_types": ["conv"] * 5}, UnsupportedModelError, "for each of the 5 layers"),
    ],
)
def test_other_variants_are_refused(
    tmp_path: Path, name: str, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    check_refused(RECORDED[name](tmp_path / "m"), changes, error, message)
