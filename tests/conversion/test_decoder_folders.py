"""Folders of decoders that differ from Llama in a few steps: logits of transformers, and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import decoder_folders, expert_folders, folder_logits, gpt_folders, model_folders
from support.decoder_folders import HEAD, RECORDED, long_rope
from support.expert_folders import WIDTH
from support.folder_logits import check_logits
from support.model_folders import CONTEXT, DIM, LAYERS, Folder, check_refused, read, values
from support.recurrent_folders import RECORD

from metal_prefill import GGUFError, Model, UnsupportedModelError
from metal_prefill.conversion import convert
from metal_prefill.conversion._fields import Fields
from metal_prefill.conversion._settings import phi3


def long_rope_of(factor: int) -> dict[str, Any]:
    return {"rope_scaling": {"type": "longrope", "long_factor": [factor] * 4, "short_factor": [1] * 4}}


def rope_of_windows(**rope: Any) -> dict[str, Any]:
    full = {"rope_type": "default", "rope_theta": 5e5}
    return {"rope_parameters": {"full_attention": full, "sliding_attention": {**full, **rope}}}


FOURTH = "must have 0 for every fourth layer"
LETTERS = {"sliding_window": 9, "layer_types": None, "sliding_window_pattern": "LLLG"}


def test_the_context_chooses_the_factors_of_long_rope(tmp_path: Path) -> None:
    folder = RECORDED["phi3, LongRoPE"](tmp_path / "m").write()
    with Model(folder, device="cpu", max_context=CONTEXT // 2) as short, Model(folder, device="cpu") as whole:
        assert short.max_context == CONTEXT // 2
        assert not np.array_equal(*(last_logits(model) for model in (short, whole)))
    fields, tensors = read(convert(folder, tmp_path / "m.gguf"))
    assert fields["phi3.rope.scaling.original_context_length"] == CONTEXT // 2
    np.testing.assert_allclose(tensors["rope_factors_long.weight"], [1.7, 2.4, 3.1, 3.8], rtol=1e-6)
    np.testing.assert_allclose(tensors["rope_factors_short.weight"], [1.1, 1.2, 1.3, 1.4], rtol=1e-6)
    growth = (1 + np.log(2) / np.log(CONTEXT // 2)) ** 0.5
    assert fields["phi3.rope.scaling.attn_factor"] == pytest.approx(growth, rel=1e-6)


def test_the_rotated_part_of_a_head_follows_its_width(tmp_path: Path) -> None:
    """The width differs from that of the hidden state, divided by the heads, if the folder states it."""
    settings = {"hidden_size": 32, "num_attention_heads": 4, "partial_rotary_factor": 0.5}
    assert phi3(Fields(tmp_path, settings))["rope.dimension_count"] == 4
    assert phi3(Fields(tmp_path, {**settings, "head_dim": 16}))["rope.dimension_count"] == 8


def test_a_folder_of_minicpm_is_one_of_granite_with_its_factors(tmp_path: Path) -> None:
    """Their forward passes are the same; Granite's is compared with transformers, which lacks MiniCPM."""
    folder = decoder_folders.minicpm(tmp_path / "minicpm")
    factors = {
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.5 / LAYERS**0.5,
        "logits_scaling": DIM / 8,
        "attention_multiplier": HEAD**-0.5,
        "rms_norm_eps": folder.config["rms_norm_eps"],
    }
    same = decoder_folders.granite(tmp_path / "granite", **factors)
    same.tensors = folder.tensors
    with (
        Model(folder.write(), device="cpu", compute="f32") as model,
        Model(same.write(), device="cpu", compute="f32") as other,
    ):
        np.testing.assert_array_equal(last_logits(model), last_logits(other))
    fields, _ = read(convert(folder.path, tmp_path / "m.gguf"))
    assert fields["minicpm.logit_scale"] == DIM / 8
    assert fields["minicpm.rope.dimension_count"] == HEAD


def test_long_rope_of_minicpm_is_written(tmp_path: Path) -> None:
    folder = decoder_folders.minicpm(tmp_path / "m", **long_rope(HEAD))
    fields, tensors = read(convert(folder.write(), tmp_path / "m.gguf"))
    assert fields["minicpm.rope.scaling.original_context_length"] == CONTEXT // 2
    np.testing.assert_allclose(tensors["rope_factors_long.weight"], [1.7, 2.4, 3.1, 3.8], rtol=1e-6)


def test_ministral3_opens_up_to_its_original_context(tmp_path: Path) -> None:
    """Scores of later positions grow, which is not implemented."""
    path = convert(RECORDED["ministral3"](tmp_path / "m").write(), tmp_path / "m.gguf")
    assert read(path)[0]["mistral3.attention.temperature_scale"] == pytest.approx(0.1)
    assert read(path)[0]["mistral3.context_length"] == 4 * CONTEXT
    with Model(path, device="cpu") as model:
        assert model.max_context == CONTEXT


def test_the_text_part_of_ministral3_is_a_model(tmp_path: Path) -> None:
    folder = RECORDED["ministral3"](tmp_path / "m")
    expected = read(convert(folder.write(), tmp_path / "m.gguf", name="m"))
    folder.config["architectures"] = ["Mistral3ForConditionalGeneration"]
    decoder_folders.with_text_part(folder, model_type="mistral3")
    for name in ("model.vision_tower.ln_pre.weight", "model.multi_modal_projector.norm.weight"):
        folder.tensors[name] = model_folders.values((8,))
    fields, tensors = read(convert(folder.write(), tmp_path / "m.gguf", name="m"))
    assert fields == expected[0]
    assert tensors.keys() == expected[1].keys()


def last_logits(model: Model) -> Any:
    with model.session() as session:
        return session.forward_prompt_logits(np.arange(9, dtype=np.int32))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("smollm3", {"no_rope_layers": [1, 1, 1, 0, 1], "no_rope_layer_interval": 5}),
        ("smollm3", {"rope_theta": 2000000.0}),
        (
            "olmo3",
            {
                "rope_parameters": None,
                "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 10},
                "rope_theta": 500000.0,
            },
        ),
        ("phi3", {"rope_scaling": {"type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}}),
        (
            "exaone4, window",
            {
                "sliding_window_pattern": "LLLG",
                "layer_types": [*["sliding_attention"] * 3, *["full_attention", "sliding_attention"]],
            },
        ),
        ("hunyuan", {"rope_scaling": {"type": "default"}, "rope_theta": 10000.0 * 50 ** (HEAD / (HEAD - 2))}),
    ],
)
def test_folders_of_other_versions_are_the_same_model(
    tmp_path: Path, name: str, changes: dict[str, Any]
) -> None:
    usual = RECORDED[name](tmp_path / "m")
    usual.write()
    expected = read(convert(usual.path, tmp_path / "usual.gguf"))[0]
    usual.config |= changes
    usual.write()
    assert read(convert(usual.path, tmp_path / "other.gguf"))[0] == expected


@pytest.mark.parametrize(
    ("name", "changes", "error", "message"),
    [
        ("smollm3", {"no_rope_layers": [1] * 5}, UnsupportedModelError, FOURTH),
        ("smollm3", {"no_rope_layer_interval": 3}, UnsupportedModelError, FOURTH),
        ("smollm3", {"use_sliding_window": True}, UnsupportedModelError, "use_sliding_window is True"),
        ("granite", {"rope_scaling": {"type": "longrope"}}, UnsupportedModelError, "is 'longrope'"),
        ("mistral, YaRN", {"rope_scaling": {"rope_type": "yarn"}}, GGUFError, "factor is missing"),
        ("qwen2, window", {"layer_types": ["conv"] * 2}, UnsupportedModelError, "for each of the 2 layers"),
        ("qwen3, window", {"use_sliding_window": "no"}, UnsupportedModelError, "use_sliding_window is 'no'"),
        ("olmo3", rope_of_windows(rope_type="linear"), UnsupportedModelError, "rope_type is 'linear'"),
        ("olmo3", rope_of_windows(rope_theta=1e4), UnsupportedModelError, "rope_theta is 10000.0; supported"),
        ("olmo3", {"sliding_window": 0}, GGUFError, "sliding_window is 0, must be between 1"),
        ("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, UnsupportedModelError, "is 'linear'"),
        ("phi3", long_rope(HEAD + 2), GGUFError, r"rope_scaling.long_factor must have 4 numbers, has 5"),
        ("phi3", {**long_rope(HEAD), "original_max_position_embeddings": 1}, GGUFError, "is 1, must be"),
        ("phi3, LongRoPE", long_rope_of(10**400), GGUFError, "must have positive finite numbers"),
        ("phi3", {"partial_rotary_factor": 1e30}, GGUFError, "is 1e\\+30, must be at most 1"),
        ("granite", {"rope_theta": 1e39}, GGUFError, "is 1e\\+39, must be positive"),
        ("hunyuan", {"rope_scaling": {"type": "dynamic", "alpha": 1e38}}, GGUFError, "alpha is 1e"),
        ("exaone4", LETTERS, GGUFError, "sliding_window_pattern is str, expected an integer"),
        ("hunyuan", {"rope_scaling": {"type": "dynamic"}}, UnsupportedModelError, "is 'dynamic'"),
    ],
)  # fmt: skip
def test_other_variants_are_refused(
    tmp_path: Path, name: str, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    check_refused(RECORDED[name](tmp_path / "m"), changes, error, message)


@pytest.mark.parametrize("name", ["smollm3", "granite"])
def test_biases_that_the_configuration_excludes_are_refused(tmp_path: Path, name: str) -> None:
    folder = RECORDED[name](tmp_path / "m")
    folder.tensors["model.layers.0.self_attn.q_proj.bias"] = model_folders.values((32,))
    with pytest.raises(GGUFError, match="attention_bias is not true, but the weights have the tensor"):
        convert(folder.write(), tmp_path / "m.gguf")


def test_a_folder_of_exaone4_says_which_layers_have_a_window(tmp_path: Path) -> None:
    folder = decoder_folders.exaone4(tmp_path / "m", sliding_window=9, sliding_window_pattern=2)
    fields, _ = read(convert(folder.write(), tmp_path / "m.gguf"))
    assert fields["exaone4.attention.sliding_window_pattern"] == 2
    folder.config["layer_types"] = ["full_attention", "sliding_attention"]
    fields, _ = read(convert(folder.write(), tmp_path / "other.gguf"))
    assert fields["exaone4.attention.sliding_window_pattern"] == [False, True]


@pytest.mark.parametrize("name", folder_logits.RECORDED)
def test_logits_of_a_folder_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    check_logits(folder_logits.RECORDED[name](tmp_path / "m").write(), np.load(RECORD)[name])


def test_names_of_gpt2_may_have_a_prefix_and_masks(tmp_path: Path) -> None:
    folder = gpt_folders.RECORDED["gpt2"](tmp_path / "m")
    expected = read(convert(folder.write(), tmp_path / "m.gguf"))[1]
    folder.tensors = {f"transformer.{name}": tensor for name, tensor in folder.tensors.items()}
    folder.tensors["transformer.h.0.attn.bias"] = values((1, 1, 40, 40))
    folder.tensors["transformer.h.0.attn.masked_bias"] = values((1,))
    folder.tensors["lm_head.weight"] = folder.tensors["transformer.wte.weight"].copy()
    tensors = read(convert(folder.write(), tmp_path / "other.gguf"))[1]
    np.testing.assert_array_equal(tensors.pop("output.weight"), tensors["token_embd.weight"])
    assert tensors.keys() == expected.keys()


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
def test_other_variants_of_gpt_are_refused(
    tmp_path: Path, name: str, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    check_refused(gpt_folders.RECORDED[name](tmp_path / "m"), changes, error, message)


def test_routers_stay_in_float32(tmp_path: Path) -> None:
    folder = expert_folders.granite_moe(tmp_path / "m")
    _, tensors = read(convert(folder.write(), tmp_path / "m.gguf", tensor_type="BF16"))
    router = folder.tensors["model.layers.0.block_sparse_moe.router.layer.weight"]
    np.testing.assert_array_equal(tensors["blk.0.ffn_gate_inp.weight"], router)


def narrower(name: str) -> Callable[[Folder], None]:
    """Give a matrix of an expert fewer rows than those of others."""
    return lambda folder: folder.tensors.__setitem__(name, values((WIDTH - 8, DIM)))


def sets(**fields: Any) -> Callable[[Folder], None]:
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
    folder = expert_folders.RECORDED[name](tmp_path / "m")
    change(folder)
    with pytest.raises(error, match=message):
        convert(folder.write(), tmp_path / "m.gguf")
