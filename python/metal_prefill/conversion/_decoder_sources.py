"""Rows of decoders' classes."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from metal_prefill.conversion import _recurrent, _rotation, _settings
from metal_prefill.conversion._encoder_sources import ENCODERS
from metal_prefill.conversion._folder import Fields
from metal_prefill.conversion._source import (
    DECODER,
    LARGER_EPSILON,
    LAYERS,
    SHAPE,
    UNUSED,
    Key,
    More,
    Source,
    experts_of,
    head_width,
    never,
    stated,
)

JINA_V5 = "JinaEmbeddingsV5"  # family of two backbones, a decoder and an encoder

_OF_DECODERS = {
    "causal": {"lm_head": "output"},
    "sequence": {"score": "cls.output"},
    "tokens": {"score": "cls.output"},
}
_ROTATED_WITH_LAYER_NORM = {
    **SHAPE,
    **{key: name for key, name in DECODER.items() if key != "attention.layer_norm_rms_epsilon"},
    "attention.layer_norm_epsilon": stated("layer_norm_eps", default=1e-5),
}
# Masks that old files of GPT-2 and GPT-NeoX contain.
_MASKS = (r".*\.(attn|attention)\.(masked_)?bias",)
_GPT2 = Source(
    "gpt2",
    added_prefix="transformer.",
    keys={
        **{key: name for key, name in SHAPE.items() if key != "feed_forward_length"},
        "attention.layer_norm_epsilon": stated("layer_norm_epsilon", default=1e-5),
    },
    accepted={
        "scale_attn_weights": (True,),
        **never("scale_attn_by_inverse_layer_idx", "add_cross_attention"),
    },
    heads=_OF_DECODERS,
    unused=(*UNUSED, *_MASKS),
    changes={r"blk\.\d+\.(attn_qkv|attn_output|ffn_up|ffn_down)\.weight": _settings.transposed},
    more=(_settings.gpt2,),
)
_GPT_NEOX = Source(
    "gptneox",
    added_prefix="gpt_neox.",
    keys={
        **_ROTATED_WITH_LAYER_NORM,
        "rope.freq_base": stated("rotary_emb_base", "rope_theta", default=10000.0),
    },
    accepted={"attention_bias": (True,)},
    heads={**_OF_DECODERS, "causal": {"embed_out": "output", "lm_head": "output"}},
    unused=(*UNUSED, *_MASKS),
    changes={r".*\.attn_qkv\..*": _rotation.heads_last},
    more=(
        partial(_rotation.rotated_part, name="rotary_pct", default=0.25),
        _rotation.rope_scaling,
        {
            "hidden_activation": stated("hidden_act", default="gelu"),
            "use_parallel_residual": stated("use_parallel_residual", default=True),
        },
    ),
)
_LLAMA = Source(
    "llama",
    added_prefix="model.",
    keys=SHAPE | DECODER,
    biases={r"blk\.\d+\.attn_(q|k|v|output)": "attention_bias", r"blk\.\d+\.ffn_(gate|up|down)": "mlp_bias"},
    accepted={"hidden_act": ("silu",)},
    heads=_OF_DECODERS,
    changes={r"blk\.\d+\.attn_[qk]\.(weight|bias)": _rotation.interleaved},
    more=(_rotation.rope_scaling_or_factors,),
    computed=_rotation.rope_factors,
)
_INTERLEAVED = _LLAMA.changes


def _llama_like(
    architecture: str, more: tuple[More, ...], keys: Mapping[str, Key] = {}, **other: Any
) -> Source:
    """Return the row for a class with Llama's tensors, but without its order of rows and its factors."""
    other = {"changes": {}, "computed": lambda config: {}, **other}
    return replace(_LLAMA, architecture=architecture, more=more, keys={**_LLAMA.keys, **keys}, **other)


_QWEN = replace(_LLAMA, changes={}, more=(_settings.qwen,))
_MINISTRAL3 = _llama_like(
    "mistral3",
    (_settings.ministral3,),
    prefixes=("model.language_model.", "language_model.model.", "language_model."),
    biases={},
    changes=_INTERLEAVED,
    unused=(*UNUSED, r"(model\.)?(vision_tower|multi_modal_projector)\..*"),
    text_part="text_config",
)
# Whether the factors of a token's experts are divided by their sum, after the rotation.
_ROUTED = (_rotation.rope_scaling, {"expert_weights_norm": stated("norm_topk_prob", default=False)})
# Gate and up of each expert of Granite are one matrix.
_GRANITE_EXPERTS = {
    "block_sparse_moe.input_linear": ("mlp.experts.gate_proj", "mlp.experts.up_proj"),
    "block_sparse_moe.output_linear": ("mlp.experts.down_proj",),
    "shared_mlp.input_linear": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    "shared_mlp.output_linear": ("mlp.shared_expert.down_proj",),
}
# Factors of embeddings, additions to the residual stream, logits and scores.
_GRANITE_SCALES = {
    "embedding_scale": stated("embedding_multiplier", default=1.0),
    "residual_scale": stated("residual_multiplier", default=1.0),
    "logit_scale": stated("logits_scaling", default=1.0),
    "attention.scale": stated("attention_multiplier", default=1.0),
}
# Fields of Gemma.
_KV_HEADS = {"attention.head_count_kv": stated("num_key_value_heads")}
_TANH_GELU = {"hidden_activation": ("gelu_pytorch_tanh",)}
_GEMMA3 = _llama_like(
    "gemma3",
    (_settings.gemma3,),
    _KV_HEADS,
    accepted={**_TANH_GELU, "attn_logit_softcapping": (None,), "final_logit_softcapping": (None,)},
    changes={r".*norm\.weight": _settings.plus_one},
)
# Of a state-space layer.
_SCAN_CHANGES = {
    r".*\.ssm_a": _recurrent.rates_of_decay,
    r".*\.ssm_[ad]": _recurrent.column,
    r".*\.ssm_norm\.weight": _recurrent.groups,
}
_MAMBA = {
    "ssm.conv_kernel": stated("mamba_d_conv", default=4),
    "ssm.state_size": stated("mamba_d_state", default=256),
    "ssm.group_count": stated("mamba_n_groups", default=1),
    "ssm.time_step_rank": stated("mamba_n_heads", default=128),
}

_GRANITE_HYBRID = Source(
    "granitehybrid",
    added_prefix="model.",
    keys={
        **SHAPE,
        **_MAMBA,
        "feed_forward_length": stated("shared_intermediate_size", default=1024),
        "attention.layer_norm_rms_epsilon": stated("rms_norm_eps", default=1e-6),
        "rope.freq_base": stated("rope_theta", default=10000.0),
        **_GRANITE_SCALES,
    },
    accepted={"hidden_act": ("silu",), "mamba_proj_bias": (False,)},
    heads={"causal": {"lm_head": "output"}},
    parts={
        "shared_mlp.input_linear": ("mlp.gate_proj", "mlp.up_proj"),
        "shared_mlp.output_linear": ("mlp.down_proj",),
    },
    changes={**_INTERLEAVED, **_SCAN_CHANGES},
    more=(_recurrent.granite_hybrid,),
)
_GRANITE_HYBRID_EXPERTS = replace(
    _GRANITE_HYBRID,
    keys={
        **_GRANITE_HYBRID.keys,
        **experts_of(8, 2),
        "feed_forward_length": SHAPE["feed_forward_length"],
        "expert_shared_feed_forward_length": stated("shared_intermediate_size", default=1024),
    },
    parts=_GRANITE_EXPERTS,
)


def _granite_hybrid(config: Fields) -> Source | None:
    """Return the row for a folder with experts, or without state-space layers."""
    has_experts = config.integer("num_local_experts", default=8, least=0) > 0
    source = _GRANITE_HYBRID_EXPERTS if has_experts else _GRANITE_HYBRID
    if all(_recurrent.granite_attends(config)) and _recurrent.granite_rotates(config):
        return replace(source, architecture="granitemoe" if has_experts else "granite")
    return source


_GRANITE_MOE = _llama_like(
    "granitemoe",
    (_settings.granite_moe,),
    {**_GRANITE_SCALES, **experts_of(8, 2)},
    parts=_GRANITE_EXPERTS,
    changes=_INTERLEAVED,
)
_LFM2 = Source(
    "lfm2",
    added_prefix="model.",
    keys={
        **{key: name for key, name in SHAPE.items() if key != "feed_forward_length"},
        "attention.layer_norm_rms_epsilon": stated("norm_eps", "block_norm_eps", default=1e-5),
        "rope.freq_base": stated("rope_theta", default=1000000.0),
        "shortconv.l_cache": stated("conv_L_cache", default=3),
    },
    accepted={"conv_bias": (False,)},
    heads={"causal": {"lm_head": "output"}},
    more=(_recurrent.lfm2,),
)

DECODERS: dict[str, Source] = {
    "GPT2": _GPT2,
    "GPTNeoX": _GPT_NEOX,
    "Starcoder2": Source(
        "starcoder2",
        added_prefix="model.",
        keys={
            **_ROTATED_WITH_LAYER_NORM,
            "attention.layer_norm_epsilon": stated("norm_epsilon", default=1e-5),
        },
        accepted={"use_bias": (True,)},
        heads=_OF_DECODERS,
        more=(
            _rotation.rope_scaling,
            _settings.stated_window,
            {"hidden_activation": stated("hidden_act", default="gelu_pytorch_tanh")},
        ),
    ),
    "Phi": Source(
        "phi2",
        added_prefix="model.",
        keys=_ROTATED_WITH_LAYER_NORM,
        accepted={"qk_layernorm": (False,)},
        heads=_OF_DECODERS,
        more=(
            partial(_rotation.rotated_part, default=0.5),
            _rotation.rope_scaling,
            {"hidden_activation": stated("hidden_act", default="gelu_new")},
        ),
    ),
    "StableLm": Source(
        "stablelm",
        added_prefix="model.",
        keys=_ROTATED_WITH_LAYER_NORM,
        biases={r"blk\.\d+\.attn_(q|k|v)": "use_qkv_bias"},
        accepted={"hidden_act": ("silu",), **never("qk_layernorm", "use_parallel_residual")},
        heads=_OF_DECODERS,
        more=(partial(_rotation.rotated_part, default=0.25), _rotation.rope_scaling),
    ),
    "Cohere2": Source(
        "cohere2",
        added_prefix="model.",
        keys={
            **_ROTATED_WITH_LAYER_NORM,
            "attention.sliding_window": stated("sliding_window", default=4096),
            "logit_scale": stated("logit_scale", default=0.0625),
        },
        accepted={"hidden_act": ("silu",), "attention_bias": (False,)},
        heads=_OF_DECODERS,
        more=(_rotation.rope_scaling, partial(_settings.layers_with_window, usual_period=4)),
    ),
    "Llama": _LLAMA,
    "Mistral": replace(_LLAMA, more=(_rotation.rope_scaling_or_factors, _settings.window)),
    "Qwen2": replace(_QWEN, architecture="qwen2", biases={}),  # attention always has biases
    "Qwen3": replace(_QWEN, architecture="qwen3"),
    JINA_V5: replace(
        _QWEN,
        architecture="qwen3",
        variant=lambda config: (None if config.boolean("is_decoder", default=True) else ENCODERS["EuroBert"]),
    ),
    "PPLXQwen3": replace(_QWEN, architecture="qwen3", constants={"attention.causal": False}),
    "Qwen3Moe": _llama_like(
        "qwen3moe",
        _ROUTED,
        experts_of(128, 8) | {"expert_feed_forward_length": stated("moe_intermediate_size", default=768)},
        accepted={
            "hidden_act": ("silu",),
            "use_sliding_window": (False,),
            "decoder_sparse_step": (1,),
            "mlp_only_layers": ([],),
        },
    ),
    "Olmoe": _llama_like(
        "olmoe",
        _ROUTED,
        LARGER_EPSILON | experts_of(64, 8),
        accepted={"hidden_act": ("silu",), "clip_qkv": (None,)},
    ),
    "Qwen3VL": replace(
        _QWEN,
        architecture="qwen3",
        prefixes=("model.language_model.",),
        unused=(*UNUSED, r"model\.visual\..*"),
        text_part="text_config",
    ),
    **dict.fromkeys(("Mistral3", "Ministral3"), _MINISTRAL3),
    "MiniCPM": _llama_like(
        "minicpm", (_settings.minicpm,), changes=_INTERLEAVED, computed=_rotation.long_rope_factors
    ),
    "SmolLM3": _llama_like(
        "smollm3",
        (_rotation.smollm3,),
        {"rope.freq_base": stated("rope_theta", default=2000000.0)},
        accepted={"hidden_act": ("silu",), "use_sliding_window": (False,)},
        changes=_INTERLEAVED,
    ),
    "Granite": _llama_like("granite", (_rotation.rope_scaling,), _GRANITE_SCALES, changes=_INTERLEAVED),
    **dict.fromkeys(("GraniteMoe", "GraniteMoeShared"), _GRANITE_MOE),
    "Olmo2": _llama_like("olmo2", (_rotation.rope_scaling,), LARGER_EPSILON),
    "Olmo3": _llama_like("olmo2", (_settings.olmo3,), LARGER_EPSILON),
    "Phi3": _llama_like(
        "phi3",
        (_rotation.phi3,),
        {**LARGER_EPSILON, "attention.sliding_window": stated("sliding_window", default=0)},
        biases={},
        computed=_rotation.long_rope_factors,
    ),
    "Exaone4": _llama_like(
        "exaone4", (_settings.exaone4,), LARGER_EPSILON, biases={}, computed=_rotation.rope_factors
    ),
    "HunYuanDenseV1": _llama_like("hunyuan-dense", (_rotation.hunyuan_dense,), LARGER_EPSILON),
    "Ernie4_5": _llama_like(  # the values of its rotated pairs are next to each other
        "ernie4_5",
        (_rotation.rope_scaling,),
        {
            **LARGER_EPSILON,
            "rope.freq_base": stated("rope_theta", default=500000.0),
            **head_width(stated("head_dim", default=128)),
        },
        biases={r"blk\.\d+\.(attn|ffn)_.*": "use_bias"},
    ),
    "Lfm2": _LFM2,
    "Lfm2Moe": replace(
        _LFM2,
        architecture="lfm2moe",
        keys={
            **_LFM2.keys,
            **experts_of(32, 4),
            "expert_feed_forward_length": stated("moe_intermediate_size", default=1792),
        },
        accepted={"conv_bias": (False,), "use_expert_bias": (True,)},
        parts={
            f"feed_forward.experts.{name}": (f"mlp.experts.{part}_proj",)
            for name, part in {"w1": "gate", "w2": "down", "w3": "up"}.items()
        },
        more=(_recurrent.lfm2_moe,),
    ),
    "Gemma2": _llama_like(
        "gemma2",
        (_settings.gemma2,),
        _KV_HEADS,
        accepted={**_TANH_GELU, "use_bidirectional_attention": (None, False)},
        changes={r".*norm\.weight": _settings.plus_one},
    ),
    **dict.fromkeys(("Gemma3", "Gemma3Text"), _GEMMA3),
    "Gemma4": replace(
        _LLAMA,
        architecture="gemma4",
        prefixes=("model.language_model.",),
        keys={
            key: name
            for key, name in {**_LLAMA.keys, **_KV_HEADS}.items()
            if key not in ("rope.freq_base", "attention.key_length", "attention.value_length")
        },
        biases={},
        accepted={
            **_TANH_GELU,
            **never("attention_bias", "attention_k_eq_v", "enable_moe_block"),
            "use_bidirectional_attention": (None, "vision"),
        },
        unused=(*UNUSED, r"model\.(vision_tower|audio_tower|embed_vision|embed_audio)\..*"),
        changes={},
        more=(_settings.gemma4,),
        computed=_settings.gemma4_rope_factors,
        combined=_settings.without_unused_keys,
        text_part="text_config",
    ),
    "Qwen3_5": Source(
        "qwen35",
        prefixes=("model.language_model.",),
        added_prefix="model.",
        keys={
            **SHAPE,
            **DECODER,
            **head_width(stated("head_dim", default=256)),
            "ssm.conv_kernel": stated("linear_conv_kernel_dim", default=4),
            "ssm.state_size": stated("linear_key_head_dim", default=128),
            "ssm.group_count": stated("linear_num_key_heads", default=16),
            "ssm.time_step_rank": stated("linear_num_value_heads", default=32),
        },
        accepted={"hidden_act": ("silu",), "attention_bias": (False,), "attn_output_gate": (True,)},
        heads={"causal": {"lm_head": "output"}},
        unused=(*UNUSED, r"model\.visual\..*", r"mtp\..*"),
        changes={
            r".*(?<!ssm_)norm\.weight": _settings.plus_one,
            r".*\.ssm_a": _recurrent.rates_of_decay,
            r".*\.(ssm_.*|attn_qkv\.weight|attn_gate\.weight)": _recurrent.value_heads_by_turns,
        },
        more=(_recurrent.qwen35,),
        text_part="text_config",
    ),
    "GraniteMoeHybrid": replace(_GRANITE_HYBRID, variant=_granite_hybrid),
    "Mamba2": Source(
        "mamba2",
        added_prefix="backbone.",
        keys={
            "embedding_length": stated("hidden_size"),
            "block_count": LAYERS,
            "attention.layer_norm_rms_epsilon": stated("layer_norm_epsilon", default=1e-5),
            "ssm.conv_kernel": stated("conv_kernel", default=4),
            "ssm.state_size": stated("state_size", default=128),
            "ssm.group_count": stated("n_groups", default=8),
            "ssm.time_step_rank": stated("num_heads", default=128),
        },
        constants={"context_length": 1 << 20, "feed_forward_length": 0, "attention.head_count": 0},
        accepted={"hidden_act": ("silu",), "use_bias": (False,)},
        heads={"causal": {"lm_head": "output"}},
        changes=_SCAN_CHANGES,
        more=(_recurrent.mamba2,),
    ),
    "FalconH1": Source(
        "falcon-h1",
        added_prefix="model.",
        keys={**SHAPE, **DECODER, **LARGER_EPSILON, **_MAMBA},
        accepted={
            "hidden_act": ("silu",),
            **never("attention_bias", "mlp_bias", "projectors_bias", "mamba_proj_bias"),
        },
        heads={"causal": {"lm_head": "output"}},
        changes={**_SCAN_CHANGES, r".*\.weight": _recurrent.multiplied},
        more=(_recurrent.falcon_h1,),
    ),
}
