"""Small folders of decoders with random weights and logits recorded with transformers.

A folder is a configuration and the tensors that transformers saves for it, whose shapes are also recorded.
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from support.folders.model_folders import (
    CONTEXT,
    DIM,
    FFN,
    GROUPED,
    HEADS,
    QWEN35_PATTERN,
    VOCAB,
    Folder,
    filled,
    shapes_of,
    tokenized,
)
from support.places import DATA

RECORD = DATA / "transformers_folders.npz"
IDS = np.random.default_rng(7).integers(2, 300, 37).astype(np.int32)  # a prompt
ROWS = [0, 1, 7, 36]  # tokens of the prompt with recorded logits

HEAD = DIM // HEADS
WIDTH = 24  # of an expert
Config = Mapping[str, Any]


def _of(name: str, **settings: Any) -> Config:
    """Return the configuration of a class; sizes and special tokens are the same for all classes."""
    return {
        **GROUPED,
        "architectures": [f"{name}ForCausalLM"],
        "model_type": name.lower(),
        "rms_norm_eps": 1e-5,
        "bos_token_id": 0,
        "eos_token_id": [1, 0],
        "pad_token_id": 0,
        **settings,
    }


def _with_images(text: Config, **settings: Any) -> Config:
    """Return the configuration of a class with parts for images and for text."""
    name = text["architectures"][0].replace("ForCausalLM", "ForConditionalGeneration")
    vision: dict[str, Any] = dict.fromkeys(("hidden_size", "intermediate_size"), 16)
    vision |= {"depth": 1, "num_heads": 2, "out_hidden_size": DIM, "num_position_embeddings": 4}
    part = {key: text[key] for key in text if key != "architectures"}
    return {"architectures": [name], "text_config": part, "vision_config": {**vision, **settings}}


FULL, WINDOW = "full_attention", "sliding_attention"
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": CONTEXT // 2,
}
_PLAIN = {"rope_type": "default", "rope_theta": 5e5}
_YARN = {"rope_type": "yarn", "factor": 4.0}
_SHORT = {"original_max_position_embeddings": CONTEXT // 4}


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


GRANITE = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.25,
    "logits_scaling": 8.0,
    "attention_multiplier": 0.3,
}
_UPPER: Config = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
_LLAMA, _MISTRAL = _of("Llama", head_dim=HEAD), _of("Mistral", head_dim=HEAD)
_QWEN2, _QWEN3 = _of("Qwen2"), _of("Qwen3", head_dim=HEAD)
_GRANITE = _of("Granite", **GRANITE)
_PHI3, _STARCODER2, _OLMO2 = _of("Phi3"), _of("Starcoder2", tie_word_embeddings=False), _of("Olmo2")
_EXAONE4 = _of("Exaone4", sliding_window=None, layer_types=[FULL] * 2)
_GEMMA = {"head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 9}
_GEMMA2 = _of(  # scores and logits have limits
    "Gemma2", num_hidden_layers=3, attn_logit_softcapping=2.0, final_logit_softcapping=1.5, **_GEMMA
)
_GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "vocab_size": VOCAB,
    "n_embd": DIM,
    "n_layer": 2,
    "n_head": HEADS,
    "n_positions": CONTEXT,
    "n_inner": FFN,
}
_GPT_NEOX = _of("GPTNeoX", model_type="gpt_neox", num_key_value_heads=None, rotary_pct=0.25)
_STABLELM = _of("StableLm", use_qkv_bias=True)
_COHERE2 = _of(  # layers without a window do not rotate
    "Cohere2", num_hidden_layers=5, sliding_window=9, logit_scale=0.25, eos_token_id=1
)
_QWEN3_MOE = _of(
    "Qwen3Moe",
    model_type="qwen3_moe",
    num_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=WIDTH,
    norm_topk_prob=True,
    head_dim=HEAD,
)
_GRANITE_EXPERTS = {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": WIDTH}
_GRANITE_HYBRID = _of(  # a state-space layer, then one with attention
    "GraniteMoeHybrid",
    shared_intermediate_size=FFN,
    num_local_experts=0,
    layer_types=["mamba", "attention"],
    position_embedding_type="nope",
    mamba_n_heads=4,
    mamba_d_head=16,
    mamba_d_state=8,
    mamba_n_groups=1,
    mamba_d_conv=4,
    mamba_expand=2,
    tie_word_embeddings=True,
    **GRANITE,
)
_ROTATED = {"layer_types": ["attention", "attention"], "position_embedding_type": "rope"}
_LFM2 = _of(  # a layer with a short convolution, then one with attention
    "Lfm2",
    intermediate_size=100,
    block_multiple_of=32,  # two thirds of 100 are 66, which become 96
    norm_eps=1e-5,
    conv_L_cache=3,
    conv_bias=False,
    rope_theta=1000000.0,
    layer_types=["conv", FULL],
    tie_word_embeddings=True,
)
_QWEN35 = _of(  # a layer with a gated delta rule, then one with attention
    "Qwen3_5",
    model_type="qwen3_5_text",
    head_dim=16,
    rms_norm_eps=1e-6,
    linear_conv_kernel_dim=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    layer_types=["linear_attention", FULL],
    rope_parameters={**_PLAIN, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
    tie_word_embeddings=True,
)
# Gemma 4: layers differ in heads and feed-forwards, and the last layers attend to earlier layers' keys and
# values.
WINDOW_HEAD, FULL_HEAD, INPUT = 12, 24, 20
KINDS = [WINDOW, FULL, WINDOW, WINDOW, FULL]
_GEMMA4 = _of(
    "Gemma4",
    model_type="gemma4_text",
    num_hidden_layers=len(KINDS),
    layer_types=KINDS,
    sliding_window=9,
    head_dim=WINDOW_HEAD,
    global_head_dim=FULL_HEAD,
    num_kv_shared_layers=2,
    use_double_wide_mlp=True,
    hidden_size_per_layer_input=INPUT,
    vocab_size_per_layer_input=VOCAB,
    final_logit_softcapping=1.5,
)
CONFIGS: dict[str, Config] = {
    "lfm2": _LFM2,
    "qwen35": _QWEN35,
    "qwen35, keys and values of two widths": {**_QWEN35, "linear_value_head_dim": 6},
    "qwen35, images": _with_images(_QWEN35),
    "granite_hybrid": _GRANITE_HYBRID,
    "granite_hybrid, attention with rotation": {**_GRANITE_HYBRID, **_ROTATED},
    "mamba2": {  # with two groups of heads
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        "vocab_size": VOCAB,
        "hidden_size": DIM,
        "num_hidden_layers": 2,
        "num_heads": 4,
        "head_dim": 16,
        "state_size": 8,
        "n_groups": 2,
        "conv_kernel": 4,
        "expand": 2,
        "layer_norm_epsilon": 1e-5,
        "time_step_limit": [0.0, float("inf")],
        "tie_word_embeddings": True,
    },
    "falcon_h1": _of(  # layers have attention and a state-space part
        "FalconH1",
        model_type="falcon_h1",
        head_dim=16,
        rope_theta=1e6,
        mamba_d_ssm=48,
        mamba_n_heads=4,
        mamba_d_head=12,
        mamba_d_state=8,
        mamba_n_groups=2,
        mamba_d_conv=4,
        mamba_rms_norm=True,
        mamba_norm_before_gate=False,
        embedding_multiplier=2.0,
        lm_head_multiplier=0.5,
        mlp_multipliers=[0.5, 2.0],
        key_multiplier=0.25,
        attention_in_multiplier=2.0,
        attention_out_multiplier=0.75,
        ssm_multipliers=[0.5, 2.0, 4.0, 0.25, 0.125],
        ssm_in_multiplier=0.6,
        ssm_out_multiplier=4.0,
    ),
    "llama, linear": {**_LLAMA, "rope_scaling": {"rope_type": "linear", "factor": 4.0}, "rope_theta": 500.0},
    "llama, frequency factors": {**_LLAMA, "rope_scaling": _LLAMA3},
    "llama, biases": {**_LLAMA, "attention_bias": True, "mlp_bias": True, "rms_norm_eps": 0.01},
    "gemma3": _of(  # the sixth layer has no window, but another base, and is scaled
        "Gemma3",
        model_type="gemma3_text",
        num_hidden_layers=7,
        rope_parameters={
            FULL: {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0},
            WINDOW: {"rope_type": "default", "rope_theta": 1e4},
        },
        **_GEMMA,
    ),
    "qwen2": _QWEN2,
    "qwen3": _QWEN3,
    "smollm3": _of("SmolLM3", num_hidden_layers=5),  # the fourth of five layers does not rotate
    "granite": _GRANITE,
    "olmo2": _OLMO2,
    "olmo3": _of(  # layers with a window are not scaled
        "Olmo3",
        num_hidden_layers=5,
        sliding_window=9,
        rope_parameters={FULL: {**_PLAIN, **_YARN, **_SHORT}, WINDOW: _PLAIN},
    ),
    "qwen3_vl": _with_images(
        {
            **_QWEN3,
            "architectures": ["Qwen3VLForCausalLM"],
            "model_type": "qwen3_vl_text",
            "rope_parameters": {**_PLAIN, "mrope_interleaved": True, "mrope_section": [2, 1, 1]},
        },
        deepstack_visual_indexes=[0],
    ),
    "ministral3": _of(  # scores grow after the original context
        "Ministral3",
        head_dim=HEAD,
        max_position_embeddings=4 * CONTEXT,
        rope_parameters={
            **_YARN,
            "rope_theta": 1e6,
            "original_max_position_embeddings": CONTEXT,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    ),
    "phi3": _PHI3,
    "phi3, part of heads rotates, window": {**_PHI3, "partial_rotary_factor": 0.5, "sliding_window": 9},
    "phi3, LongRoPE": {**_PHI3, **long_rope(HEAD)},
    "phi3, LongRoPE of short texts": {
        **_PHI3,
        **long_rope(HEAD),
        "original_max_position_embeddings": CONTEXT,
    },
    "ernie4_5": _of("Ernie4_5", head_dim=HEAD, use_bias=False),
    "exaone4": _EXAONE4,
    "exaone4, window": {
        **_EXAONE4,
        "num_hidden_layers": 5,
        "layer_types": None,
        "sliding_window": 9,
        "sliding_window_pattern": 4,
    },
    "gemma2": _GEMMA2,
    "gemma2, no limits": {
        **_GEMMA2,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "layer_types": [FULL, WINDOW, WINDOW],
    },
    "hunyuan": _of(
        "HunYuanDenseV1",
        model_type="hunyuan_v1_dense",
        head_dim=HEAD,
        rope_scaling={"type": "dynamic", "alpha": 50.0, "factor": 1.0},
    ),
    "mistral, window": {**_MISTRAL, "sliding_window": 9},  # all layers
    "qwen2, window": {**_QWEN2, **_UPPER},
    "qwen3, window": {**_QWEN3, **_UPPER},
    "granite, dynamic": {**_GRANITE, "rope_scaling": {"type": "dynamic", "factor": 4.0}},
    "olmo2, YaRN of its context": {**_OLMO2, "rope_scaling": _YARN},
    "mistral, YaRN": {**_MISTRAL, "sliding_window": None, **_SHORT, "rope_scaling": _YARN},
    "gpt2": _GPT2,
    "gpt2, exact GELU, usual width": {**_GPT2, "activation_function": "gelu", "n_inner": None},
    "gpt_neox": _GPT_NEOX,
    "gpt_neox, blocks in sequence": {
        **_GPT_NEOX,
        "use_parallel_residual": False,
        "hidden_act": "gelu_fast",
        "rotary_pct": 1.0,
        "rotary_emb_base": 500,
    },
    "starcoder2": _STARCODER2,
    "starcoder2, window": {**_STARCODER2, "sliding_window": 9},
    "phi": _of("Phi"),
    "stablelm": _STABLELM,
    "stablelm, no biases": {**_STABLELM, "use_qkv_bias": False, "partial_rotary_factor": 0.5},
    "cohere2": _COHERE2,
    "cohere2, other layers": {**_COHERE2, "layer_types": [FULL, *[WINDOW] * 3, FULL]},
    "qwen3_moe": _QWEN3_MOE,
    "qwen3_moe, one of three": {
        **_QWEN3_MOE,
        "num_experts": 3,
        "num_experts_per_tok": 1,
        "norm_topk_prob": False,
    },
    "olmoe": _of("Olmoe", num_experts=64, num_experts_per_tok=8, intermediate_size=WIDTH),
    "granite_moe": _of("GraniteMoe", **_GRANITE_EXPERTS, **GRANITE),
    "granite_moe, shared": _of(
        "GraniteMoeShared", **_GRANITE_EXPERTS, **GRANITE, shared_intermediate_size=40
    ),
    "granite_hybrid, experts": {**_GRANITE_HYBRID, **_GRANITE_EXPERTS},
    "granite_hybrid, experts, attention with rotation": {**_GRANITE_HYBRID, **_GRANITE_EXPERTS, **_ROTATED},
    "lfm2_moe": {  # a dense layer, then one with experts, which a bias helps to choose
        **_LFM2,
        "architectures": ["Lfm2MoeForCausalLM"],
        "model_type": "lfm2_moe",
        "intermediate_size": 96,
        "moe_intermediate_size": WIDTH,
        "num_dense_layers": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.5,
    },
    "gemma4": _GEMMA4,
    "gemma4, equal feed-forwards, no limit": {
        **_GEMMA4,
        "use_double_wide_mlp": False,
        "final_logit_softcapping": None,
        "num_kv_shared_layers": 1,
    },
    "gemma4, nothing shared, no inputs": {
        **_GEMMA4,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "global_head_dim": WINDOW_HEAD,
    },
}
_DIFFERENCES = ("gemma2", "gemma3", "qwen35")  # their norms are stored as differences from 1


def folder(path: Path, name: str, **config: Any) -> Folder:
    """Make a folder of one of `CONFIGS` with changed fields."""
    pattern = QWEN35_PATTERN if name.startswith("qwen35") else None
    made = tokenized(path, {**deepcopy(dict(CONFIGS[name])), **config}, {}, pattern)
    made.tensors = filled(shapes_of(name), norm=0 if name.startswith(_DIFFERENCES) else 1)
    return made


def wider(path: Path, width: int) -> Folder:
    """Make a folder of Gemma 4 with wider inputs of layers."""
    made = folder(path, "gemma4", hidden_size_per_layer_input=width)
    sizes = {INPUT: width, len(KINDS) * INPUT: len(KINDS) * width}
    shapes = {name: tuple(sizes.get(n, n) for n in shape) for name, shape in shapes_of("gemma4").items()}
    made.tensors = filled(shapes)
    return made


RECORDED: dict[str, Callable[..., Folder]] = {name: partial(folder, name=name) for name in CONFIGS}
