"""Folders of decoders: logits of transformers, what is written, and settings of other versions."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.files.gguf_mutator import take_apart
from support.folders.decoder_folders import (
    FULL,
    FULL_HEAD,
    HEAD,
    IDS,
    INPUT,
    KINDS,
    RECORD,
    RECORDED,
    ROWS,
    WINDOW,
    WINDOW_HEAD,
    folder,
    long_rope,
    wider,
)
from support.folders.model_folders import (
    CONTEXT,
    DIM,
    FFN,
    LAYERS,
    Folder,
    assert_same_tensors,
    read,
    save_bfloat16,
    types_of,
)
from support.missing import resident_bytes

from metal_prefill import Model
from metal_prefill.conversion import convert


@pytest.mark.parametrize("name", RECORDED)
def test_logits_of_a_folder_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    path, expected = RECORDED[name](tmp_path / "m").write(), np.load(RECORD)[name]
    with Model(path, device="cpu", compute="f32", kv_dtype="f32") as model, model.session() as session:
        logits = np.stack([session.forward_prompt_logits(IDS[i : i + 1]) for i in range(len(IDS))])[ROWS]
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def logits_of(path: Path, **options: Any) -> Any:
    with Model(path, device="cpu", **options) as model, model.session() as session:
        return session.forward_prompt_logits(IDS)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 10}
OF_LAYERS = {str(i): {"head_dim": FULL_HEAD} for i, kind in enumerate(KINDS) if kind == FULL}
# Settings of other versions of a class.
SAME: list[tuple[str, dict[str, Any]]] = [
    ("smollm3", {"no_rope_layers": [1, 1, 1, 0, 1], "no_rope_layer_interval": 5}),
    ("smollm3", {"rope_theta": 2000000.0}),
    ("olmo3", {"rope_parameters": None, "rope_scaling": YARN, "rope_theta": 500000.0}),
    ("phi3", {"rope_scaling": {"type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}}),
    ("exaone4, window", {"sliding_window_pattern": "LLLG", "layer_types": [*[WINDOW] * 3, FULL, WINDOW]}),
    ("hunyuan", {"rope_scaling": {"type": "default"}, "rope_theta": 10000.0 * 50 ** (HEAD / (HEAD - 2))}),
    ("lfm2", {"block_auto_adjust_ff_dim": False, "intermediate_size": 96}),
    ("lfm2", {"block_ff_dim": 70, "block_ffn_dim_multiplier": 2.0}),  # before intermediate_size
    ("lfm2", {"layer_types": None, "full_attn_idxs": [1]}),
    ("lfm2", {"rope_theta": None, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}),
    ("granite_hybrid", {"layer_types": None, "layers_block_type": ["linear_attention", FULL]}),
    ("mamba2", {"time_step_limit": [0.0, {"__float__": "Infinity"}]}),
    ("gemma4", {"global_head_dim": None, "per_layer_config": OF_LAYERS}),
]


@pytest.mark.parametrize(("name", "changes"), SAME)
def test_folders_of_other_versions_are_the_same_model(
    tmp_path: Path, name: str, changes: dict[str, Any]
) -> None:
    made = RECORDED[name](tmp_path / "m")
    expected = convert(made.write(), tmp_path / "usual.gguf").read_bytes()
    made.config |= changes
    assert convert(made.write(), tmp_path / "other.gguf").read_bytes() == expected


def minicpm(path: Path, **config: Any) -> Folder:
    """Make a folder of MiniCPM, whose tensors are those of Granite."""
    factors = {"scale_emb": 12.0, "scale_depth": 0.5, "dim_model_base": 8}
    return folder(path, "granite", architectures=["MiniCPMForCausalLM"], **factors, **config)


@pytest.mark.parametrize(
    ("make", "architecture"), [(RECORDED["phi3, LongRoPE"], "phi3"), (minicpm, "minicpm")]
)
def test_long_rope_is_written(tmp_path: Path, make: Any, architecture: str) -> None:
    fields, tensors = read(convert(make(tmp_path / "m", **long_rope(HEAD)).write(), tmp_path / "m.gguf"))
    assert fields[f"{architecture}.rope.scaling.original_context_length"] == CONTEXT // 2
    np.testing.assert_allclose(tensors["rope_factors_long.weight"], [1.7, 2.4, 3.1, 3.8], rtol=1e-6)
    np.testing.assert_allclose(tensors["rope_factors_short.weight"], [1.1, 1.2, 1.3, 1.4], rtol=1e-6)
    growth = (1 + np.log(2) / np.log(CONTEXT // 2)) ** 0.5
    assert fields[f"{architecture}.rope.scaling.attn_factor"] == pytest.approx(growth, rel=1e-6)


def test_the_context_chooses_the_factors_of_long_rope(tmp_path: Path) -> None:
    path = RECORDED["phi3, LongRoPE"](tmp_path / "m").write()
    with Model(path, device="cpu", max_context=CONTEXT // 2) as short, Model(path, device="cpu") as whole:
        assert short.max_context == CONTEXT // 2
        one, other = (model.session().forward_prompt_logits(IDS[:9]) for model in (short, whole))
    assert not np.array_equal(one, other)


def test_a_folder_of_minicpm_is_one_of_granite_with_its_factors(tmp_path: Path) -> None:
    """Their forward passes are the same; Granite's is compared with transformers, which lacks MiniCPM."""
    factors = {
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.5 / LAYERS**0.5,
        "logits_scaling": DIM / 8,
        "attention_multiplier": HEAD**-0.5,
    }
    path = minicpm(tmp_path / "minicpm").write()
    same = folder(tmp_path / "granite", "granite", **factors).write()
    np.testing.assert_array_equal(logits_of(path, compute="f32"), logits_of(same, compute="f32"))
    fields, _ = read(convert(path, tmp_path / "m.gguf"))
    assert fields["minicpm.logit_scale"] == DIM / 8
    assert fields["minicpm.rope.dimension_count"] == HEAD


def test_ministral3_opens_up_to_its_original_context(tmp_path: Path) -> None:
    """Scores of later positions grow, which is not implemented."""
    path = convert(RECORDED["ministral3"](tmp_path / "m").write(), tmp_path / "m.gguf")
    assert read(path)[0]["mistral3.attention.temperature_scale"] == pytest.approx(0.1)
    assert read(path)[0]["mistral3.context_length"] == 4 * CONTEXT
    with Model(path, device="cpu") as model:
        assert model.max_context == CONTEXT


@pytest.mark.parametrize(
    ("name", "family", "others"),
    [
        ("ministral3", "Mistral3", ("vision_tower.ln_pre", "multi_modal_projector.norm")),
        ("gemma4", "Gemma4", ("vision_tower.std", "embed_audio.embedding_projection")),
    ],
)
def test_parts_for_images_and_sounds_are_left_out(
    tmp_path: Path, name: str, family: str, others: tuple[str, ...]
) -> None:
    made = RECORDED[name](tmp_path / "m")
    expected = convert(made.write(), tmp_path / "m.gguf").read_bytes()
    made.config = {"architectures": [f"{family}ForConditionalGeneration"], "text_config": made.config}
    made.tensors = {
        tensor.replace("model.", "model.language_model.", 1): array for tensor, array in made.tensors.items()
    }
    made.add({f"model.{tensor}.weight": (8,) for tensor in others})
    assert convert(made.write(), tmp_path / "m.gguf").read_bytes() == expected


def test_a_folder_of_exaone4_says_which_layers_have_a_window(tmp_path: Path) -> None:
    settings = {"sliding_window": 9, "sliding_window_pattern": 2, "layer_types": None}
    made = folder(tmp_path / "m", "exaone4", **settings)
    fields, _ = read(convert(made.write(), tmp_path / "m.gguf"))
    assert fields["exaone4.attention.sliding_window_pattern"] == 2
    made.config["layer_types"] = [FULL, WINDOW]
    fields, _ = read(convert(made.write(), tmp_path / "other.gguf"))
    assert fields["exaone4.attention.sliding_window_pattern"] == [False, True]


def test_names_of_gpt2_may_lack_their_prefix_and_have_masks(tmp_path: Path) -> None:
    """The published folder lacks the prefix and has masks."""
    made = RECORDED["gpt2"](tmp_path / "m")
    expected = read(convert(made.write(), tmp_path / "m.gguf"))[1]
    made.tensors = {name.removeprefix("transformer."): tensor for name, tensor in made.tensors.items()}
    made.add({"h.0.attn.bias": (1, 1, 40, 40), "h.0.attn.masked_bias": (1,)})
    made.tensors["lm_head.weight"] = made.tensors["wte.weight"].copy()
    tensors = read(convert(made.write(), tmp_path / "other.gguf"))[1]
    np.testing.assert_array_equal(tensors.pop("output.weight"), tensors["token_embd.weight"])
    assert_same_tensors(tensors, expected)


@pytest.mark.parametrize("name", ["qwen35", "qwen35, images"])
def test_the_text_part_of_qwen35_is_written(tmp_path: Path, name: str) -> None:
    made = RECORDED[name](tmp_path / "m").add({"mtp.norm.weight": (DIM,)})
    fields, tensors = read(convert(made.write(), tmp_path / "m.gguf"))
    assert fields["qwen35.rope.dimension_sections"] == [2, 1, 1, 0]
    assert fields["tokenizer.ggml.pre"] == "qwen35"
    assert not any(name.startswith(("v.", "mtp")) for name in tensors)


def test_layers_of_qwen35_without_a_period_are_listed(tmp_path: Path) -> None:
    made = folder(tmp_path / "m", "qwen35", layer_types=[FULL, "linear_attention"])
    made.tensors = {
        re.sub(r"layers\.(\d)", lambda layer: f"layers.{1 - int(layer[1])}", name): values
        for name, values in made.tensors.items()
    }
    path = convert(made.write(), tmp_path / "m.gguf")
    assert list(read(path)[0]["qwen35.attention.recurrent_layers"]) == [False, True]
    with Model(path, device="cpu") as model:
        assert model.config.layer_kinds == ("attention", "gated_delta")


def test_granite_4_writes_gate_and_up_as_two_tensors(tmp_path: Path) -> None:
    made = RECORDED["granite_hybrid"](tmp_path / "m")
    path = convert(made.write(), tmp_path / "m.gguf", tensor_type="Q8_0")
    kinds = types_of(path)
    assert kinds["blk.0.ffn_gate.weight"] == kinds["blk.1.ffn_up.weight"] == "Q8_0"
    fields, tensors = read(path)
    assert fields["granitehybrid.rope.scaling.finetuned"] is False
    assert tensors["blk.0.ssm_norm.weight"].shape == (1, 64)


@pytest.mark.parametrize("save", ["whole", "bfloat16", "shards"])
def test_parts_of_a_tensor_are_read_from_any_file(tmp_path: Path, save: str) -> None:
    made = RECORDED["granite_hybrid"](tmp_path / "m")
    path = made.write(shards=3 if save == "shards" else 1)
    in_one = made.tensors["model.layers.0.shared_mlp.input_linear.weight"]
    if save == "bfloat16":
        save_bfloat16(made.tensors, path / "model.safetensors")
        in_one = (in_one.view(np.uint32) >> 16 << 16).view(np.float32)
    found = read(convert(path, tmp_path / "m.gguf"))[1]
    kind = "BF16" if save == "bfloat16" else "F32"
    assert types_of(tmp_path / "m.gguf")["blk.0.ffn_up.weight"] == kind
    assert np.array_equal(np.concatenate([found[f"blk.0.ffn_{n}.weight"] for n in ("gate", "up")]), in_one)


def test_granite_4_without_state_space_layers_is_a_granite_model(tmp_path: Path) -> None:
    made = RECORDED["granite_hybrid, attention with rotation"](tmp_path / "m")
    fields, _ = read(convert(made.write(), tmp_path / "m.gguf"))
    assert fields["general.architecture"] == "granite"


def test_the_file_of_gemma4_has_the_keys_and_tensors_of_llama_cpp(tmp_path: Path) -> None:
    made = RECORDED["gemma4"](tmp_path / "m")
    for name, tensor in list(made.tensors.items()):  # published folders have keys and values in all layers
        if name.startswith(f"model.layers.{KINDS.index(FULL)}.self_attn."):
            made.tensors.setdefault(name.replace("layers.1", "layers.4"), tensor)
    fields, tensors = read(convert(made.write(), tmp_path / "m.gguf"))
    assert {key.removeprefix("gemma4."): fields[key] for key in fields if key.startswith("gemma4.")} == {
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": FULL_HEAD,
        "attention.key_length_swa": WINDOW_HEAD,
        "attention.layer_norm_rms_epsilon": pytest.approx(1e-5),
        "attention.shared_kv_layers": 2,
        "attention.sliding_window": 9,
        "attention.sliding_window_pattern": [kind == WINDOW for kind in KINDS],
        "attention.value_length": FULL_HEAD,
        "attention.value_length_swa": WINDOW_HEAD,
        "block_count": 5,
        "context_length": CONTEXT,
        "embedding_length": 32,
        "embedding_length_per_layer_input": INPUT,
        "feed_forward_length": [FFN] * 3 + [2 * FFN] * 2,
        "final_logit_softcapping": 1.5,
        "rope.dimension_count": FULL_HEAD,
        "rope.dimension_count_swa": WINDOW_HEAD,
        "rope.freq_base": 1e6,
        "rope.freq_base_swa": 1e4,
    }
    rotated = np.repeat(np.array([1, 1e30], np.float32), [FULL_HEAD // 8, FULL_HEAD // 2 - FULL_HEAD // 8])
    np.testing.assert_array_equal(tensors["rope_freqs.weight"], rotated)
    assert "blk.2.attn_k.weight" in tensors
    assert not [name for name in tensors if name.startswith(("blk.4.attn_k", "blk.4.attn_v"))]
    assert tensors["per_layer_token_embd.weight"].shape == (304, 5 * INPUT)
    assert tensors["blk.0.layer_output_scale.weight"].shape == (1,)


def test_keys_of_layers_that_share_others_are_ignored_in_a_file(tmp_path: Path) -> None:
    """Files of llama.cpp have them, since published folders do."""
    path = convert(RECORDED["gemma4"](tmp_path / "m").write(), tmp_path / "m.gguf")
    parts = take_apart(path)
    for name, dims in {"attn_k": [32, 48], "attn_k_norm": [24]}.items():
        parts.tensors.append((f"blk.4.{name}.weight", dims, 0, len(parts.data)))
        parts.data += np.ones(dims, np.float32).tobytes()
    np.testing.assert_array_equal(logits_of(parts.write(tmp_path / "more.gguf")), logits_of(path))


def test_the_table_of_inputs_of_layers_stays_in_the_mapped_file(tmp_path: Path) -> None:
    path = convert(wider(tmp_path / "m", 8192).write(), tmp_path / "m.gguf")
    table = 304 * len(KINDS) * 8192 * 4
    with Model(path, device="cpu", chunk_tokens=1):
        pass  # loads what the package needs
    before = resident_bytes()
    with Model(path, device="cpu", chunk_tokens=1) as model:
        opened = resident_bytes() - before
        model.forward_prompt(IDS)
        used = resident_bytes() - before
    assert max(opened, used) < table / 2
