"""The supported architectures, one row of a table each.

A row contains the differences from `llama`, by which `_hyperparameters` and `_model_tensors` read files.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

# Of fields of ModelConfig.
RopeStyle: TypeAlias = Literal["interleaved", "neox"]
Activation: TypeAlias = Literal["silu", "gelu", "gelu_erf", "relu", "clamped_silu"]
NormKind: TypeAlias = Literal["rms", "layer"]
QkNormPlace: TypeAlias = Literal["heads", "rotated_heads", "rows"]
LayerKind: TypeAlias = Literal[
    "attention", "short_conv", "state_space", "attention_and_state_space", "gated_delta"
]
FeedForwardKind: TypeAlias = Literal["none", "dense", "experts"]
RouterScore: TypeAlias = Literal["softmax", "sigmoid"]

WindowRope: TypeAlias = Literal["same", "own", "only", "unscaled"]
Presence: TypeAlias = Literal["required", "optional", "absent"]


@dataclass(frozen=True)
class Architecture:
    """The ways in which an architecture differs from `llama`."""

    rope_style: RopeStyle = "interleaved"
    activation: Activation = "silu"
    # Activations by their names in the metadata, if a file may state one.
    activations: Mapping[str, Activation] = field(default_factory=dict)
    # Activation of a feed-forward without a gate, if it has another one.
    ungated_activation: Activation | None = None
    # As in `ModelConfig`; those that metadata can set, for files that do not.
    norm_kind: NormKind = "rms"
    qk_norm_place: QkNormPlace = "heads"
    causal: bool = True
    query_gate: bool = False
    value_norm: bool = False
    max_alibi_bias: float = 0.0
    attention_scale: float = 0.0
    router_score: RouterScore = "softmax"
    normalize_routes: bool = False
    # Likewise; None: the metadata must not have one.
    score_cap: float | None = None
    logit_cap: float | None = None
    # Presence of the tensors whose rows in ``cpp/model/tensors.inc`` name the field: biases of q, k and v, of
    # the projections with which attention and feed-forward end, of the gate, and of the up projection.
    qkv_bias: Presence = "absent"
    output_bias: Presence = "absent"
    gate_bias: Presence = "absent"
    up_bias: Presence = "absent"
    # Presence of norms of q and k, and of their biases.
    qk_norm: Presence = "absent"
    qk_norm_bias: Presence = "absent"
    # Presence of biases of the norms of the inputs of attention and feed-forward, and of the last layer's
    # output.
    norm_bias: Presence = "absent"
    # Presence of norms of the inputs of attention and feed-forward, and of their outputs.
    attn_norm: Presence = "required"
    ffn_norm: Presence = "required"
    post_norms: Presence = "absent"
    long_rope: Presence = "absent"  # presence of the factors of LongRoPE
    residual_norms: Presence = "absent"  # presence of norms of the residual stream after each addition to it
    # Presence of a norm after the one of the residual stream after attention. Between them, the input of the
    # layer is added again.
    second_residual_norm: Presence = "absent"
    # Presence of the norms of the embedding and of the last layer's output.
    embedding_norm: Presence = "absent"
    embedding_norm_bias: Presence = "absent"
    output_norm: Presence = "required"
    positions: Presence = "absent"  # presence of embeddings of positions
    # Presence of a bias of scores by relative positions, the same in all layers.
    position_bias: Presence = "absent"
    relative_positions: Presence = "absent"  # presence of keys and queries of relative positions
    embedding_projection: Presence = "absent"  # presence of a projection of the embedding
    token_types: Presence = "absent"  # presence of embeddings of token types
    layers: Presence = "required"  # ``"absent"`` if a text's hidden states are the embeddings of its tokens
    # Presence of the feed-forward, and of its gate.
    ffn: Presence = "required"
    gate: Presence = "required"
    # Presence of experts, in the layers that the metadata do not set to be dense.
    experts: Presence = "absent"
    router_bias: Presence = "absent"  # presence of a bias in the choice of experts
    # Presence of biases of the router's products and of the projections of experts.
    expert_bias: Presence = "absent"
    experts_bias: Presence = "absent"  # presence of a bias of the sum of a token's experts
    # Presence of attention sinks: a score of each head without a value, which takes part in the softmax.
    sinks: Presence = "absent"
    ssm_norm: Presence = "optional"  # presence of the norm of the output of state-space layers
    # ``"absent"`` for encoders, which have no output projection; ``"tied"`` if the embedding can replace it.
    head: Literal["tied", "absent"] = "tied"
    head_bias: Presence = "absent"  # presence of a bias of the logits
    rope: bool = True  # whether any layer rotates q and k
    rope_free_every: int = 0  # every n-th layer does not rotate; 0 means that every layer rotates
    window: Presence = "absent"  # presence of an attention window in the metadata
    # Every n-th layer attends to all positions despite the window; 0 means that none does. The metadata may
    # set another period, or list the layers.
    window_period: int = 0
    # Whether the first layer of each period attends to all positions instead of the last one.
    window_free_first: bool = False
    # Rotation of the layers with a window: the same as the other layers; with a separate base and without
    # scaling; the only layers that rotate; or without scaling. Without a window, all layers rotate in the
    # same way.
    window_rope: WindowRope = "same"
    scale_embedding: bool = False  # multiply embeddings by ``sqrt(dim)``
    # Presence of the scales of embeddings, residual additions and logits in the metadata. The logits are
    # divided by theirs.
    scales: Presence = "absent"
    multiplies_logits: bool = False  # whether the scale of the logits multiplies them instead
    # Whether attention and feed-forward of a layer read the same input; ``"optional"`` if the metadata set
    # it.
    parallel: Presence = "absent"
    mixer: LayerKind = "attention"  # kind of the layers with attention
    recurrent: LayerKind | None = None  # kind of the layers without attention; None if every layer has it
    # Every n-th layer has attention, unless the metadata set another period or list the layers. 0: the layers
    # with key-value heads in the metadata have it.
    attention_every: int = 0
    rope_switch: bool = False  # whether the metadata can say that no layer rotates
    # Presence of the inputs of layers from the tokens themselves, if the metadata state their width; and of a
    # scale of the output of each layer.
    per_layer_inputs: Presence = "absent"
    layer_scale: Presence = "absent"
    # Whether layers with a window can have heads of another width, and layers other numbers of key-value
    # heads and feed-forwards of other widths.
    layers_differ: bool = False
    # Whether files divide the rotated pairs into those for the time, the row and the column of an image,
    # which are the same in a text.
    image_sections: bool = False
    # Patterns of tensors that files may have for other purposes than the text model, and their purposes.
    ignored: Mapping[str, str] = field(default_factory=dict)
    # Names of tensors, by role, that differ from those in ``cpp/model/tensors.inc``.
    names: Mapping[str, str] = field(default_factory=dict)
    # Tensors of `fused` whose parts are in reverse order in layers that also have another tensor.
    reversed_with: Mapping[str, str] = field(default_factory=dict)
    # Layer tensors that may hold the rows of several tensors in sequence, and the roles of those tensors.
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # Number of layers of the models of Gemma that scale by the nominal instead of the actual width of a head,
    # which the metadata of their files do not record.
    nominal_scale_layers: int = 0


_GEMMA2 = Architecture(
    rope_style="neox",
    activation="gelu",
    post_norms="required",
    window="required",
    window_period=2,
    scale_embedding=True,
    score_cap=50.0,
    logit_cap=30.0,
    nominal_scale_layers=46,
)
_GEMMA3 = replace(
    _GEMMA2,
    qk_norm="required",
    window_period=6,
    window_rope="own",
    score_cap=None,
    logit_cap=None,
    nominal_scale_layers=62,
)

_QKV = {"attn_qkv.weight": ("wq", "wk", "wv"), "attn_qkv.bias": ("bq", "bk", "bv")}
_GATE_UP = {"ffn_up.weight": ("w_gate", "w_up")}
# Names in the configurations of transformers.
_GELUS: dict[str, Activation] = {
    "gelu": "gelu_erf",
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), "gelu"),
}
# An encoder that normalizes the residual stream after each block.
_BERT = Architecture(
    norm_kind="layer",
    activation="gelu_erf",
    activations={**_GELUS, "relu": "relu"},
    qkv_bias="required",
    output_bias="required",
    up_bias="required",
    attn_norm="absent",
    ffn_norm="absent",
    residual_norms="required",
    embedding_norm="required",
    embedding_norm_bias="required",
    output_norm="absent",
    positions="required",
    position_bias="optional",  # MPNet
    embedding_projection="optional",  # ALBERT, ELECTRA
    token_types="optional",
    gate="absent",
    head="absent",
    rope=False,
    causal=False,
    fused=_QKV,
)
# The same with rotation instead of positions.
_ROTATED_BERT = replace(
    _BERT,
    rope_style="neox",
    positions="absent",
    position_bias="absent",
    embedding_projection="absent",
    rope=True,
)
# And with a gated feed-forward.
_NOMIC_BERT = replace(
    _ROTATED_BERT,
    activation="silu",
    activations={},
    qkv_bias="optional",
    output_bias="optional",
    up_bias="absent",
    gate="required",
)
# Names for layers whose attention and feed-forward have the same input.
_ONE_NORM = {"ffn_norm": "blk.{layer}.attn_norm.weight", "ffn_norm_bias": "blk.{layer}.attn_norm.bias"}
# A decoder with biases everywhere and without gates.
_GPT2 = Architecture(
    norm_kind="layer",
    rope_style="neox",
    activation="gelu",
    activations=_GELUS,
    qkv_bias="required",
    output_bias="required",
    up_bias="required",
    norm_bias="required",
    positions="required",
    gate="absent",
    rope=False,
    fused=_QKV,
)
_LFM2 = Architecture(
    rope_style="neox",
    qk_norm="required",
    recurrent="short_conv",
    names={"output_norm": "token_embd_norm.weight"},
)
_T5_NAMES = {
    **{f"w{name}": f"attn_{name}" for name in "qkvo"},
    **{f"w_{name}": f"ffn_{name}" for name in ("gate", "up", "down")},
    **{name: name for name in ("attn_norm", "ffn_norm")},
}
_LLAMA = Architecture(
    qkv_bias="optional", output_bias="optional", gate_bias="optional", up_bias="optional", window="optional"
)
_GRANITE = Architecture(qkv_bias="optional", scales="optional", rope_switch=True)
_OLMO2 = Architecture(
    rope_style="neox",
    qk_norm="required",
    qk_norm_place="rows",
    attn_norm="absent",
    ffn_norm="absent",
    post_norms="required",
    window="optional",
    window_period=4,
    window_rope="unscaled",
)
# Unsupported steps, by the architecture that requires them.
MISSING_STEPS = {
    "gemma3n": "parallel residual streams (AltUp), residual blocks of low rank (LAuReL), sparse activations"
}
ARCHITECTURES: dict[str, Architecture] = {
    "llama": _LLAMA,
    "llama-embed": replace(_LLAMA, causal=False),
    "qwen2": Architecture(rope_style="neox", qkv_bias="required", window="optional"),
    "qwen3": Architecture(rope_style="neox", qk_norm="required", window="optional"),
    "qwen3moe": Architecture(
        rope_style="neox", qk_norm="required", experts="required", normalize_routes=True
    ),
    "smollm3": Architecture(rope_free_every=4),
    "granite": _GRANITE,
    "granitemoe": replace(_GRANITE, experts="required", normalize_routes=True),
    "hunyuan-dense": Architecture(rope_style="neox", qk_norm="required", qk_norm_place="rotated_heads"),
    "olmo2": _OLMO2,
    "olmoe": Architecture(rope_style="neox", qk_norm="required", qk_norm_place="rows", experts="required"),
    "exaone4": replace(_OLMO2, qk_norm_place="heads", window_rope="only"),
    "ernie4_5": Architecture(qkv_bias="optional"),
    "phi3": Architecture(
        rope_style="neox",
        long_rope="optional",
        window="optional",
        fused={**_QKV, **_GATE_UP},
    ),
    "minicpm": Architecture(scales="required", long_rope="optional"),
    "mistral3": Architecture(),
    "qwen3vl": Architecture(rope_style="neox", qk_norm="required", image_sections=True),
    "gpt2": _GPT2,
    "gptneox": replace(_GPT2, activation="gelu_erf", positions="absent", rope=True, parallel="optional"),
    "starcoder2": replace(_GPT2, positions="absent", rope=True, window="optional"),
    "phi2": replace(
        _GPT2, positions="absent", rope=True, parallel="required", head_bias="required", names=_ONE_NORM
    ),
    "stablelm": Architecture(norm_kind="layer", rope_style="neox", qkv_bias="optional", norm_bias="required"),
    "cohere2": Architecture(
        norm_kind="layer",
        scales="optional",
        multiplies_logits=True,
        parallel="required",
        window="required",
        window_period=4,
        window_rope="only",
        names=_ONE_NORM,
    ),
    "lfm2": _LFM2,
    "lfm2moe": replace(
        _LFM2, experts="required", router_bias="required", router_score="sigmoid", normalize_routes=True
    ),
    "granitehybrid": replace(
        _GRANITE, recurrent="state_space", ssm_norm="required", experts="optional", normalize_routes=True
    ),
    "mamba2": Architecture(recurrent="state_space", ssm_norm="required", ffn="absent", ffn_norm="absent"),
    "falcon-h1": Architecture(
        rope_style="neox",
        mixer="attention_and_state_space",
        names={"ffn_norm": "blk.{layer}.ffn_norm"},  # without a suffix in its files
    ),
    "qwen35": Architecture(
        rope_style="neox",
        qk_norm="required",
        recurrent="gated_delta",
        image_sections=True,
        attention_every=4,
        query_gate=True,
        names={"ffn_norm": "blk.{layer}.post_attention_norm.weight"},
        ignored={
            "mtp.*": "multi-token prediction",
            "*.nextn.*": "multi-token prediction",
            "v.*": "vision",
            "mm.*": "vision",
        },
    ),
    "gemma2": _GEMMA2,
    "gemma3": _GEMMA3,
    "gemma4": replace(
        _GEMMA3,
        logit_cap=0.0,
        value_norm=True,
        per_layer_inputs="required",
        layer_scale="optional",
        layers_differ=True,
        attention_scale=1.0,
    ),
    "gemma-embedding": replace(_GEMMA3, causal=False),
    "bert": _BERT,
    "deberta-v2": replace(
        _BERT,
        positions="optional",
        position_bias="absent",
        relative_positions="required",
        embedding_projection="absent",
    ),
    "jina-bert-v3": _ROTATED_BERT,
    "nomic-bert": _NOMIC_BERT,
    "nomic-bert-moe": replace(
        _ROTATED_BERT,
        experts="required",
        experts_bias="optional",  # llama.cpp's converter omits it
    ),
    "gte": replace(_NOMIC_BERT, activation="gelu_erf", qkv_bias="required", output_bias="required"),
    "jina-bert-v2": replace(
        _BERT,
        activations={},
        up_bias="absent",
        positions="absent",
        position_bias="absent",
        embedding_projection="absent",
        gate="required",
        max_alibi_bias=8.0,
        # The variant for code has more norms, and another order of gate and up.
        qk_norm="optional",
        qk_norm_bias="optional",
        qk_norm_place="rows",
        second_residual_norm="optional",
        fused=_GATE_UP,
        reversed_with={"ffn_up.weight": "attn_norm_2.weight"},
    ),
    "modern-bert": Architecture(
        norm_kind="layer",
        rope_style="neox",
        activation="gelu_erf",
        activations={**_GELUS, "silu": "silu"},
        attn_norm="optional",  # the first layer has none: the embedding is normalized
        embedding_norm="required",
        head="absent",
        window="required",
        window_period=3,
        window_free_first=True,
        window_rope="own",
        causal=False,
        fused={**_QKV, **_GATE_UP},
    ),
    "t5encoder": Architecture(
        activation="gelu",
        activations={**_GELUS, "silu": "silu", "relu": "relu"},
        ungated_activation="relu",
        gate="optional",
        position_bias="required",
        head="absent",
        rope=False,
        causal=False,
        names={
            "position_bias": "enc.blk.0.attn_rel_b.weight",
            "output_norm": "enc.output_norm.weight",
            **{role: f"enc.blk.{{layer}}.{name}.weight" for role, name in _T5_NAMES.items()},
        },
        attention_scale=1.0,
    ),
    "eurobert": Architecture(rope_style="neox", head="absent", causal=False),
    # The body and the names of its tensors are as in gpt-oss.
    "privacy-filter": Architecture(
        activation="clamped_silu",
        qkv_bias="optional",
        output_bias="optional",
        sinks="required",
        experts="required",
        expert_bias="required",
        normalize_routes=True,
        head="absent",
        window="required",
        causal=False,
        names={"ffn_norm": "blk.{layer}.post_attention_norm.weight"},
    ),
    "static": Architecture(
        layers="absent", ffn="absent", output_norm="absent", head="absent", rope=False, causal=False
    ),
}
