"""Small folders of decoders that differ from Llama in a few steps, with random weights."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from support.model_folders import CONTEXT, DIM, HEADS, KV, LAYERS, Folder, llama, values

HEAD = DIM // HEADS


def smollm3(path: Path, **config: Any) -> Folder:
    """Make a folder of SmolLM3: the fourth of five layers does not rotate."""
    return llama(
        path, "SmolLM3ForCausalLM", model_type="smollm3", pad_token_id=0, **{"num_hidden_layers": 5, **config}
    )


def granite(path: Path, **config: Any) -> Folder:
    """Make a folder of Granite 3, with factors of embeddings, additions, logits and scores."""
    factors = {
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.25,
        "logits_scaling": 8.0,
        "attention_multiplier": 0.3,
    }
    return llama(path, "GraniteForCausalLM", model_type="granite", **{**factors, **config})


def with_head_norms(folder: Folder, q: tuple[str, int], k: tuple[str, int]) -> Folder:
    """Add norms of q and of k, by name and width."""
    for layer in range(folder.config["num_hidden_layers"]):
        for i, (name, width) in enumerate((q, k)):
            norm = f"model.layers.{layer}.self_attn.{name}.weight"
            folder.tensors[norm] = values((width,), 100 + 2 * layer + i)
    return folder


def _with_norms_of_outputs(folder: Folder) -> Folder:
    """Norm the outputs of blocks instead of their inputs."""
    for layer in range(folder.config["num_hidden_layers"]):
        norm = folder.tensors.pop(f"model.layers.{layer}.input_layernorm.weight")
        folder.tensors[f"model.layers.{layer}.post_feedforward_layernorm.weight"] = norm
    return folder


def olmo2(path: Path, **config: Any) -> Folder:
    """Make a folder of OLMo 2, which norms outputs of blocks, and q and k of all heads together."""
    folder = llama(path, "Olmo2ForCausalLM", model_type="olmo2", pad_token_id=0, **config)
    return with_head_norms(_with_norms_of_outputs(folder), ("q_norm", DIM), ("k_norm", KV))


def olmo3(path: Path, **config: Any) -> Folder:
    """Make a folder of OLMo 3, whose layers with a window are not scaled."""
    yarn = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": CONTEXT // 4,
        "rope_theta": 5e5,
    }
    settings = {
        "num_hidden_layers": 5,
        "sliding_window": 9,
        "rope_parameters": {
            "full_attention": yarn,
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
        },
        **config,
    }
    folder = llama(path, "Olmo3ForCausalLM", model_type="olmo3", pad_token_id=0, **settings)
    return with_head_norms(_with_norms_of_outputs(folder), ("q_norm", DIM), ("k_norm", KV))


def exaone4(path: Path, **config: Any) -> Folder:
    """Make a folder of EXAONE 4, which norms outputs of blocks, and each head of q and k."""
    kinds = None if config.get("sliding_window") else ["full_attention"] * LAYERS
    settings = {"pad_token_id": 0, "sliding_window": None, "layer_types": kinds, **config}
    folder = llama(path, "Exaone4ForCausalLM", model_type="exaone4", **settings)
    return with_head_norms(_with_norms_of_outputs(folder), ("q_norm", HEAD), ("k_norm", HEAD))


def gemma2(path: Path, **config: Any) -> Folder:
    """Make a folder of Gemma 2, which norms inputs and outputs of blocks, and limits scores and logits."""
    settings = {
        "num_hidden_layers": 3,
        "sliding_window": 9,
        "head_dim": 16,
        "query_pre_attn_scalar": 9,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 1.5,
        "hidden_activation": "gelu_pytorch_tanh",
        "pad_token_id": 0,
        **config,
    }
    folder = llama(path, "Gemma2ForCausalLM", model_type="gemma2", **settings)
    del folder.tensors["lm_head.weight"]
    for layer in range(folder.config["num_hidden_layers"]):
        for i, (part, shape) in enumerate(
            {
                "self_attn.q_proj": (HEADS * 16, DIM),
                **dict.fromkeys(("self_attn.k_proj", "self_attn.v_proj"), (HEADS // 2 * 16, DIM)),
                "self_attn.o_proj": (DIM, HEADS * 16),
                **dict.fromkeys(("pre_feedforward_layernorm", "post_feedforward_layernorm"), (DIM,)),
            }.items()
        ):
            folder.tensors[f"model.layers.{layer}.{part}.weight"] = values(shape, 100 + 6 * layer + i)
    return folder


def hunyuan(path: Path, **config: Any) -> Folder:
    """Make a folder of Hunyuan, which norms each head of q and k after its rotation."""
    rope = {"type": "dynamic", "alpha": 50.0, "factor": 1.0}
    settings = {"pad_token_id": 0, "head_dim": HEAD, "rope_scaling": rope, **config}
    folder = llama(path, "HunYuanDenseV1ForCausalLM", model_type="hunyuan_v1_dense", **settings)
    return with_head_norms(folder, ("query_layernorm", HEAD), ("key_layernorm", HEAD))


def phi3(path: Path, **config: Any) -> Folder:
    """Make a folder of Phi-3: q, k and v are rows of one matrix, gate and up those of another."""
    folder = llama(path, "Phi3ForCausalLM", model_type="phi3", pad_token_id=0, **config)
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        for whole, parts in {
            "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
        }.items():
            rows = [folder.tensors.pop(f"{name}.{part}.weight") for part in parts]
            folder.tensors[f"{name}.{whole}.weight"] = np.concatenate(rows)
    return folder


def long_rope(dims: int) -> dict[str, Any]:
    """Return settings of LongRoPE for heads of which `dims` dimensions rotate."""
    pairs = range(1, dims // 2 + 1)
    return {
        "original_max_position_embeddings": CONTEXT // 2,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0 + 0.1 * i for i in pairs],
            "long_factor": [1.0 + 0.7 * i for i in pairs],
        },
    }


def ernie(path: Path, **config: Any) -> Folder:
    """Make a folder of ERNIE 4.5, whose rotated pairs are next to each other."""
    return llama(
        path, "Ernie4_5ForCausalLM", model_type="ernie4_5", **{"head_dim": HEAD, "use_bias": False, **config}
    )


def qwen(path: Path, name: str, **config: Any) -> Folder:
    """Make a folder of Qwen2 or Qwen3, whose upper layers have a window."""
    settings = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1, **config}
    folder = llama(path, f"{name}ForCausalLM", model_type=name.lower(), head_dim=HEAD, **settings)
    if name == "Qwen3":
        return with_head_norms(folder, ("q_norm", HEAD), ("k_norm", HEAD))
    for layer in range(LAYERS):
        for i, (part, width) in enumerate((("q", DIM), ("k", KV), ("v", KV))):
            bias = f"model.layers.{layer}.self_attn.{part}_proj.bias"
            folder.tensors[bias] = values((width,), 100 + 3 * layer + i)
    return folder


def mistral(path: Path, **config: Any) -> Folder:
    """Make a folder of Mistral, all of whose layers have a window."""
    return llama(path, "MistralForCausalLM", model_type="mistral", head_dim=HEAD, **config)


def with_text_part(folder: Folder, **config: Any) -> Folder:
    """Make the text model a part of one that also has a part for images."""
    text = {key: folder.config[key] for key in folder.config if key != "architectures"}
    folder.config = {"architectures": folder.config["architectures"], "text_config": text, **config}
    folder.tensors = {
        name.replace("model.", "model.language_model.", 1): tensor for name, tensor in folder.tensors.items()
    }
    return folder


def qwen3_vl(path: Path, **config: Any) -> Folder:
    """Make a folder of Qwen3-VL, whose rotated pairs have sections for positions in an image."""
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_interleaved": True, "mrope_section": [2, 1, 1]}
    settings = {"model_type": "qwen3_vl_text", "head_dim": HEAD, "pad_token_id": 0, **config}
    folder = llama(path, "Qwen3VLForConditionalGeneration", rope_parameters=rope, **settings)
    with_head_norms(folder, ("q_norm", HEAD), ("k_norm", HEAD))
    folder.tensors["lm_head.weight"] = values((304, DIM), 99)
    vision: dict[str, Any] = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": DIM,
    }
    vision |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 4}
    return with_text_part(folder, model_type="qwen3_vl", vision_config=vision, tie_word_embeddings=False)


def ministral3(path: Path, **config: Any) -> Folder:
    """Make a folder of the text part of Ministral 3, whose scores grow after the original context."""
    rope = {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 4.0,
        "original_max_position_embeddings": CONTEXT,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    }
    settings = {"head_dim": HEAD, "pad_token_id": 0, "max_position_embeddings": 4 * CONTEXT, **config}
    return llama(path, "Ministral3ForCausalLM", model_type="ministral3", rope_parameters=rope, **settings)


def minicpm(path: Path, **config: Any) -> Folder:
    """Make a folder of MiniCPM, with factors of embeddings, additions and logits."""
    factors = {"scale_emb": 12.0, "scale_depth": 0.5, "dim_model_base": 8}
    return llama(path, "MiniCPMForCausalLM", model_type="minicpm", **{**factors, **config})


RECORDED: dict[str, Callable[[Path], Folder]] = {
    "smollm3": smollm3,
    "granite": granite,
    "olmo2": olmo2,
    "olmo3": olmo3,
    "qwen3_vl": qwen3_vl,
    "ministral3": ministral3,
    "phi3": phi3,
    "phi3, part of heads rotates, window": partial(phi3, partial_rotary_factor=0.5, sliding_window=9),
    "phi3, LongRoPE": partial(phi3, **long_rope(HEAD)),
    "ernie4_5": ernie,
    "exaone4": exaone4,
    "exaone4, window": partial(exaone4, num_hidden_layers=5, sliding_window=9, sliding_window_pattern=4),
    "gemma2": gemma2,
    "gemma2, no limits": partial(
        gemma2,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
    ),
    "hunyuan": hunyuan,
    "mistral, window": partial(mistral, sliding_window=9),
    "qwen2, window": partial(qwen, name="Qwen2"),
    "qwen3, window": partial(qwen, name="Qwen3"),
    "granite, dynamic": partial(granite, rope_scaling={"type": "dynamic", "factor": 4.0}),
    "olmo2, YaRN of its context": partial(olmo2, rope_scaling={"rope_type": "yarn", "factor": 4.0}),
    "mistral, YaRN": partial(
        mistral,
        sliding_window=None,
        original_max_position_embeddings=CONTEXT // 4,
        rope_scaling={"rope_type": "yarn", "factor": 4.0},
    ),
}
