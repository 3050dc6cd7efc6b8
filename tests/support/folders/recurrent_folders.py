"""Small folders of decoders with recurrent layers and random weights."""

from pathlib import Path
from typing import Any

from support.folders.model_folders import (
    DIM,
    FFN,
    GATED,
    GROUPED,
    HEADS,
    KV,
    LAYERS,
    QWEN35_PATTERN,
    VOCAB,
    Folder,
    Shapes,
    repeated,
    tokenized,
    weights,
)

GRANITE = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.25,
    "logits_scaling": 8.0,
    "attention_multiplier": 0.3,
}


def lfm2(path: Path, **config: Any) -> Folder:
    """Make a folder of LFM2: a layer with a short convolution, then one with attention."""
    taps, width = 3, 96
    settings = {
        **GROUPED,
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "intermediate_size": 100,
        "block_multiple_of": 32,  # two thirds of 100 are 66, which become 96
        "norm_eps": 1e-5,
        "conv_L_cache": taps,
        "conv_bias": False,
        "rope_theta": 1000000.0,
        "layer_types": ["conv", "full_attention"],
        **config,
    }
    shapes = weights("model.", {"embed_tokens": (VOCAB, DIM), "embedding_norm": (DIM,)})
    conv = {"conv": (DIM, 1, taps), "in_proj": (3 * DIM, DIM), "out_proj": (DIM, DIM)}
    shapes |= weights("model.layers.0.conv.", conv)
    projections: Shapes = {f"{name}_proj": (KV if name in "kv" else DIM, DIM) for name in "qkv"}
    projections |= {"out_proj": (DIM, DIM), **{f"{name}_layernorm": (DIM // HEADS,) for name in "qk"}}
    shapes |= weights("model.layers.1.self_attn.", projections)
    layer = weights("", {"operator_norm": (DIM,), "ffn_norm": (DIM,)})
    layer |= weights("feed_forward.", {"w1": (width, DIM), "w2": (DIM, width), "w3": (width, DIM)})
    return tokenized(path, settings, shapes | repeated("model.layers.{}.", layer))


def qwen35(path: Path, architecture: str = "Qwen3_5ForCausalLM", width: int = 6, **config: Any) -> Folder:
    """Make a folder of Qwen3.5: a layer with a gated delta rule, then one with attention.

    `width` is that of values of the delta rule. As ``Qwen3_5ForConditionalGeneration`` it has parts for
    images and for multi-token prediction.
    """
    heads, groups, key_width, head_dim = 4, 2, 8, 16
    channels = 2 * groups * key_width + heads * width
    text = {
        **GROUPED,
        "model_type": "qwen3_5_text",
        "head_dim": head_dim,
        "rms_norm_eps": 1e-6,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": key_width,
        "linear_value_head_dim": width,
        "linear_num_key_heads": groups,
        "linear_num_value_heads": heads,
        "layer_types": ["linear_attention", "full_attention"],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
        },
        **config,
    }
    shapes = weights("", {"embed_tokens": (VOCAB, DIM), "norm": (DIM,)})
    inputs = {"qkv": channels, "z": heads * width, "a": heads, "b": heads}
    at = "layers.0.linear_attn."
    shapes |= weights(at, {f"in_proj_{name}": (rows, DIM) for name, rows in inputs.items()})
    shapes |= {f"{at}conv1d.weight": (channels, 1, 4), f"{at}A_log": (heads,), f"{at}dt_bias": (heads,)}
    shapes |= weights(at, {"norm": (width,), "out_proj": (DIM, heads * width)})
    shapes |= {f"layers.1.{name}": shape for name, shape in attention(head_dim).items()}
    shapes["layers.1.self_attn.q_proj.weight"] = (2 * HEADS * head_dim, DIM)  # and its gate
    shapes |= weights("layers.1.self_attn.", {"q_norm": (head_dim,), "k_norm": (head_dim,)})
    layer = weights("", dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (DIM,)))
    layer |= weights("mlp.", {f"{name}_proj": shape for name, shape in GATED.items()})
    settings = {"architectures": [architecture], **text}
    shapes = {f"model.{name}": shape for name, shape in shapes.items()} | repeated("model.layers.{}.", layer)
    if architecture.endswith("ConditionalGeneration"):
        settings = {"architectures": [architecture], "model_type": "qwen3_5", "text_config": text}
        shapes = {name.replace("model.", "model.language_model."): shape for name, shape in shapes.items()}
        shapes |= {"model.visual.patch_embed.proj.weight": (DIM, 3, 2, 4, 4), "mtp.norm.weight": (DIM,)}
    return tokenized(path, settings, shapes, QWEN35_PATTERN)


def _scan(heads: int, width: int, state: int, groups: int, name: str) -> Shapes:
    """Return the shapes of the tensors of a state-space layer."""
    inner, channels = heads * width, heads * width + 2 * groups * state
    return {
        f"{name}.in_proj.weight": (inner + channels + heads, DIM),
        f"{name}.conv1d.weight": (channels, 1, 4),
        f"{name}.conv1d.bias": (channels,),
        f"{name}.A_log": (heads,),
        f"{name}.D": (heads,),
        f"{name}.dt_bias": (heads,),
        f"{name}.norm.weight": (inner,),
        f"{name}.out_proj.weight": (DIM, inner),
    }


def attention(head_dim: int) -> Shapes:
    """Return the shapes of attention with two key-value heads for four heads."""
    q, kv = HEADS * head_dim, HEADS // 2 * head_dim
    shapes = {"q": (q, DIM), "k": (kv, DIM), "v": (kv, DIM), "o": (DIM, q)}
    return weights("self_attn.", {f"{name}_proj": shape for name, shape in shapes.items()})


def granite_hybrid(path: Path, **config: Any) -> Folder:
    """Make a folder of Granite 4: a state-space layer, then one with attention.

    Gate and up are one matrix.
    """
    settings = {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        **GROUPED,
        "model_type": "granitemoehybrid",
        "shared_intermediate_size": FFN,
        "num_local_experts": 0,
        "rms_norm_eps": 1e-5,
        "layer_types": ["mamba", "attention"],
        "position_embedding_type": "nope",
        **GRANITE,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        **config,
    }
    mixers = [_scan(4, 16, 8, 1, "mamba"), attention(DIM // HEADS)]
    if settings["layer_types"] == ["attention", "attention"]:
        mixers[0] = mixers[1]
    shapes = {"model.embed_tokens.weight": (VOCAB, DIM), "model.norm.weight": (DIM,)}
    for i, mixer in enumerate(mixers):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in mixer.items()}
    common = weights("", dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (DIM,)))
    common |= weights("shared_mlp.", {"input_linear": (2 * FFN, DIM), "output_linear": (DIM, FFN)})
    return tokenized(path, settings, shapes | repeated("model.layers.{}.", common))


def mamba2(path: Path, **config: Any) -> Folder:
    """Make a folder of Mamba-2, with two groups of heads."""
    settings = {
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        "vocab_size": VOCAB,
        "hidden_size": DIM,
        "num_hidden_layers": LAYERS,
        "num_heads": 4,
        "head_dim": 16,
        "state_size": 8,
        "n_groups": 2,
        "conv_kernel": 4,
        "expand": 2,
        "layer_norm_epsilon": 1e-5,
        "time_step_limit": [0.0, float("inf")],
        **config,
    }
    layer = {"norm.weight": (DIM,), **_scan(4, 16, 8, 2, "mixer")}
    shapes = {"backbone.embeddings.weight": (VOCAB, DIM), "backbone.norm_f.weight": (DIM,)}
    return tokenized(path, settings, shapes | repeated("backbone.layers.{}.", layer))


def falcon_h1(path: Path, **config: Any) -> Folder:
    """Make a folder of Falcon-H1, whose layers have attention and a state-space part."""
    settings = {
        "architectures": ["FalconH1ForCausalLM"],
        **GROUPED,
        "model_type": "falcon_h1",
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "mamba_d_ssm": 48,
        "mamba_n_heads": 4,
        "mamba_d_head": 12,
        "mamba_d_state": 8,
        "mamba_n_groups": 2,
        "mamba_d_conv": 4,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
        "embedding_multiplier": 2.0,
        "lm_head_multiplier": 0.5,
        "mlp_multipliers": [0.5, 2.0],
        "key_multiplier": 0.25,
        "attention_in_multiplier": 2.0,
        "attention_out_multiplier": 0.75,
        "ssm_multipliers": [0.5, 2.0, 4.0, 0.25, 0.125],
        "ssm_in_multiplier": 0.6,
        "ssm_out_multiplier": 4.0,
        **config,
    }
    layer = weights("", {"input_layernorm": (DIM,), "pre_ff_layernorm": (DIM,)})
    layer |= weights("feed_forward.", {f"{name}_proj": GATED[name] for name in ("gate", "up", "down")})
    layer |= attention(16) | _scan(4, 12, 8, 2, "mamba")
    shapes = {"model.embed_tokens.weight": (VOCAB, DIM), "model.final_layernorm.weight": (DIM,)}
    return tokenized(
        path, settings, {**shapes, **repeated("model.layers.{}.", layer), "lm_head.weight": (VOCAB, DIM)}
    )
