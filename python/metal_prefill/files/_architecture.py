"""Map GGUF metadata to a model configuration, and GGUF tensors to their roles.

The differences between architectures are data: one row of `ARCHITECTURES` each. Missing or contradictory
metadata raises a `GGUFError` that names it. A file that needs an unimplemented feature raises an
`UnsupportedModelError`; the feature is never ignored, because the model would compute different results.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from typing import Literal, TypeAlias

from metal_prefill import _core
from metal_prefill.errors import GGUFError, UnsupportedModelError
from metal_prefill.files._gguf_file import GGUFFile, TensorInfo
from metal_prefill.files._metadata_keys import MAX_INT, Keys
from metal_prefill.files._pooled_head import HEAD_TENSORS

RopeStyle: TypeAlias = Literal["interleaved", "neox"]
RopeScaling: TypeAlias = Literal["none", "linear", "yarn"]
Activation: TypeAlias = Literal["silu", "gelu", "gelu_erf"]
NormKind: TypeAlias = Literal["rms", "layer"]
QkNormPlace: TypeAlias = Literal["heads", "rotated_heads", "rows"]
LayerKind: TypeAlias = Literal[
    "attention", "short_conv", "state_space", "attention_and_state_space", "gated_delta"
]
WindowRope: TypeAlias = Literal["same", "own", "only"]
Presence: TypeAlias = Literal["required", "optional", "absent"]


@dataclass(frozen=True)
class ModelConfig:
    """Hyperparameters of a model.

    Attributes
    ----------
    architecture : str
        ``general.architecture`` of the file.
    n_layers, dim, ffn_dim, vocab_size : int
        Number of layers, width of the residual stream, inner width of the feed-forward, number of tokens in
        the vocabulary.
    n_heads, n_kv_heads : int
        Number of query heads, and of the key-value heads that they share; `n_heads` is a multiple of
        `n_kv_heads`. Both are 0, as are the dimensions of heads, if no layer has attention.
    key_dim, value_dim : int
        Width of a query or key head, and of a value head.
    context_length : int
        Maximum number of positions that the model was trained for.
    norm_eps : float
        Added to the mean square in RMSNorm, or to the variance in LayerNorm.
    rope_dim : int
        Number of leading dimensions of each head that are rotated; even.
    rope_base : float
        Base of the rotation frequencies: pair i rotates by ``rope_base ** (-2 i / rope_dim)`` radians per
        position.
    rope_style : {"interleaved", "neox"}
        Dimensions rotated as a pair: ``(2i, 2i + 1)``, or ``(i, i + rope_dim / 2)``.
    rope_scaling : {"none", "linear", "yarn"}
        Method that extends the context.
    rope_factor : float
        Factor by which the scaling extends the context.
    rope_original_context : int
        YaRN and LongRoPE: context length before the extension; 0 otherwise.
    rope_attn_factor : float
        Factor of the magnitude of rotated values.
    rope_long : bool
        LongRoPE: whether the factors of long contexts divide the frequencies, or those of short ones.
    rope_beta_fast, rope_beta_slow : float
        YaRN: rotations within the original context between which frequencies are blended (arXiv:2309.00071).
    norm_kind : {"rms", "layer"}
        RMSNorm or LayerNorm.
    activation : {"silu", "gelu", "gelu_erf"}
        Activation of the feed-forward gate, or of its inner layer in models without a gate. ``"gelu"`` is the
        tanh approximation, ``"gelu_erf"`` the exact function.
    embedding_scale : float
        Factor of the embeddings.
    residual_scale : float
        Factor of the attention and feed-forward outputs before they are added to the residual stream.
    logit_scale : float
        Factor of the logits.
    causal : bool
        If True, a token attends to itself and the tokens before it. If False, it attends to the whole text,
        or to half of a window on either side.
    has_head : bool
        Whether the model has logits. If False, as in an encoder, its outputs are hidden states.
    token_types : int
        Number of token types (segments) with embeddings; 0 means that the model has none.
    separator_id : int
        Token that ends a segment: the type of a token is the number of separators before it, at most
        ``token_types - 1``. With -1, every token has type 0.
    max_alibi_bias : float
        ALiBi (arXiv:2108.12409): scores are reduced in proportion to the distance between positions, with a
        slope for each head that follows from this value. 0 means that they are not.
    attention_scale : float
        Factor of q.k; 0 selects ``1 / sqrt(key_dim)``.
    qk_norm_place : {"heads", "rotated_heads", "rows"}
        Input of the norms of q and k, in models that have them: each head, before or after its rotation, or
        all heads of a token together, before the rotation.
    layer_uses_rope : tuple of bool
        Whether each layer rotates; empty if every layer does.
    layer_window : tuple of int
        Number of positions each layer attends to, including the current one; 0 means all. Empty if every
        layer attends to all positions.
    layer_rope_base, layer_rope_factor : tuple of float
        Per-layer values; empty if `rope_base` and `rope_factor` apply to every layer.
    layer_kinds : tuple of LayerKind
        Kind of each layer; empty if every layer has attention. Layers of other kinds keep a state, instead of
        keys and values or together with them.
    conv_taps : int
        Number of tokens that a convolution covers, including the current one; 0 without such layers.
    query_gate : bool
        Whether the query projection also has rows for a gate of each head's output.
    scan_heads, scan_groups, scan_key_dim, scan_value_dim : int
        Layers whose state has a matrix ``[scan_key_dim, scan_value_dim]`` for each head, such as state-space
        layers (Mamba-2, arXiv:2405.21060) and those with a gated delta rule (arXiv:2412.06464): number of
        heads, number of groups of heads that share what they write to their states and read from them by,
        and dimensions; 0 without such layers. Heads of a group are consecutive in state-space layers;
        otherwise group g has heads g, ``g + scan_groups``, and so on.
    """

    architecture: str
    n_layers: int
    dim: int
    n_heads: int
    n_kv_heads: int
    key_dim: int
    value_dim: int
    ffn_dim: int
    vocab_size: int
    context_length: int
    norm_eps: float
    rope_dim: int
    rope_base: float = 10000.0
    rope_style: RopeStyle = "interleaved"
    rope_scaling: RopeScaling = "none"
    rope_factor: float = 1.0
    rope_original_context: int = 0
    rope_attn_factor: float = 1.0
    rope_long: bool = False
    rope_beta_fast: float = 32.0
    rope_beta_slow: float = 1.0
    norm_kind: NormKind = "rms"
    activation: Activation = "silu"
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    causal: bool = True
    has_head: bool = True
    token_types: int = 0
    separator_id: int = -1
    max_alibi_bias: float = 0.0
    attention_scale: float = 0.0
    qk_norm_place: QkNormPlace = "heads"
    layer_uses_rope: tuple[bool, ...] = ()
    layer_window: tuple[int, ...] = ()
    layer_rope_base: tuple[float, ...] = ()
    layer_rope_factor: tuple[float, ...] = ()
    layer_kinds: tuple[LayerKind, ...] = ()
    conv_taps: int = 0
    query_gate: bool = False
    scan_heads: int = 0
    scan_groups: int = 0
    scan_key_dim: int = 0
    scan_value_dim: int = 0

    @property
    def generates(self) -> bool:
        """Whether the model predicts text."""
        return self.causal and self.has_head


def _gemma3_attention_scale(config: ModelConfig) -> float:
    # The 27B model, the only one with 62 layers, scales by the nominal instead of the actual head width. The
    # metadata of its file does not record this.
    return (config.dim / config.n_heads) ** -0.5 if config.n_layers == 62 else 0.0


@dataclass(frozen=True)
class Architecture:
    """The ways in which an architecture differs from `llama`.

    Attributes
    ----------
    qkv_bias, output_bias, gate_bias, up_bias : {"required", "optional", "absent"}
        Presence of the tensors whose rows in ``cpp/tensors.inc`` name the field: biases of q, k and v, of the
        projections with which attention and feed-forward end, of the gate, and of the up projection.
    qk_norm, attn_norm, ffn_norm, post_norms, residual_norms : {"required", "optional", "absent"}
        Presence of norms: of q and k; of the inputs of attention and feed-forward; of their outputs; and of
        the residual stream after each addition to it.
    long_rope : {"required", "optional", "absent"}
        Presence of the factors of LongRoPE.
    embedding_norm, embedding_norm_bias, output_norm : {"required", "optional", "absent"}
        Presence of the norms of the embedding and of the last layer's output.
    positions, token_types : {"required", "optional", "absent"}
        Presence of embeddings of positions and of token types.
    ffn, gate : {"required", "optional", "absent"}
        Presence of the feed-forward, and of its gate.
    ssm_norm : {"required", "optional", "absent"}
        Presence of the norm of the output of state-space layers.
    head : {"tied", "absent"}
        ``"absent"`` for encoders, which have no output projection; ``"tied"`` if the embedding can replace
        it.
    norm_kind : {"rms", "layer"}
        Same as in `ModelConfig`.
    rope : bool
        Whether any layer rotates q and k.
    max_alibi_bias : float
        Same as in `ModelConfig`, for files that do not set it.
    rope_free_every : int
        Every n-th layer does not rotate; 0 means that every layer rotates.
    window : {"required", "optional", "absent"}
        Presence of an attention window in the metadata.
    window_period : int
        Every n-th layer attends to all positions despite the window; 0 means that none does. The metadata may
        set another period, or list the layers.
    window_free_first : bool
        Whether the first layer of each period attends to all positions instead of the last one.
    window_rope : {"same", "own", "only"}
        Rotation of the layers with a window: the same as the other layers; with a separate base and without
        scaling; or the only layers that rotate. Without a window, all layers rotate in the same way.
    causal : bool
        Default of `ModelConfig.causal` for files that do not set it.
    scale_embedding : bool
        Multiply embeddings by ``sqrt(dim)``.
    scales : bool
        Whether the metadata may set the scales of embeddings, residual additions and logits. The logits are
        divided by theirs.
    qk_norm_place : {"heads", "rotated_heads", "rows"}
        Same as in `ModelConfig`.
    mixer : {"attention", "attention_and_state_space"}
        Kind of the layers with attention.
    recurrent : {"short_conv", "state_space", "gated_delta"} or None
        Kind of the layers without attention; None if every layer has it.
    attention_every : int
        Every n-th layer has attention, unless the metadata set another period or list the layers. 0: the
        layers with key-value heads in the metadata have it.
    rope_switch : bool
        Whether the metadata can say that no layer rotates.
    query_gate : bool
        Same as in `ModelConfig`.
    ignored : mapping of str to str
        Patterns of tensors that files may have for other purposes than the text model, and their purposes.
    names : mapping of str to str
        Names of tensors, by role, that differ from those in ``cpp/tensors.inc``.
    fused : mapping of str to tuple of str
        Layer tensors that may hold the rows of several tensors in sequence, and the roles of those tensors.
    """

    rope_style: RopeStyle = "interleaved"
    activation: Activation = "silu"
    norm_kind: NormKind = "rms"
    qkv_bias: Presence = "absent"
    output_bias: Presence = "absent"
    gate_bias: Presence = "absent"
    up_bias: Presence = "absent"
    qk_norm: Presence = "absent"
    attn_norm: Presence = "required"
    ffn_norm: Presence = "required"
    post_norms: Presence = "absent"
    long_rope: Presence = "absent"
    residual_norms: Presence = "absent"
    embedding_norm: Presence = "absent"
    embedding_norm_bias: Presence = "absent"
    output_norm: Presence = "required"
    positions: Presence = "absent"
    token_types: Presence = "absent"
    ffn: Presence = "required"
    gate: Presence = "required"
    ssm_norm: Presence = "optional"
    head: Literal["tied", "absent"] = "tied"
    rope: bool = True
    max_alibi_bias: float = 0.0
    rope_free_every: int = 0
    window: Presence = "absent"
    window_period: int = 0
    window_free_first: bool = False
    window_rope: WindowRope = "same"
    scale_embedding: bool = False
    scales: bool = False
    qk_norm_place: QkNormPlace = "heads"
    causal: bool = True
    mixer: LayerKind = "attention"
    recurrent: LayerKind | None = None
    attention_every: int = 0
    rope_switch: bool = False
    query_gate: bool = False
    ignored: Mapping[str, str] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    attention_scale: Callable[[ModelConfig], float] = lambda _: 0.0


_GEMMA3 = Architecture(
    rope_style="neox",
    activation="gelu",
    qk_norm="required",
    post_norms="required",
    window="required",
    window_period=6,
    window_rope="own",
    scale_embedding=True,
    attention_scale=_gemma3_attention_scale,
)

# An encoder that norms the residual stream after each block.
_BERT = Architecture(
    norm_kind="layer",
    activation="gelu_erf",
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
    token_types="optional",
    gate="absent",
    head="absent",
    rope=False,
    causal=False,
)

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(
        qkv_bias="optional", output_bias="optional", gate_bias="optional", up_bias="optional"
    ),
    "qwen2": Architecture(rope_style="neox", qkv_bias="required"),
    "qwen3": Architecture(rope_style="neox", qk_norm="required"),
    "smollm3": Architecture(rope_free_every=4),
    "granite": Architecture(qkv_bias="optional", scales=True),
    "hunyuan-dense": Architecture(rope_style="neox", qk_norm="required", qk_norm_place="rotated_heads"),
    "olmo2": Architecture(
        rope_style="neox",
        qk_norm="required",
        qk_norm_place="rows",
        attn_norm="absent",
        ffn_norm="absent",
        post_norms="required",
    ),
    "exaone4": Architecture(
        rope_style="neox",
        qk_norm="required",
        attn_norm="absent",
        ffn_norm="absent",
        post_norms="required",
        window="optional",
        window_period=4,
        window_rope="only",
    ),
    "ernie4_5": Architecture(qkv_bias="optional"),
    "phi3": Architecture(
        rope_style="neox",
        long_rope="optional",
        window="optional",
        fused={"attn_qkv.weight": ("wq", "wk", "wv"), "ffn_up.weight": ("w_gate", "w_up")},
    ),
    "lfm2": Architecture(
        rope_style="neox",
        qk_norm="required",
        recurrent="short_conv",
        names={"output_norm": "token_embd_norm.weight"},
    ),
    "granitehybrid": Architecture(
        recurrent="state_space", qkv_bias="optional", ssm_norm="required", scales=True, rope_switch=True
    ),
    "mamba2": Architecture(
        recurrent="state_space", ssm_norm="required", ffn="absent", ffn_norm="absent", gate="absent"
    ),
    "falcon-h1": Architecture(
        rope_style="neox",
        mixer="attention_and_state_space",
        names={"ffn_norm": "blk.{layer}.ffn_norm"},  # as its files have it, without a suffix
    ),
    "qwen35": Architecture(
        rope_style="neox",
        qk_norm="required",
        recurrent="gated_delta",
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
    "gemma3": _GEMMA3,
    "gemma-embedding": replace(_GEMMA3, causal=False),
    "bert": _BERT,
    "nomic-bert": replace(
        _BERT,
        rope_style="neox",
        activation="silu",
        qkv_bias="optional",
        output_bias="optional",
        up_bias="absent",
        positions="absent",
        gate="required",
        rope=True,
        fused={"attn_qkv.weight": ("wq", "wk", "wv"), "attn_qkv.bias": ("bq", "bk", "bv")},
    ),
    "jina-bert-v2": replace(
        _BERT,
        up_bias="absent",
        positions="absent",
        gate="required",
        max_alibi_bias=8.0,
        fused={"ffn_up.weight": ("w_gate", "w_up")},
    ),
    "modern-bert": Architecture(
        norm_kind="layer",
        rope_style="neox",
        activation="gelu_erf",
        attn_norm="optional",  # the first layer has none, as the embedding is normed
        embedding_norm="required",
        head="absent",
        window="required",
        window_period=3,
        window_free_first=True,
        window_rope="own",
        causal=False,
        fused={"attn_qkv.weight": ("wq", "wk", "wv"), "ffn_up.weight": ("w_gate", "w_up")},
    ),
    "eurobert": Architecture(rope_style="neox", head="absent", causal=False),
}

DEFAULT_WINDOW_ROPE_BASE = 10000.0  # for layers with a window, in every published gemma3 model

# Tensor types that are supported for matrices; vectors are F32.
MATRIX_TYPES = tuple(_core.tensor_types())

# Keys that change the forward pass in ways that are not implemented, and the value that has no effect.
UNSUPPORTED_KEYS: dict[str, float] = {
    "expert_count": 0,  # mixture of experts
    "attn_logit_softcapping": 0,
    "final_logit_softcapping": 0,
    "attention.clamp_kqv": 0,
    "rope.scaling.yarn_ext_factor": 1,
    "rope.scaling.yarn_log_multiplier": 0,
}

NORM_EPS_KEYS: dict[NormKind, str] = {
    "rms": "attention.layer_norm_rms_epsilon",
    "layer": "attention.layer_norm_epsilon",
}

# Keys that are valid only for architectures with the trait `scales`.
SCALE_KEYS = ("embedding_scale", "residual_scale", "logit_scale")

_ENUMS = {
    "rope_style": _core.RopeStyle,
    "rope_scaling": _core.RopeScaling,
    "activation": _core.Activation,
    "qk_norm_place": _core.QkNormPlace,
    "norm_kind": _core.NormKind,
    "layer_kinds": _core.LayerKind,
}


def core_config(config: ModelConfig) -> _core.Config:
    """Convert a configuration to the engines' representation."""
    core = _core.Config()
    for name in (item.name for item in fields(config)):
        value = getattr(config, name)
        if isinstance(value, tuple):
            value = [_ENUMS[name][item.upper()] if name in _ENUMS else item for item in value]
        elif name in _ENUMS:
            value = _ENUMS[name][value.upper()]
        setattr(core, name, value)
    return core


def read_config(gguf: GGUFFile, max_context: int | None = None) -> ModelConfig:
    """Read and check the hyperparameters of a file.

    Parameters
    ----------
    gguf
        The file.
    max_context
        Largest position that the model is opened for; None selects that of the file. It decides which factors
        of LongRoPE a model uses. With those of short contexts, its context length is the original one.

    Raises
    ------
    GGUFError
        Required metadata is missing, of the wrong type, out of range or contradictory.
    UnsupportedModelError
        The architecture, or a feature that the file requires, is not implemented.
    """
    keys = Keys(gguf)
    name = keys.architecture
    traits = ARCHITECTURES.get(name)
    if traits is None:
        near = difflib.get_close_matches(name, ARCHITECTURES, n=1, cutoff=0.5)
        raise UnsupportedModelError(
            f"{gguf.path}: architecture {name} is not supported; "
            + (f"the nearest that is supported is {near[0]}; " if near else "")
            + f"supported are {', '.join(ARCHITECTURES)}. To ask for it, use the project's issue form "
            "'A model that does not open'"
        )
    _refuse_unsupported(keys, traits)

    n_blocks = keys.positive("block_count")
    if n_blocks > len(gguf.tensors):
        raise keys.error(
            f"{name}.block_count is {n_blocks}, but the file has only {len(gguf.tensors)} tensors"
        )
    n_layers = n_blocks - _prediction_layers(keys, traits, n_blocks)
    dim = keys.positive("embedding_length")
    n_heads, n_kv_heads, kinds = _heads(keys, traits, n_layers, n_blocks)
    key_dim = _head_dim(keys, "attention.key_length", dim, n_heads)
    value_dim = _head_dim(keys, "attention.value_length", dim, n_heads)
    if n_heads * max(key_dim, value_dim) > MAX_INT:
        raise keys.error(f"{n_heads} heads of {max(key_dim, value_dim)} dimensions are more than {MAX_INT}")
    rope_dim = keys.positive("rope.dimension_count", default=key_dim) if n_heads else 0
    if rope_dim > key_dim or rope_dim % 2:
        raise keys.error(
            f"{name}.rope.dimension_count is {rope_dim}, must be even and at most the head width {key_dim}"
        )
    scales = {suffix: keys.positive_float(suffix, default=1.0) for suffix in SCALE_KEYS}
    config = ModelConfig(
        architecture=name,
        n_layers=n_layers,
        dim=dim,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        ffn_dim=keys.positive_each_layer("feed_forward_length", n_layers) if traits.ffn != "absent" else 0,
        vocab_size=_vocab_size(keys),
        context_length=keys.positive("context_length"),
        norm_kind=traits.norm_kind,
        norm_eps=keys.positive_float(NORM_EPS_KEYS[traits.norm_kind]),
        rope_dim=rope_dim,
        rope_base=keys.positive_float("rope.freq_base", default=10000.0),
        rope_style=traits.rope_style,
        activation=traits.activation,
        causal=keys.boolean("attention.causal", default=traits.causal),
        has_head=traits.head != "absent",
        token_types=_token_types(keys, traits),
        max_alibi_bias=keys.number(f"{name}.attention.max_alibi_bias", default=traits.max_alibi_bias),
        separator_id=_separator_id(keys) if traits.token_types != "absent" else -1,
        embedding_scale=math.sqrt(dim) if traits.scale_embedding else scales["embedding_scale"],
        residual_scale=scales["residual_scale"],
        logit_scale=1 / scales["logit_scale"],
        qk_norm_place=traits.qk_norm_place,
        attention_scale=keys.positive_float("attention.scale", default=0.0),
        layer_kinds=kinds,
        conv_taps=_conv_taps(keys, dim) if "short_conv" in kinds else 0,
        query_gate=traits.query_gate,
    )
    if any(has_matrix_state(kind) for kind in kinds):
        config = _with_scan(config, keys)
    if config.query_gate and key_dim != value_dim:
        raise keys.unsupported(
            f"{name}.attention.value_length {value_dim} differs from attention.key_length {key_dim}, the "
            "width of the gates"
        )
    config = _with_rope_scaling(config, keys)
    if traits.long_rope != "absent":
        config = _with_long_rope(config, keys, max_context)
    config = _with_layer_kinds(config, keys, traits)
    return (
        config if config.attention_scale else replace(config, attention_scale=traits.attention_scale(config))
    )


def collect_tensors(gguf: GGUFFile, config: ModelConfig) -> list[tuple[str, int, TensorInfo]]:
    """Find the tensor of every role, and check its shape and type.

    Returns
    -------
    list of (role, layer, TensorInfo)
        The roles are the rows of ``cpp/tensors.inc``; `layer` is -1 for tensors outside the layers. If the
        output projection is tied to the embedding, its role has the embedding's tensor.

    Raises
    ------
    GGUFError
        A tensor is missing, or its shape contradicts the configuration.
    UnsupportedModelError
        A tensor has a type that is not implemented, or is not part of the architecture.
    """
    found = list(_find_tensors(gguf, config))
    used = {tensor.name for _, _, tensor in found} | HEAD_TENSORS | ignored_tensors(gguf, config).keys()
    for name in gguf.tensors:
        if name not in used:
            raise UnsupportedModelError(
                f"{gguf.path}: tensor {name} is not part of a {config.architecture} model "
                f"with {config.n_layers} layers"
            )
    return found


def has_attention(kind: LayerKind | None) -> bool:
    """Return whether a layer of a kind keeps keys and values."""
    return kind in ("attention", "attention_and_state_space")


def has_matrix_state(kind: LayerKind | None) -> bool:
    """Return whether the state of a layer of a kind has a matrix for each head."""
    return kind in ("state_space", "attention_and_state_space", "gated_delta")


def ignored_tensors(gguf: GGUFFile, config: ModelConfig) -> dict[str, str]:
    """Return the tensors of a file that the text model does not use, and what each of them is for."""
    patterns = dict(ARCHITECTURES[config.architecture].ignored)
    if patterns:
        last = range(config.n_layers, Keys(gguf).positive("block_count"))
        patterns |= {f"blk.{layer}.*": "multi-token prediction" for layer in last}
    found: dict[str, str] = {}
    for name in gguf.tensors:
        for pattern, purpose in patterns.items():
            if fnmatchcase(name, pattern):
                found[name] = purpose
                break
    return found


def layer_kind(config: ModelConfig, layer: int) -> LayerKind:
    """Return the kind of a layer."""
    return config.layer_kinds[layer] if config.layer_kinds else "attention"


def tensor_name(traits: Architecture, spec: _core.TensorSpec, layer: int) -> str:
    """Return the name of a tensor in files of an architecture."""
    return traits.names.get(spec.role, spec.name).format(layer=layer)


def expected_tensors(config: ModelConfig) -> Iterator[tuple[_core.TensorSpec, int, str]]:
    """Yield every tensor that a model can have: its table row, its layer and its presence.

    The presence is ``"required"``, ``"optional"``, or ``"tied"`` if the embedding can replace the tensor.
    """
    traits = ARCHITECTURES[config.architecture]
    specs = _core.tensors(core_config(config))
    for layer in range(-1, config.n_layers):
        kind = _core.LayerKind[layer_kind(config, layer).upper()] if layer >= 0 else None
        for spec in specs:
            if kind is not None and not spec.is_in(kind):
                continue
            presence = presence_of(spec.presence, traits)
            if spec.per_layer == (layer >= 0) and presence != "absent":
                yield spec, layer, presence


def presence_of(stated: str, traits: Architecture) -> str:
    """Return "required", "optional", "absent" or "tied" for the presence that a row of the table states."""
    if stated in ("required", "optional"):
        return stated
    presence = getattr(traits, stated)
    assert isinstance(presence, str)
    return presence


def _find_tensors(gguf: GGUFFile, config: ModelConfig) -> Iterator[tuple[str, int, TensorInfo]]:
    specs = _core.tensors(core_config(config))
    embedding = next(s.name for s in specs if s.role == "token_embedding")
    shapes = {spec.role: spec.shape for spec in specs}
    names = {spec.role: spec.name for spec in specs}
    traits = ARCHITECTURES[config.architecture]
    parts = {role: (name, roles) for name, roles in traits.fused.items() for role in roles}
    for spec, layer, presence in expected_tensors(config):
        if spec.role in parts:
            whole, roles = parts[spec.role]
            whole = f"blk.{layer}.{whole}"
            own = {names[role].format(layer=layer) for role in roles}
            if whole in gguf.tensors and not (own - {whole}) & gguf.tensors.keys():
                yield spec.role, layer, _part(gguf, whole, {role: shapes[role] for role in roles}, spec.role)
                continue
        name = tensor_name(traits, spec, layer)
        tensor = gguf.tensors.get(name)
        if tensor is not None:
            if spec.shape[0] == 1 and tensor.shape == spec.shape[1:]:  # a matrix of one row, as a vector
                tensor = replace(tensor, shape=spec.shape)
            _check_tensor(gguf, tensor, spec.shape, MATRIX_TYPES if spec.kind == "matrix" else ("F32",))
            yield spec.role, layer, tensor
        elif presence == "required":
            raise GGUFError(f"{gguf.path}: tensor {name} is missing{_or_part(parts, spec.role, layer, name)}")
        elif presence == "tied":
            yield spec.role, layer, gguf.tensors[embedding]


def _or_part(parts: Mapping[str, tuple[str, tuple[str, ...]]], role: str, layer: int, name: str) -> str:
    """Return, for messages, the other tensor that may hold the rows of a role."""
    whole = f"blk.{layer}.{parts[role][0]}" if role in parts else name
    return f", as is {whole}, which may contain it" if whole != name else ""


def _part(gguf: GGUFFile, name: str, shapes: Mapping[str, tuple[int, ...]], role: str) -> TensorInfo:
    """Return the rows of one role in a fused tensor that holds several roles in the order of `shapes`."""
    tensor = gguf.tensors[name]
    rows = {other: shape[0] for other, shape in shapes.items()}
    types = MATRIX_TYPES if len(shapes[role]) == 2 else ("F32",)
    _check_tensor(gguf, tensor, (sum(rows.values()), *shapes[role][1:]), types)
    row_bytes = tensor.nbytes // sum(rows.values())
    before = sum(rows[other] for other in list(rows)[: list(rows).index(role)])
    return replace(
        tensor,
        shape=shapes[role],
        offset=tensor.offset + before * row_bytes,
        nbytes=rows[role] * row_bytes,
    )


def _check_tensor(gguf: GGUFFile, tensor: TensorInfo, shape: tuple[int, ...], types: tuple[str, ...]) -> None:
    if tensor.shape != shape:
        raise GGUFError(
            f"{gguf.path}: tensor {tensor.name} has shape {tensor.shape}, the metadata requires {shape}"
        )
    if tensor.type_name not in types:
        raise UnsupportedModelError(
            f"{gguf.path}: tensor {tensor.name} has type {tensor.type_name}; "
            f"supported types are {', '.join(types)}"
        )


def _refuse_unsupported(keys: Keys, traits: Architecture) -> None:
    refused = UNSUPPORTED_KEYS if traits.scales else UNSUPPORTED_KEYS | dict.fromkeys(SCALE_KEYS, 1.0)
    for suffix, neutral in refused.items():
        key = f"{keys.architecture}.{suffix}"
        value = keys.number(key, default=neutral)
        if value != neutral:
            raise keys.unsupported(f"{key} = {value} is not supported")
    if not traits.max_alibi_bias and keys.number(f"{keys.architecture}.attention.max_alibi_bias", default=0):
        raise keys.unsupported(f"attention.max_alibi_bias is not supported for {keys.architecture}")
    if traits.window == "absent" and keys.number(f"{keys.architecture}.attention.sliding_window", default=0):
        raise keys.unsupported(f"attention.sliding_window is not supported for {keys.architecture}")
    parts = keys.number("split.count", default=0)
    if parts > 1:
        raise keys.unsupported(f"the model is split into {parts} files; merge them first")


def _prediction_layers(keys: Keys, traits: Architecture, n_blocks: int) -> int:
    """Return the number of blocks after the layers, which predict several tokens and are ignored."""
    if not traits.ignored or not keys.has("nextn_predict_layers"):
        return 0
    stated = int(keys.number(f"{keys.architecture}.nextn_predict_layers", default=0))
    if not 0 <= stated < n_blocks:
        raise keys.error(
            f"{keys.architecture}.nextn_predict_layers is {stated}, must be below block_count {n_blocks}"
        )
    return stated


def _heads(
    keys: Keys, traits: Architecture, n_layers: int, n_blocks: int
) -> tuple[int, int, tuple[LayerKind, ...]]:
    """Return the numbers of query and of key-value heads, and the kinds of layers."""
    name = keys.architecture
    if traits.recurrent and keys.number(f"{name}.attention.head_count", default=-1) == 0:
        return 0, 0, (traits.recurrent,) * n_layers
    n_heads = keys.positive_each_layer("attention.head_count", n_layers)
    kinds: tuple[LayerKind, ...]
    if traits.recurrent:
        counts = keys.count_each_layer("attention.head_count_kv", n_blocks)[:n_layers]
        n_kv_heads = max(counts)
        if n_kv_heads == 0:
            raise keys.unsupported(f"{name}.attention.head_count_kv is 0 in every layer: none has attention")
        attends = _layers_with_attention(keys, traits, counts, n_blocks)
        kinds = tuple(traits.mixer if has else traits.recurrent for has in attends)
    else:
        n_kv_heads = keys.positive_each_layer("attention.head_count_kv", n_layers, default=n_heads)
        kinds = () if traits.mixer == "attention" else (traits.mixer,) * n_layers
    if n_heads % n_kv_heads:
        raise keys.error(
            f"{name}.attention.head_count {n_heads} is not a multiple of "
            f"{name}.attention.head_count_kv {n_kv_heads}"
        )
    return n_heads, n_kv_heads, kinds


def _layers_with_attention(
    keys: Keys, traits: Architecture, kv_heads: tuple[int, ...], n_blocks: int
) -> tuple[bool, ...]:
    if not traits.attention_every or 0 in kv_heads:
        return tuple(heads > 0 for heads in kv_heads)
    key = "attention.recurrent_layers"
    if keys.has(key):
        attends = tuple(not recurrent for recurrent in keys.flag_each_layer(key, n_blocks))
    else:
        n = keys.positive("full_attention_interval", default=traits.attention_every)
        attends = tuple((layer + 1) % n == 0 for layer in range(n_blocks))
    if not any(attends[: len(kv_heads)]):
        raise keys.unsupported("no layer has attention")
    return attends[: len(kv_heads)]


def _with_scan(config: ModelConfig, keys: Keys) -> ModelConfig:
    """Read the shape of the layers whose state has matrices."""
    name = keys.architecture
    inner, state = keys.positive("ssm.inner_size"), keys.positive("ssm.state_size")
    heads, groups = keys.positive("ssm.time_step_rank"), keys.positive("ssm.group_count", default=1)
    if inner % heads:
        raise keys.error(
            f"{name}.ssm.inner_size {inner} is not a multiple of {name}.ssm.time_step_rank {heads}"
        )
    if heads % groups:
        raise keys.error(
            f"{name}.ssm.time_step_rank {heads} is not a multiple of {name}.ssm.group_count {groups}"
        )
    if 2 * inner + 2 * groups * state + 2 * heads > MAX_INT:
        raise keys.error(
            f"{name}.ssm.inner_size {inner}, ssm.state_size {state} and ssm.group_count {groups}: their "
            f"projections have more than {MAX_INT} rows"
        )
    taps = _taps(keys, "ssm.conv_kernel")
    return replace(
        config,
        conv_taps=taps,
        scan_heads=heads,
        scan_groups=groups,
        scan_key_dim=state,
        scan_value_dim=inner // heads,
    )


def _taps(keys: Keys, suffix: str) -> int:
    taps = keys.positive(suffix)
    if taps < 2:
        raise keys.error(f"{keys.architecture}.{suffix} is {taps}, must be at least 2")
    return taps


def _conv_taps(keys: Keys, dim: int) -> int:
    taps = _taps(keys, "shortconv.l_cache")
    if dim > MAX_INT // 3:
        raise keys.error(f"{keys.architecture}.embedding_length {dim} is more than {MAX_INT // 3}")
    return taps


def _head_dim(keys: Keys, suffix: str, dim: int, n_heads: int) -> int:
    if n_heads == 0:
        return 0
    if not keys.has(suffix) and dim % n_heads:
        raise keys.error(
            f"{keys.architecture}.{suffix} is missing, and embedding_length {dim} "
            f"is not a multiple of attention.head_count {n_heads}"
        )
    return keys.positive(suffix, default=dim // n_heads)


def _vocab_size(keys: Keys) -> int:
    tokens = "tokenizer.ggml.tokens"
    listed = keys.gguf.metadata.length(tokens) if tokens in keys.gguf.metadata else None
    stated = keys.positive("vocab_size") if listed is None or keys.has("vocab_size") else listed
    if listed is not None and stated != listed:
        raise keys.error(f"{keys.architecture}.vocab_size is {stated}, but {tokens} lists {listed} tokens")
    if not 0 < stated <= MAX_INT:
        raise keys.error(f"{tokens} lists {stated} tokens")
    return stated


def _token_types(keys: Keys, traits: Architecture) -> int:
    tensor = keys.gguf.tensors.get("token_types.weight")
    if traits.token_types == "absent" or tensor is None:
        return 0
    key = "tokenizer.ggml.token_type_count"
    # A single row is stored as a vector by some converters.
    rows = tensor.shape[0] if len(tensor.shape) == 2 else 1
    stated = keys.number(key, default=rows)
    if stated != rows:
        raise keys.error(f"{key} is {stated}, but token_types.weight has {rows} rows")
    return rows


def _separator_id(keys: Keys) -> int:
    key = "tokenizer.ggml.seperator_token_id"  # the format's spelling
    value = keys.number(key, default=-1)
    if not -1 <= value <= MAX_INT:
        raise keys.error(f"{key} is {value}, must be between 0 and {MAX_INT}")
    return int(value)


def _with_rope_scaling(config: ModelConfig, keys: Keys) -> ModelConfig:
    attn_factor = keys.positive_float("rope.scaling.attn_factor", default=1.0)
    # A factor without a type means linear scaling. Files from before the type existed use another key for the
    # factor.
    factor_key = "rope.scaling.factor" if keys.has("rope.scaling.factor") else "rope.scale_linear"
    kind = keys.string("rope.scaling.type", default="linear" if keys.has(factor_key) else "none")
    config = replace(config, rope_attn_factor=attn_factor)
    if kind == "longrope" and ARCHITECTURES[config.architecture].long_rope != "absent":
        if (factor := keys.positive_float(factor_key, default=1.0)) != 1:
            raise keys.unsupported(f"{factor_key} {factor} together with LongRoPE is not supported")
        return config
    if kind == "none":
        return config
    if kind not in ("linear", "yarn"):
        raise keys.unsupported(
            f"rope scaling of type {kind} is not supported; supported are none, linear, yarn"
        )
    factor = keys.positive_float(factor_key)
    if kind == "linear":
        return replace(config, rope_scaling="linear", rope_factor=factor)
    if config.rope_base <= 1:
        raise keys.error(
            f"{keys.architecture}.rope.freq_base is {config.rope_base}, must be greater than 1 for YaRN"
        )
    return replace(
        config,
        rope_scaling="yarn",
        rope_factor=factor,
        rope_original_context=keys.positive("rope.scaling.original_context_length"),
        rope_attn_factor=attn_factor * keys.positive_float("rope.scaling.yarn_attn_factor", default=1.0),
        rope_beta_fast=keys.positive_float("rope.scaling.yarn_beta_fast", default=32.0),
        rope_beta_slow=keys.positive_float("rope.scaling.yarn_beta_slow", default=1.0),
    )


LONG_ROPE_TENSORS = ("rope_factors_long.weight", "rope_factors_short.weight")


def _with_long_rope(config: ModelConfig, keys: Keys, max_context: int | None) -> ModelConfig:
    """Choose the factors of LongRoPE by the positions that the model is opened for.

    All keys in a cache must have the same rotation, so the choice is made once per model and not, for
    instance, when a session exceeds the original context.
    """
    missing = [name for name in LONG_ROPE_TENSORS if name not in keys.gguf.tensors]
    if len(missing) == 2 and keys.string("rope.scaling.type", default="none") != "longrope":
        return config
    if missing:
        raise keys.error(f"tensor {missing[0]} is missing, which LongRoPE requires")
    original = keys.positive("rope.scaling.original_context_length")
    long = min(config.context_length, max_context or config.context_length) > original
    return replace(
        config,
        rope_original_context=original,
        rope_long=long,
        context_length=config.context_length if long else min(original, config.context_length),
    )


def _with_layer_kinds(config: ModelConfig, keys: Keys, traits: Architecture) -> ModelConfig:
    layers = range(config.n_layers)
    if not traits.rope or (traits.rope_switch and not keys.boolean("rope.scaling.finetuned", default=True)):
        return replace(config, layer_uses_rope=(False,) * config.n_layers)
    if traits.rope_free_every:
        uses_rope = tuple((layer + 1) % traits.rope_free_every != 0 for layer in layers)
        return replace(config, layer_uses_rope=uses_rope)
    stated = keys.number(f"{keys.architecture}.attention.sliding_window", default=0)
    if traits.window == "absent" or (traits.window == "optional" and stated == 0):
        return config
    window = keys.positive("attention.sliding_window")
    windowed = (True,) * config.n_layers
    if traits.window_period:
        pattern = "attention.sliding_window_pattern"
        windowed = keys.each_layer_but_every_nth(
            pattern, config.n_layers, default=traits.window_period, first=traits.window_free_first
        )
    config = replace(config, layer_window=tuple(window if w else 0 for w in windowed))
    if traits.window_rope == "same":
        return config
    if traits.window_rope == "only":
        return replace(config, layer_uses_rope=windowed)
    window_base = keys.positive_float("rope.freq_base_swa", default=DEFAULT_WINDOW_ROPE_BASE)
    return replace(
        config,
        layer_rope_base=tuple(window_base if w else config.rope_base for w in windowed),
        layer_rope_factor=tuple(1.0 if w else config.rope_factor for w in windowed),
    )
