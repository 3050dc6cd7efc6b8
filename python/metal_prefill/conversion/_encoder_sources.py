"""Rows of encoders' classes."""

from dataclasses import replace

from metal_prefill.conversion import _combined, _rotation, _settings
from metal_prefill.conversion._folder import MAX_LAYERS
from metal_prefill.conversion._source import (
    DECODER,
    LARGER_EPSILON,
    LAYER_NORM,
    SHAPE,
    UNUSED,
    Source,
    experts_of,
    head_width,
    never,
    stated,
)
from metal_prefill.files._architecture import ARCHITECTURES

_QKV = ("query", "key", "value")


def _heads(
    sequence: tuple[str, str],  # the layers of a classifier of texts
    masked: tuple[str, str, str],  # the dense layer, the norm and the output that predict masked tokens
) -> dict[str, dict[str, str]]:
    """Return the heads of a relative of BERT."""
    return {
        "sequence": dict(zip(sequence, ("cls", "cls.output"), strict=True)),
        "tokens": {"classifier": "cls.output"},
        "late": {"linear": "dense_2"},  # of each token, in Stanford's ColBERT
        "masked": dict(zip(masked, ("mlm", "mlm.norm", "mlm.output"), strict=True)),
    }


_BERT = Source(
    "bert",
    prefixes=("bert.",),
    keys=SHAPE | LAYER_NORM,
    more=(_settings.bert,),
    accepted={"position_embedding_type": ("absolute",), **never("is_decoder", "add_cross_attention")},
    heads=_heads(
        ("pooler.dense", "classifier"),
        ("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions"),
    ),
    # Folders that name this class, but have other positions.
    of_positions={"alibi": "JinaBert", "rotary": "JinaEmbeddingsV3"},
)
_OUT_PROJ = ("classifier.dense", "classifier.out_proj")
_ROBERTA = replace(
    _BERT,
    prefixes=("roberta.",),
    more=(_settings.roberta,),
    heads=_heads(_OUT_PROJ, ("lm_head.dense", "lm_head.layer_norm", "lm_head")),
    changes={r"position_embd\.weight": _settings.without_padding_positions},
)
_MPNET = replace(
    _ROBERTA,
    prefixes=("mpnet.",),
    accepted={"relative_attention_num_buckets": (32,)},
    names={"encoder.relative_attention_bias": "attn_rel_b"},
    parts={
        **{f"attention.attn.{i}": (f"attention.self.{name}",) for i, name in zip("qkv", _QKV, strict=True)},
        "attention.attn.o": ("attention.output.dense",),
        "attention.LayerNorm": ("attention.output.LayerNorm",),
    },
)
_DISTILBERT = replace(
    _BERT,
    prefixes=("distilbert.",),
    keys={
        "embedding_length": stated("dim"),
        "block_count": stated("n_layers", most=MAX_LAYERS),
        "feed_forward_length": stated("hidden_dim"),
        "attention.head_count": stated("n_heads"),
        "context_length": stated("max_position_embeddings", default=512),
    },
    constants={"attention.layer_norm_epsilon": 1e-12, "classifier.hidden_activation": "relu"},
    accepted={},
    heads=_heads(
        ("pre_classifier", "classifier"), ("vocab_transform", "vocab_layer_norm", "vocab_projector")
    ),
    unused=(*UNUSED, r"vocab_(transform|layer_norm|projector)\..*"),
)
_ELECTRA = replace(
    _BERT,
    prefixes=("electra.",),
    more=(_settings.activation,),
    constants={"classifier.hidden_activation": "gelu_erf"},
    names={"embeddings_project": "token_embd_proj"},
    heads=_heads(
        _OUT_PROJ, ("generator_predictions.dense", "generator_predictions.LayerNorm", "generator_lm_head")
    ),
    unused=(*UNUSED, r"(discriminator|generator)_predictions\..*", r"generator_lm_head\..*"),
)
# All layers share one set of weights.
_ALBERT = replace(
    _BERT,
    prefixes=("albert.",),
    accepted={**_BERT.accepted, "num_hidden_groups": (1,), "inner_group_num": (1,)},
    constants={"distinct_block_count": 1},
    names={
        "encoder.embedding_hidden_mapping_in": "token_embd_proj",
        **{
            f"encoder.albert_layer_groups.0.albert_layers.0.{module}": f"blk.0.{name}"
            for module, name in {
                "attention.query": "attn_q",
                "attention.key": "attn_k",
                "attention.value": "attn_v",
                "attention.dense": "attn_output",
                "attention.LayerNorm": "attn_output_norm",
                "ffn": "ffn_up",
                "ffn_output": "ffn_down",
                "full_layer_layer_norm": "layer_output_norm",
            }.items()
        },
    },
    heads=_heads(("pooler", "classifier"), ("predictions.dense", "predictions.LayerNorm", "predictions")),
    unused=(*UNUSED, r"pooler\.(weight|bias)", r"(sop_)?(predictions|classifier)\..*"),
)
# Keys and queries of relative positions are computed from weights here, not in the engines.
_DEBERTA = replace(
    _BERT,
    architecture="deberta-v2",
    names_of="bert",
    prefixes=("deberta.",),
    accepted={
        "relative_attention": (True,),
        "share_att_key": (True,),
        "conv_kernel_size": (0,),
        "embedding_size": (None,),
        "pooler_hidden_act": ("gelu",),
    },
    constants={"classifier.hidden_activation": "gelu_erf"},
    heads={task: _BERT.heads[task] for task in ("sequence", "tokens", "late")},
    parts={f"attention.self.{name}_proj": (f"attention.self.{name}",) for name in _QKV},
    unused=(*UNUSED, r"(lm_predictions|mask_predictions)\..*", r"encoder\.(rel_embeddings|LayerNorm)\..*"),
    more=(_settings.deberta,),
    combined=_combined.with_relative_positions,
    made=_combined.RELATIVE,
    of_positions={},
)
_T5 = Source(
    "t5encoder",
    keys={
        "embedding_length": stated("d_model"),
        "block_count": stated("num_layers", most=MAX_LAYERS),
        "feed_forward_length": stated("d_ff"),
        "attention.head_count": stated("num_heads"),
        **head_width(stated("d_kv")),
        "attention.relative_buckets_count": stated("relative_attention_num_buckets", default=32),
        "attention.layer_norm_rms_epsilon": stated("layer_norm_epsilon", default=1e-6),
        "context_length": stated("n_positions", default=512),
    },
    accepted={"relative_attention_num_buckets": (32,), "relative_attention_max_distance": (128,)},
    unused=(*UNUSED, r"decoder\..*", r"encoder\.embed_tokens\.weight"),
    more=(_settings.t5,),
    combined=_combined.with_shared_embedding,
)
# The model "new", defined in Alibaba's repositories and later versions of transformers.
_GTE = Source(
    "gte",
    names_of="jina-bert-v2",
    prefixes=("new.", "gte."),
    keys={**SHAPE, **LAYER_NORM, "rope.freq_base": stated("rope_theta", default=10000.0)},
    accepted={
        "hidden_act": ("gelu",),
        "layer_norm_type": ("layer_norm",),
        "position_embedding_type": ("rope",),
        **never("logn_attention_scale", "logn_attention_clip1"),
    },
    heads=_heads(("pooler.dense", "classifier"), ("lm_head.dense", "lm_head.norm", "lm_head.decoder")),
    parts={
        "attention.qkv_proj": tuple(f"attention.self.{name}" for name in _QKV),
        "attention.o_proj": ("attention.output.dense",),
        "attn_ln": ("attention.output.LayerNorm",),
        "mlp.up_gate_proj": ("intermediate.dense", "mlp.gated_layers_w"),
        "mlp.down_proj": ("output.dense",),
        "mlp_ln": ("output.LayerNorm",),
    },
    more=(_rotation.gte,),
)
# The body of Jina's repositories under the name of XLM-R, with rotation instead of positions.
_JINA_V3 = replace(
    _ROBERTA,
    architecture="jina-bert-v3",
    accepted={"use_reg_tokens": (False,)},
    more=(_settings.jina_v3,),
    changes={},
)
_NOMIC_BERT = Source(
    "nomic-bert",
    prefixes=("bert.", "nomic_bert."),
    keys=SHAPE | LAYER_NORM,
    accepted={
        "activation_function": ("swiglu",),
        "hidden_act": ("silu",),
        **never("prenorm", "causal", "qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"),
        "rotary_emb_fraction": (1.0,),
        "rotary_emb_rotation.interleaved": (False,),
        "rotary_emb_scale_base": (None,),
    },
    more=(_rotation.nomic_bert,),
)
_NOMIC_BERT_MOE = replace(
    _NOMIC_BERT,
    architecture="nomic-bert-moe",
    keys={
        **_NOMIC_BERT.keys,
        "expert_count": stated("num_experts"),
        "expert_used_count": stated("moe_top_k"),
        "moe_every_n_layers": stated("moe_every_n_layers"),
    },
    accepted={
        **_NOMIC_BERT.accepted,
        "activation_function": ("gelu",),
        "hidden_act": ("gelu",),
        **dict.fromkeys(("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"), (True,)),
        **never("moe_normalize_expert_weights", "expert_choice_router"),
        "num_shared_experts": (0,),
    },
    combined=_combined.with_divided,
    made=_combined.EXPERTS_BIAS,
)

ENCODERS: dict[str, Source] = {
    "Bert": _BERT,
    **dict.fromkeys(("Roberta", "XLMRoberta", "Camembert"), _ROBERTA),
    "MPNet": _MPNET,
    "DistilBert": _DISTILBERT,
    "Electra": _ELECTRA,
    "Albert": _ALBERT,
    "DebertaV2": _DEBERTA,
    "T5": _T5,
    **dict.fromkeys(("New", "Gte"), _GTE),
    "NomicBert": replace(
        _NOMIC_BERT,
        variant=lambda config: (
            _NOMIC_BERT_MOE if config.integer("moe_every_n_layers", default=0, least=0) else None
        ),
    ),
    "JinaEmbeddingsV3": _JINA_V3,
    "ModernBert": Source(
        "modern-bert",
        prefixes=("model.",),
        keys={**SHAPE, "attention.layer_norm_epsilon": stated("norm_eps", default=1e-5)},
        accepted={
            "hidden_activation": tuple(ARCHITECTURES["modern-bert"].activations),
            "classifier_activation": ("gelu",),
        },
        heads={
            **{
                task: {"head.dense": "cls", "head.norm": "cls.norm", "classifier": "cls.output"}
                for task in ("sequence", "tokens")
            },
            "masked": {"head.dense": "mlm", "head.norm": "mlm.norm", "decoder": "mlm.output"},
        },
        unused=(*UNUSED, r"head\..*", r"decoder\..*"),
        more=(_settings.modern_bert,),
    ),
    "JinaBert": Source(
        "jina-bert-v2",
        prefixes=("bert.",),
        keys=SHAPE | LAYER_NORM,
        accepted={"position_embedding_type": ("alibi",), "feed_forward_type": ("geglu",)},
        heads={task: _BERT.heads[task] for task in ("sequence", "tokens")},
    ),
    "EuroBert": Source(
        "eurobert",
        prefixes=("model.",),
        keys=SHAPE | DECODER | LARGER_EPSILON,
        accepted={"hidden_act": ("silu",)},
        heads={"tokens": _BERT.heads["tokens"]},
        more=(_rotation.eurobert,),
    ),
    "OpenAIPrivacyFilter": Source(
        "privacy-filter",
        names_of="gpt-oss",
        added_prefix="model.",
        keys={
            **SHAPE,
            **DECODER,
            **LARGER_EPSILON,
            **experts_of(128, 4),
            "rope.freq_base": stated("rope_theta", default=_rotation.PRIVACY_FILTER_BASE),
            **head_width(stated("head_dim", default=64)),
        },
        heads={"tokens": {"score": "cls.output"}},
        more=(_rotation.privacy_filter,),
        computed=_rotation.yarn_factors,
        combined=_combined.with_matrices,
    ),
    "Static": Source(
        "static",
        names_of="bert",
        keys={"embedding_length": stated("hidden_size")},
        constants={"context_length": 1 << 20, "attention.layer_norm_rms_epsilon": 1e-6},
        names={"embedding": "token_embd"},
        combined=_combined.static_table,
        frames=False,
    ),
}
