"""Model classes of transformers, and how each becomes an architecture of GGUF.

The differences are data: one row of `SOURCES` each. Names of tensors in the body of a model are those of
`gguf.TensorNameMap`; the rows add prefixes to remove and the names of heads.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeAlias

import gguf

from metal_prefill.conversion import _deberta, _experts, _gemma4, _scan_settings, _settings, _static
from metal_prefill.conversion._fields import MAX_LAYERS, Fields
from metal_prefill.conversion._settings import Values
from metal_prefill.conversion._weights import Weight
from metal_prefill.errors import UnsupportedModelError
from metal_prefill.files._architecture import ARCHITECTURES, MISSING_STEPS
from metal_prefill.files._metadata_keys import MAX_INT
from metal_prefill.files._task_config import DENSE

Task: TypeAlias = Literal["body", "causal", "sequence", "tokens", "late", "masked"]
Change: TypeAlias = Callable[[Fields, str, Weight], Weight]
Shape: TypeAlias = tuple[int, ...]
Combined: TypeAlias = Callable[[Fields, Mapping[str, Weight]], Mapping[str, Weight]]

# Suffixes of model classes, with the purpose of their heads.
TASKS: dict[str, Task] = {
    "ForSequenceClassification": "sequence",
    "ForTokenClassification": "tokens",
    "ForCausalLM": "causal",
    "LMHeadModel": "causal",
    "ForConditionalGeneration": "causal",
    "ForMaskedLM": "body",
    "ForPreTraining": "body",
    "TextModel": "body",
    "EncoderModel": "body",
    "Model": "body",
}


class Key(NamedTuple):
    """A number in ``config.json``, under the first of several names that is present."""

    names: tuple[str, ...]
    kind: Literal["integer", "float"] = "integer"
    # Used if the field is missing; None requires the field, and 0 leaves the key out.
    default: float | None = None
    most: int = MAX_INT  # largest integer


def _integer(*names: str, default: int | None = None) -> Key:
    return Key(names, "integer", default)


def _float(*names: str, default: float | None = None) -> Key:
    return Key(names, "float", default)


_LAYERS = Key(("num_hidden_layers", "n_layer"), most=MAX_LAYERS)
SHAPE = {
    "embedding_length": _integer("hidden_size", "n_embd"),
    "block_count": _LAYERS,
    "feed_forward_length": _integer("intermediate_size", "n_inner"),
    "attention.head_count": _integer("num_attention_heads", "n_head"),
    "context_length": _integer("max_position_embeddings", "n_positions"),
}
LAYER_NORM = {"attention.layer_norm_epsilon": _float("layer_norm_eps", "layer_norm_epsilon", default=1e-12)}
DECODER = {
    "attention.head_count_kv": _integer("num_key_value_heads", default=0),
    "attention.layer_norm_rms_epsilon": _float("rms_norm_eps", default=1e-6),
    "rope.freq_base": _float("rope_theta", default=10000.0),
    "attention.key_length": _integer("head_dim", default=0),
    "attention.value_length": _integer("head_dim", default=0),
}

# Tensors without an effect on the results: positions that are counted, frequencies that are computed, the
# pooler of BERT's next-sentence task, and heads that predict masked tokens.
_UNUSED = (
    r".*\bposition_ids",
    r".*\brotary_emb\.inv_freq",
    r"cls\.(predictions|seq_relationship)\..*",
    r"lm_head\..*",
    r"pooler\.dense\.(weight|bias)",
)
# A classifier that reads a hidden state or the output of another layer.
_CLASSIFIER = {"classifier": "cls.output"}
# Stanford's ColBERT: the name of its class, its projection of tokens, and families by the type of its body.
COLBERT, _PROJECTION = "HF_ColBERT", {"linear": "dense_2"}
_BODIES = {"bert": "Bert", "roberta": "Roberta", "xlm-roberta": "XLMRoberta"}
# Families of folders that name the class of another, whose positions they do not have.
_WITH_POSITIONS = {"alibi": "JinaBert", "rotary": "JinaEmbeddingsV3"}
_QKV = ("query", "key", "value")
JINA_V5 = "JinaEmbeddingsV5"  # family of two backbones, a decoder and an encoder
BIDIRECTIONAL = "Bidirectional"  # ends the names of decoders whose tokens see those after them


@dataclass(frozen=True)
class Source:
    """How a model class becomes a GGUF file."""

    architecture: str  # ``general.architecture`` of the file
    names_of: str = ""  # architecture with the names of `gguf.TensorNameMap`, where that has no own ones
    prefixes: tuple[str, ...] = ()  # beginnings of tensor names, of which the first that matches is removed
    added_prefix: str = ""  # beginning of the names of `gguf.TensorNameMap`, which the folder may lack
    keys: Mapping[str, Key] = field(default_factory=dict)  # metadata under the prefix of the architecture
    # Metadata that are the same for all models of the class.
    constants: Mapping[str, Any] = field(default_factory=dict)
    # Fields of the configuration without which a model has no biases of some layers, by a pattern of their
    # names in the GGUF file.
    biases: Mapping[str, str] = field(default_factory=dict)
    # Values of fields that the architecture implies; the first is the default.
    accepted: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    # Names in a GGUF file of the tensors of a head, by task.
    heads: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    # Names of the tensors that one tensor of the folder contains, with equal numbers of rows, by its name.
    # All are names of modules within a layer.
    parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unused: tuple[str, ...] = _UNUSED  # patterns of tensors that are left out, unless they belong to a head
    # Functions of configuration, name in the GGUF file and tensor that return the tensor to write, by a
    # pattern of the name.
    changes: Mapping[str, Change] = field(default_factory=dict)
    # Functions of configuration, name in the GGUF file and shape that return the shape to write, by a pattern
    # of the name.
    shapes: Mapping[str, Callable[[Fields, str, Shape], Shape]] = field(default_factory=dict)
    # Function of the configuration that returns more metadata.
    more: Callable[[Fields], Mapping[str, Any]] = lambda config: {}
    # Function of the configuration that returns tensors that the folder does not contain.
    computed: Callable[[Fields], Mapping[str, Values]] = lambda config: {}
    # Function of the configuration and the tensors of a folder by name that returns those to write, by the
    # same kind of names.
    combined: Combined = lambda config, weights: weights
    made: str = "(?!)"  # pattern of the names of tensors that `combined` adds, which are those in a GGUF file
    position_offset: bool = False  # whether positions start after the id of the padding token
    # Object of the configuration that describes the text model, if the class has other parts, too.
    text_part: str = ""
    frames: bool = True  # whether texts have the tokens that the tokenizer adds at their ends


_BERT = Source(
    "bert",
    prefixes=("bert.",),
    keys=SHAPE | LAYER_NORM,
    constants={"attention.causal": False},
    more=_settings.bert,
    accepted={
        "position_embedding_type": ("absolute",),
        "is_decoder": (False,),
        "add_cross_attention": (False,),
    },
    heads={
        "sequence": {"pooler.dense": "cls", **_CLASSIFIER},
        "tokens": _CLASSIFIER,
        "late": _PROJECTION,
        "masked": {
            "cls.predictions.transform.dense": "mlm",
            "cls.predictions.transform.LayerNorm": "mlm.norm",
            "cls.predictions": "mlm.output",
        },
    },
)
_ROBERTA = replace(
    _BERT,
    prefixes=("roberta.",),
    more=_settings.activation,
    heads={
        "sequence": {"classifier.dense": "cls", "classifier.out_proj": "cls.output"},
        "tokens": _CLASSIFIER,
        "late": _PROJECTION,
        "masked": {"lm_head.dense": "mlm", "lm_head.layer_norm": "mlm.norm", "lm_head": "mlm.output"},
    },
    changes={r"position_embd\.weight": _settings.without_padding_positions},
    position_offset=True,
)
_MPNET = replace(
    _ROBERTA,
    prefixes=("mpnet.",),
    accepted={"relative_attention_num_buckets": (32,)},
    heads={
        task: {**_ROBERTA.heads.get(task, {}), "encoder.relative_attention_bias": "attn_rel_b"}
        for task in ("body", *_ROBERTA.heads)
    },
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
        "embedding_length": _integer("dim"),
        "block_count": Key(("n_layers",), most=MAX_LAYERS),
        "feed_forward_length": _integer("hidden_dim"),
        "attention.head_count": _integer("n_heads"),
        "context_length": _integer("max_position_embeddings", default=512),
    },
    constants={
        "attention.causal": False,
        "attention.layer_norm_epsilon": 1e-12,
        "classifier.hidden_activation": "relu",
    },
    accepted={},
    heads={
        "sequence": {"pre_classifier": "cls", **_CLASSIFIER},
        "tokens": _CLASSIFIER,
        "late": _PROJECTION,
        "masked": {"vocab_transform": "mlm", "vocab_layer_norm": "mlm.norm", "vocab_projector": "mlm.output"},
    },
    unused=(*_UNUSED, r"vocab_(transform|layer_norm|projector)\..*"),
)
_PROJECTED = {"embeddings_project": "token_embd_proj"}
_ELECTRA = replace(
    _BERT,
    prefixes=("electra.",),
    more=_settings.activation,
    constants={"attention.causal": False, "classifier.hidden_activation": "gelu_erf"},
    heads={
        "body": _PROJECTED,
        "sequence": {**_PROJECTED, "classifier.dense": "cls", "classifier.out_proj": "cls.output"},
        "tokens": _PROJECTED | _CLASSIFIER,
        "late": _PROJECTED | _PROJECTION,
        "masked": {
            **_PROJECTED,
            "generator_predictions.dense": "mlm",
            "generator_predictions.LayerNorm": "mlm.norm",
            "generator_lm_head": "mlm.output",
        },
    },
    unused=(*_UNUSED, r"(discriminator|generator)_predictions\..*", r"generator_lm_head\..*"),
)
# All layers share one set of weights.
_ALBERT = replace(
    _BERT,
    prefixes=("albert.",),
    accepted={**_BERT.accepted, "num_hidden_groups": (1,), "inner_group_num": (1,)},
    constants={"attention.causal": False, "distinct_block_count": 1},
    heads={
        task: {
            **_BERT.heads.get(task, {}),
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
            **head,
        }
        for task, head in {
            "body": {},
            "sequence": {"pooler": "cls"},
            "tokens": {},
            "late": {},
            "masked": {
                "predictions.dense": "mlm",
                "predictions.LayerNorm": "mlm.norm",
                "predictions": "mlm.output",
            },
        }.items()
    },
    unused=(*_UNUSED, r"pooler\.(weight|bias)", r"(sop_)?(predictions|classifier)\..*"),
)
# Keys and queries of relative positions follow from weights, so that engines need not know how.
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
    constants={"attention.causal": False, "classifier.hidden_activation": "gelu_erf"},
    heads={task: _BERT.heads[task] for task in ("sequence", "tokens", "late")},
    parts={f"attention.self.{name}_proj": (f"attention.self.{name}",) for name in _QKV},
    unused=(*_UNUSED, r"(lm_predictions|mask_predictions)\..*", r"encoder\.(rel_embeddings|LayerNorm)\..*"),
    more=_settings.deberta,
    combined=_deberta.with_relative_positions,
    made=_deberta.MADE,
)
_T5 = Source(
    "t5encoder",
    keys={
        "embedding_length": _integer("d_model"),
        "block_count": Key(("num_layers",), most=MAX_LAYERS),
        "feed_forward_length": _integer("d_ff"),
        "attention.head_count": _integer("num_heads"),
        "attention.key_length": _integer("d_kv"),
        "attention.value_length": _integer("d_kv"),
        "attention.relative_buckets_count": _integer("relative_attention_num_buckets", default=32),
        "attention.layer_norm_rms_epsilon": _float("layer_norm_epsilon", default=1e-6),
        "context_length": _integer("n_positions", default=512),
    },
    constants={"attention.causal": False},
    accepted={"relative_attention_num_buckets": (32,), "relative_attention_max_distance": (128,)},
    unused=(*_UNUSED, r"decoder\..*", r"encoder\.embed_tokens\.weight"),
    more=_settings.t5,
    combined=_settings.with_shared_embedding,
)
# The model that Alibaba's repositories define, as "new", and later versions of transformers.
_GTE = Source(
    "gte",
    names_of="jina-bert-v2",
    prefixes=("new.", "gte."),
    keys={**SHAPE, **LAYER_NORM, "rope.freq_base": _float("rope_theta", default=10000.0)},
    constants={"attention.causal": False},
    accepted={
        "hidden_act": ("gelu",),
        "layer_norm_type": ("layer_norm",),
        "position_embedding_type": ("rope",),
        "logn_attention_scale": (False,),
        "logn_attention_clip1": (False,),
    },
    heads={
        "sequence": {"pooler.dense": "cls", **_CLASSIFIER},
        "tokens": _CLASSIFIER,
        "masked": {"lm_head.dense": "mlm", "lm_head.norm": "mlm.norm", "lm_head.decoder": "mlm.output"},
    },
    parts={
        "attention.qkv_proj": tuple(f"attention.self.{name}" for name in _QKV),
        "attention.o_proj": ("attention.output.dense",),
        "attn_ln": ("attention.output.LayerNorm",),
        "mlp.up_gate_proj": ("intermediate.dense", "mlp.gated_layers_w"),
        "mlp.down_proj": ("output.dense",),
        "mlp_ln": ("output.LayerNorm",),
    },
    more=_settings.gte,
)
# The body that Jina's repositories define under the name of XLM-R, with rotation instead of positions.
_JINA_V3 = replace(
    _ROBERTA,
    architecture="jina-bert-v3",
    accepted={"use_reg_tokens": (False,)},
    more=_settings.jina_v3,
    changes={},
    position_offset=False,
)
_NOMIC_BERT = Source(
    "nomic-bert",
    prefixes=("bert.", "nomic_bert."),
    keys=SHAPE | LAYER_NORM,
    constants={"attention.causal": False},
    accepted={
        "activation_function": ("swiglu",),
        "hidden_act": ("silu",),
        "prenorm": (False,),
        "causal": (False,),
        "qkv_proj_bias": (False,),
        "mlp_fc1_bias": (False,),
        "mlp_fc2_bias": (False,),
        "rotary_emb_fraction": (1.0,),
        "rotary_emb_settings.interleaved": (False,),
        "rotary_emb_scale_base": (None,),
    },
    more=_settings.nomic_bert,
)
_NOMIC_BERT_MOE = replace(
    _NOMIC_BERT,
    architecture="nomic-bert-moe",
    keys={
        **_NOMIC_BERT.keys,
        "expert_count": _integer("num_experts"),
        "expert_used_count": _integer("moe_top_k"),
        "moe_every_n_layers": _integer("moe_every_n_layers"),
    },
    accepted={
        **_NOMIC_BERT.accepted,
        "activation_function": ("gelu",),
        "hidden_act": ("gelu",),
        **dict.fromkeys(("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"), (True,)),
        "moe_normalize_expert_weights": (False,),
        "expert_choice_router": (False,),
        "num_shared_experts": (0,),
    },
    combined=_experts.with_divided,
    made=_experts.BIAS,
)
_OF_DECODERS = {
    "causal": {"lm_head": "output"},
    "sequence": {"score": "cls.output"},
    "tokens": {"score": "cls.output"},
}
_ROTATED_WITH_LAYER_NORM = {
    **SHAPE,
    **{key: name for key, name in DECODER.items() if key != "attention.layer_norm_rms_epsilon"},
    "attention.layer_norm_epsilon": _float("layer_norm_eps", default=1e-5),
}
# Masks that old files of GPT-2 and GPT-NeoX contain.
_MASKS = (r".*\.(attn|attention)\.(masked_)?bias",)
_GPT2 = Source(
    "gpt2",
    added_prefix="transformer.",
    keys={
        **{key: name for key, name in SHAPE.items() if key != "feed_forward_length"},
        "attention.layer_norm_epsilon": _float("layer_norm_epsilon", default=1e-5),
    },
    accepted={
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    heads=_OF_DECODERS,
    unused=(*_UNUSED, *_MASKS),
    changes={_settings.TRANSPOSED: _settings.transposed},
    shapes={_settings.TRANSPOSED: lambda config, name, shape: shape[::-1]},
    more=_settings.gpt2,
)
_GPT_NEOX = Source(
    "gptneox",
    added_prefix="gpt_neox.",
    keys={
        **SHAPE,
        "attention.layer_norm_epsilon": _float("layer_norm_eps", default=1e-5),
        "rope.freq_base": _float("rotary_emb_base", "rope_theta", default=10000.0),
    },
    accepted={"attention_bias": (True,)},
    heads={**_OF_DECODERS, "causal": {"embed_out": "output", "lm_head": "output"}},
    unused=(*_UNUSED, *_MASKS),
    changes={r".*\.attn_qkv\..*": _settings.heads_last},
    more=_settings.gpt_neox,
)
_ATTENTION_BIAS = {r"blk\.\d+\.attn_(q|k|v|output)": "attention_bias"}
_LLAMA = Source(
    "llama",
    added_prefix="model.",
    keys=SHAPE | DECODER,
    biases={**_ATTENTION_BIAS, r"blk\.\d+\.ffn_(gate|up|down)": "mlp_bias"},
    accepted={"hidden_act": ("silu",)},
    heads=_OF_DECODERS,
    changes={r"blk\.\d+\.attn_[qk]\.(weight|bias)": _settings.interleaved},
    more=_settings.rope_scaling_or_factors,
    computed=_settings.rope_factors,
)
_INTERLEAVED = _LLAMA.changes


def _llama_like(
    architecture: str, more: Callable[[Fields], Mapping[str, Any]], keys: Mapping[str, Key] = {}, **other: Any
) -> Source:
    """Return the row for a class with Llama's tensors, but neither its order of rows nor its factors."""
    other = {"changes": {}, "computed": lambda config: {}, **other}
    return replace(_LLAMA, architecture=architecture, more=more, keys={**_LLAMA.keys, **keys}, **other)


_QWEN = replace(_LLAMA, changes={}, more=_settings.qwen)
_MINISTRAL3 = _llama_like(
    "mistral3",
    _settings.ministral3,
    prefixes=("model.language_model.", "language_model.model.", "language_model."),
    biases={},
    changes=_INTERLEAVED,
    unused=(*_UNUSED, r"(model\.)?(vision_tower|multi_modal_projector)\..*"),
    text_part="text_config",
)
_LARGER_EPSILON = {"attention.layer_norm_rms_epsilon": _float("rms_norm_eps", default=1e-5)}


def _experts_of(count: int, used: int) -> dict[str, Key]:
    """Return the numbers of experts, with the defaults of a class."""
    return {
        "expert_count": _integer("num_experts", "num_local_experts", default=count),
        "expert_used_count": _integer("num_experts_per_tok", default=used),
    }


# Gate and up of each expert of Granite are one matrix.
_GRANITE_EXPERTS = {
    "block_sparse_moe.input_linear": ("mlp.experts.gate_proj", "mlp.experts.up_proj"),
    "block_sparse_moe.output_linear": ("mlp.experts.down_proj",),
    "shared_mlp.input_linear": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    "shared_mlp.output_linear": ("mlp.shared_expert.down_proj",),
}
# Factors of embeddings, additions to the residual stream, logits and scores.
_GRANITE_SCALES = {
    "embedding_scale": _float("embedding_multiplier", default=1.0),
    "residual_scale": _float("residual_multiplier", default=1.0),
    "logit_scale": _float("logits_scaling", default=1.0),
    "attention.scale": _float("attention_multiplier", default=1.0),
}
_GEMMA = {**SHAPE, **DECODER, "attention.head_count_kv": _integer("num_key_value_heads")}
_GEMMA2 = replace(
    _LLAMA,
    architecture="gemma2",
    keys=_GEMMA,
    accepted={"hidden_activation": ("gelu_pytorch_tanh",), "use_bidirectional_attention": (None, False)},
    changes={r".*norm\.weight": _settings.plus_one},
    more=_settings.gemma2,
    computed=lambda config: {},
)
_GEMMA3 = replace(
    _LLAMA,
    architecture="gemma3",
    keys=_GEMMA,
    accepted={
        "hidden_activation": ("gelu_pytorch_tanh",),
        "attn_logit_softcapping": (None,),
        "final_logit_softcapping": (None,),
    },
    changes={r".*norm\.weight": _settings.plus_one},
    more=_settings.gemma3,
)
# Shapes of the vectors of a state-space layer.
_SCAN_SHAPES = {r".*\.ssm_[ad]": _scan_settings.columns, r".*\.ssm_norm\.weight": _scan_settings.groups}
_MAMBA = {
    "ssm.conv_kernel": _integer("mamba_d_conv", default=4),
    "ssm.state_size": _integer("mamba_d_state", default=256),
    "ssm.group_count": _integer("mamba_n_groups", default=1),
    "ssm.time_step_rank": _integer("mamba_n_heads", default=128),
}

_GRANITE_HYBRID = Source(
    "granitehybrid",
    added_prefix="model.",
    keys={
        **SHAPE,
        **_MAMBA,
        "feed_forward_length": _integer("shared_intermediate_size", default=1024),
        "attention.layer_norm_rms_epsilon": _float("rms_norm_eps", default=1e-6),
        "rope.freq_base": _float("rope_theta", default=10000.0),
        **_GRANITE_SCALES,
    },
    accepted={"hidden_act": ("silu",), "mamba_proj_bias": (False,)},
    heads={"causal": {"lm_head": "output"}},
    parts={
        "shared_mlp.input_linear": ("mlp.gate_proj", "mlp.up_proj"),
        "shared_mlp.output_linear": ("mlp.down_proj",),
    },
    changes={**_INTERLEAVED, r".*\.ssm_a": _settings.rates_of_decay},
    shapes=_SCAN_SHAPES,
    more=_scan_settings.granite_hybrid,
)
_GRANITE_HYBRID_EXPERTS = replace(
    _GRANITE_HYBRID,
    keys={
        **_GRANITE_HYBRID.keys,
        **_experts_of(8, 2),
        "feed_forward_length": SHAPE["feed_forward_length"],
        "expert_shared_feed_forward_length": _integer("shared_intermediate_size", default=1024),
    },
    parts=_GRANITE_EXPERTS,
)
_GRANITE_MOE = _llama_like(
    "granitemoe",
    _settings.granite_moe,
    {**_GRANITE_SCALES, **_experts_of(8, 2)},
    parts=_GRANITE_EXPERTS,
    changes=_INTERLEAVED,
)
_LFM2 = Source(
    "lfm2",
    added_prefix="model.",
    keys={
        **{key: name for key, name in SHAPE.items() if key != "feed_forward_length"},
        "attention.layer_norm_rms_epsilon": _float("norm_eps", "block_norm_eps", default=1e-5),
        "rope.freq_base": _float("rope_theta", default=1000000.0),
        "shortconv.l_cache": _integer("conv_L_cache", default=3),
    },
    accepted={"conv_bias": (False,)},
    heads={"causal": {"lm_head": "output"}},
    more=_settings.lfm2,
)

SOURCES: dict[str, Source] = {
    "Bert": _BERT,
    "Roberta": _ROBERTA,
    "XLMRoberta": _ROBERTA,
    "Camembert": _ROBERTA,
    "MPNet": _MPNET,
    "DistilBert": _DISTILBERT,
    "Electra": _ELECTRA,
    "Albert": _ALBERT,
    "DebertaV2": _DEBERTA,
    "T5": _T5,
    "New": _GTE,
    "Gte": _GTE,
    "NomicBert": _NOMIC_BERT,
    "JinaEmbeddingsV3": _JINA_V3,
    "ModernBert": Source(
        "modern-bert",
        prefixes=("model.",),
        keys={**SHAPE, "attention.layer_norm_epsilon": _float("norm_eps", default=1e-5)},
        constants={"attention.causal": False},
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
        unused=(*_UNUSED, r"head\..*", r"decoder\..*"),
        more=_settings.modern_bert,
    ),
    "JinaBert": Source(
        "jina-bert-v2",
        prefixes=("bert.",),
        keys=SHAPE | LAYER_NORM,
        constants={"attention.causal": False},
        accepted={"position_embedding_type": ("alibi",), "feed_forward_type": ("geglu",)},
        heads={task: _BERT.heads[task] for task in ("sequence", "tokens")},
    ),
    "EuroBert": Source(
        "eurobert",
        prefixes=("model.",),
        keys=SHAPE | DECODER | _LARGER_EPSILON,
        constants={"attention.causal": False},
        accepted={"hidden_act": ("silu",)},
        heads={"tokens": _CLASSIFIER},
        more=_settings.eurobert,
    ),
    "OpenAIPrivacyFilter": Source(
        "privacy-filter",
        names_of="gpt-oss",
        added_prefix="model.",
        keys={
            **SHAPE,
            **DECODER,
            **_LARGER_EPSILON,
            **_experts_of(128, 4),
            "rope.freq_base": _float("rope_theta", default=_settings.PRIVACY_FILTER_BASE),
            "attention.key_length": _integer("head_dim", default=64),
            "attention.value_length": _integer("head_dim", default=64),
        },
        constants={"attention.causal": False},
        heads={"tokens": {"score": "cls.output"}},
        more=_settings.privacy_filter,
        computed=_settings.yarn_factors,
        combined=_experts.with_matrices,
    ),
    "Static": Source(
        "static",
        names_of="bert",
        keys={"embedding_length": _integer("hidden_size")},
        constants={
            "context_length": 1 << 20,
            "attention.causal": False,
            "attention.layer_norm_rms_epsilon": 1e-6,
        },
        heads={"body": {"embedding": "token_embd"}},
        combined=lambda config, weights: _static.table(weights),
        frames=False,
    ),
    "GPT2": _GPT2,
    "GPTNeoX": _GPT_NEOX,
    "Starcoder2": Source(
        "starcoder2",
        added_prefix="model.",
        keys={
            **_ROTATED_WITH_LAYER_NORM,
            "attention.layer_norm_epsilon": _float("norm_epsilon", default=1e-5),
        },
        accepted={"use_bias": (True,)},
        heads=_OF_DECODERS,
        more=_settings.starcoder2,
    ),
    "Phi": Source(
        "phi2",
        added_prefix="model.",
        keys=_ROTATED_WITH_LAYER_NORM,
        accepted={"qk_layernorm": (False,)},
        heads=_OF_DECODERS,
        more=_settings.phi2,
    ),
    "StableLm": Source(
        "stablelm",
        added_prefix="model.",
        keys=_ROTATED_WITH_LAYER_NORM,
        biases={r"blk\.\d+\.attn_(q|k|v)": "use_qkv_bias"},
        accepted={"hidden_act": ("silu",), "qk_layernorm": (False,), "use_parallel_residual": (False,)},
        heads=_OF_DECODERS,
        more=_settings.stablelm,
    ),
    "Cohere2": Source(
        "cohere2",
        added_prefix="model.",
        keys={
            **_ROTATED_WITH_LAYER_NORM,
            "attention.sliding_window": _integer("sliding_window", default=4096),
            "logit_scale": _float("logit_scale", default=0.0625),
        },
        accepted={"hidden_act": ("silu",), "attention_bias": (False,)},
        heads=_OF_DECODERS,
        more=_settings.cohere2,
    ),
    "Llama": _LLAMA,
    "Mistral": replace(_LLAMA, more=_settings.mistral),
    "Qwen2": replace(_QWEN, architecture="qwen2", biases={}),  # always some in attention
    "Qwen3": replace(_QWEN, architecture="qwen3"),
    JINA_V5: replace(_QWEN, architecture="qwen3"),  # unless it states that it is an encoder
    "PPLXQwen3": replace(_QWEN, architecture="qwen3", constants={"attention.causal": False}),
    "Qwen3Moe": _llama_like(
        "qwen3moe",
        _settings.with_experts,
        _experts_of(128, 8) | {"expert_feed_forward_length": _integer("moe_intermediate_size", default=768)},
        accepted={
            "hidden_act": ("silu",),
            "use_sliding_window": (False,),
            "decoder_sparse_step": (1,),
            "mlp_only_layers": ([],),
        },
    ),
    "Olmoe": _llama_like(
        "olmoe",
        _settings.with_experts,
        _LARGER_EPSILON | _experts_of(64, 8),
        accepted={"hidden_act": ("silu",), "clip_qkv": (None,)},
    ),
    "Qwen3VL": replace(
        _QWEN,
        architecture="qwen3",
        prefixes=("model.language_model.",),
        unused=(*_UNUSED, r"model\.visual\..*"),
        text_part="text_config",
    ),
    **dict.fromkeys(("Mistral3", "Ministral3"), _MINISTRAL3),
    "MiniCPM": _llama_like(
        "minicpm", _settings.minicpm, changes=_INTERLEAVED, computed=_settings.long_rope_factors
    ),
    "SmolLM3": _llama_like(
        "smollm3",
        _settings.smollm3,
        {"rope.freq_base": _float("rope_theta", default=2000000.0)},
        accepted={"hidden_act": ("silu",), "use_sliding_window": (False,)},
        changes=_INTERLEAVED,
    ),
    "Granite": _llama_like("granite", _settings.rope_scaling, _GRANITE_SCALES, changes=_INTERLEAVED),
    **dict.fromkeys(("GraniteMoe", "GraniteMoeShared"), _GRANITE_MOE),
    "Olmo2": _llama_like("olmo2", _settings.rope_scaling, _LARGER_EPSILON),
    "Olmo3": _llama_like("olmo2", _settings.olmo3, _LARGER_EPSILON),
    "Phi3": _llama_like(
        "phi3",
        _settings.phi3,
        {**_LARGER_EPSILON, "attention.sliding_window": _integer("sliding_window", default=0)},
        biases={},
        computed=_settings.long_rope_factors,
    ),
    "Exaone4": _llama_like(
        "exaone4", _settings.exaone4, _LARGER_EPSILON, biases={}, computed=_settings.rope_factors
    ),
    "HunYuanDenseV1": _llama_like("hunyuan-dense", _settings.hunyuan_dense, _LARGER_EPSILON),
    "Ernie4_5": _llama_like(  # the values of its rotated pairs are next to each other
        "ernie4_5",
        _settings.rope_scaling,
        {
            **_LARGER_EPSILON,
            "rope.freq_base": _float("rope_theta", default=500000.0),
            "attention.key_length": _integer("head_dim", default=128),
            "attention.value_length": _integer("head_dim", default=128),
        },
        biases={r"blk\.\d+\.(attn|ffn)_.*": "use_bias"},
    ),
    "Lfm2": _LFM2,
    "Lfm2Moe": replace(
        _LFM2,
        architecture="lfm2moe",
        keys={
            **_LFM2.keys,
            **_experts_of(32, 4),
            "expert_feed_forward_length": _integer("moe_intermediate_size", default=1792),
        },
        accepted={"conv_bias": (False,), "use_expert_bias": (True,)},
        parts={
            f"feed_forward.experts.{name}": (f"mlp.experts.{part}_proj",)
            for name, part in {"w1": "gate", "w2": "down", "w3": "up"}.items()
        },
        more=_settings.lfm2_moe,
    ),
    "Gemma2": _GEMMA2,
    "Gemma3": _GEMMA3,
    "Gemma3Text": _GEMMA3,
    "Gemma4": replace(
        _LLAMA,
        architecture="gemma4",
        prefixes=("model.language_model.",),
        keys={
            key: name
            for key, name in _GEMMA.items()
            if key not in ("rope.freq_base", "attention.key_length", "attention.value_length")
        },
        biases={},
        accepted={
            "hidden_activation": ("gelu_pytorch_tanh",),
            "attention_bias": (False,),
            "attention_k_eq_v": (False,),
            "enable_moe_block": (False,),
            "use_bidirectional_attention": (None, "vision"),
        },
        unused=(*_UNUSED, r"model\.(vision_tower|audio_tower|embed_vision|embed_audio)\..*"),
        changes={},
        more=_gemma4.metadata,
        computed=_gemma4.rope_factors,
        combined=_gemma4.without_unused_keys,
        text_part="text_config",
    ),
    "Qwen3_5": Source(
        "qwen35",
        prefixes=("model.language_model.",),
        added_prefix="model.",
        keys={
            **SHAPE,
            **DECODER,
            "attention.key_length": _integer("head_dim", default=256),
            "attention.value_length": _integer("head_dim", default=256),
            "ssm.conv_kernel": _integer("linear_conv_kernel_dim", default=4),
            "ssm.state_size": _integer("linear_key_head_dim", default=128),
            "ssm.group_count": _integer("linear_num_key_heads", default=16),
            "ssm.time_step_rank": _integer("linear_num_value_heads", default=32),
        },
        accepted={"hidden_act": ("silu",), "attention_bias": (False,), "attn_output_gate": (True,)},
        heads={"causal": {"lm_head": "output"}},
        unused=(*_UNUSED, r"model\.visual\..*", r"mtp\..*"),
        changes={
            r".*(?<!ssm_)norm\.weight": _settings.plus_one,
            r".*\.ssm_a": _settings.rates_of_decay,
            r".*\.(ssm_.*|attn_qkv\.weight|attn_gate\.weight)": _settings.value_heads_by_turns,
        },
        more=_settings.qwen35,
        text_part="text_config",
    ),
    "GraniteMoeHybrid": _GRANITE_HYBRID,
    "Mamba2": Source(
        "mamba2",
        added_prefix="backbone.",
        keys={
            "embedding_length": _integer("hidden_size"),
            "block_count": _LAYERS,
            "attention.layer_norm_rms_epsilon": _float("layer_norm_epsilon", default=1e-5),
            "ssm.conv_kernel": _integer("conv_kernel", default=4),
            "ssm.state_size": _integer("state_size", default=128),
            "ssm.group_count": _integer("n_groups", default=8),
            "ssm.time_step_rank": _integer("num_heads", default=128),
        },
        constants={"context_length": 1 << 20, "feed_forward_length": 0, "attention.head_count": 0},
        accepted={"hidden_act": ("silu",), "use_bias": (False,)},
        heads={"causal": {"lm_head": "output"}},
        changes={r".*\.ssm_a": _settings.rates_of_decay},
        shapes=_SCAN_SHAPES,
        more=_scan_settings.mamba2,
    ),
    "FalconH1": Source(
        "falcon-h1",
        added_prefix="model.",
        keys={**SHAPE, **DECODER, **_LARGER_EPSILON, **_MAMBA},
        accepted={
            "hidden_act": ("silu",),
            "attention_bias": (False,),
            "mlp_bias": (False,),
            "projectors_bias": (False,),
            "mamba_proj_bias": (False,),
        },
        heads={"causal": {"lm_head": "output"}},
        changes={r".*\.ssm_a": _settings.rates_of_decay, r".*\.weight": _scan_settings.multiplied},
        shapes=_SCAN_SHAPES,
        more=_scan_settings.falcon_h1,
    ),
}


def find_source(config: Fields) -> tuple[Source, Task]:
    """Return the row for a folder's model class, and the task of its head."""
    classes = config.sequence("architectures")
    name = classes[0] if classes and isinstance(classes[0], str) else None
    if name is None:
        raise config.error("architectures must name the class of the model, such as BertModel")
    positions = config.string("position_embedding_type", default="")
    if name == COLBERT:
        config.require("model_type", tuple(_BODIES), None)
        return SOURCES[_WITH_POSITIONS.get(positions, _BODIES[config.string("model_type")])], "late"
    match = re.fullmatch(rf"(.+?)({'|'.join(TASKS)})", name)
    family = match[1].removesuffix(BIDIRECTIONAL) if match else ""
    if family.lower() in MISSING_STEPS:
        raise config.unsupported(
            f"model class {name} is not supported; it needs {MISSING_STEPS[family.lower()]}"
        )
    if match is None or family not in SOURCES:
        known = ", ".join((*SOURCES, COLBERT))
        raise config.unsupported(f"model class {name} is not supported; supported families are {known}")
    source, task = SOURCES[family], TASKS[match[2]]
    if family == JINA_V5 and not config.boolean("is_decoder", default=True):
        source = SOURCES["EuroBert"]
    if ARCHITECTURES[source.architecture].causal and (
        family != match[1] or _is_bidirectional(source, config)
    ):
        source, task = _bidirectional(source), "body" if task == "causal" else task
    if source.architecture == "granitehybrid":
        has_experts = config.integer("num_local_experts", default=8, least=0) > 0
        source = _GRANITE_HYBRID_EXPERTS if has_experts else source
        if _scan_settings.only_rotated_attention(config):
            source = replace(source, architecture="granitemoe" if has_experts else "granite")
    if source.architecture == "bert":
        source = SOURCES[_WITH_POSITIONS[positions]] if positions in _WITH_POSITIONS else source
    if source is _NOMIC_BERT and config.integer("moe_every_n_layers", default=0, least=0) > 0:
        source = _NOMIC_BERT_MOE
    has_other_parts = match[2] == "ForConditionalGeneration"
    if task not in ("body", *source.heads) or (has_other_parts and not source.text_part):
        raise config.unsupported(f"the head of {name} is not supported")
    return source, task


def text_fields(source: Source, config: Fields) -> Fields:
    """Return the part of a configuration that describes the text model."""
    part = source.text_part
    return config.object(part) if part and config.has(part) else config


def _is_bidirectional(source: Source, config: Fields) -> bool:
    """Return whether a folder states that tokens see those after them, where a row does not list values."""
    fields = {"use_bidirectional_attention": True, "is_causal": False}
    return any(
        config.boolean(name, default=not value) == value
        for name, value in fields.items()
        if name not in source.accepted
    )


def _bidirectional(source: Source) -> Source:
    """Return the row for a decoder whose tokens see those after them, and may be projected."""
    if source.architecture == "gemma3":
        return replace(source, architecture="gemma-embedding")
    return replace(
        source,
        architecture="llama-embed" if source.architecture == "llama" else source.architecture,
        constants={**source.constants, "attention.causal": False},
        heads={**source.heads, "body": {"linear": DENSE[0]}},
    )


def metadata_of(source: Source, config: Fields) -> dict[str, Any]:
    """Return the metadata of the architecture, without its prefix."""
    for name, accepted in source.accepted.items():
        config.require(name, accepted, accepted[0])
    found: dict[str, Any] = dict(source.constants)
    for suffix, key in source.keys.items():
        default = {} if key.default is None else {"default": key.default or 1}
        if key.default == 0 and not any(map(config.has, key.names)):
            continue
        if key.kind == "integer":
            found[suffix] = config.integer(*key.names, **default, most=key.most)  # type: ignore[arg-type]
        else:
            found[suffix] = config.number(*key.names, **default)
    if source.position_offset:
        found["context_length"] -= _settings.position_offset(config)
        if found["context_length"] < 1:
            raise config.error(
                f"max_position_embeddings is {config.integer('max_position_embeddings')}, must be more than "
                f"{_settings.position_offset(config)}, the first position"
            )
    return {**found, **source.more(config)}


def gguf_name(source: Source, task: Task, names: gguf.TensorNameMap, name: str) -> str | None:
    """Return the name of a tensor in a GGUF file, or None for a tensor that is left out."""
    if re.fullmatch(source.made, name):
        return name
    bare = name
    for prefix in source.prefixes:
        if bare.startswith(prefix):
            bare = bare.removeprefix(prefix)
            break
    stem, _, suffix = bare.rpartition(".")
    suffix = {"gamma": "weight", "beta": "bias"}.get(suffix, suffix)
    head = source.heads.get(task, {}).get(stem)
    if head is not None:
        return f"{head}.{suffix}"
    if any(re.fullmatch(pattern, bare) for pattern in source.unused):
        return None
    if suffix == "dt_bias":
        stem, suffix = f"{stem}.dt_proj", "bias"
    if suffix == "layer_scalar":
        stem, suffix = f"{stem}.layer_scalar", "weight"
    if suffix == "expert_bias":
        stem, suffix = f"{stem}.expert_bias", "bias"
    if source.added_prefix and not bare.startswith(source.added_prefix):
        stem = source.added_prefix + stem
    whole: str | None = names.get_name(f"{stem}.{suffix}")  # of a parameter without a suffix
    if whole is not None:
        return whole
    found: str | None = names.get_name(stem)
    if found is None or suffix not in ("weight", "bias"):
        raise UnsupportedModelError(f"tensor {name} is not part of a {source.architecture} model")
    return f"{found}.{suffix}"
