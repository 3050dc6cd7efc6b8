"""The hyperparameters of a model, as the package and its engines use them."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

RopeStyle: TypeAlias = Literal["interleaved", "neox"]
RopeScaling: TypeAlias = Literal["none", "linear", "yarn"]
Activation: TypeAlias = Literal["silu", "gelu", "gelu_erf", "relu", "clamped_silu"]
NormKind: TypeAlias = Literal["rms", "layer"]
QkNormPlace: TypeAlias = Literal["heads", "rotated_heads", "rows"]
LayerKind: TypeAlias = Literal[
    "attention", "short_conv", "state_space", "attention_and_state_space", "gated_delta"
]


FeedForwardKind: TypeAlias = Literal["none", "dense", "experts"]
RouterScore: TypeAlias = Literal["softmax", "sigmoid"]


@dataclass(frozen=True)
class ModelConfig:
    """Hyperparameters of a model.

    Attributes
    ----------
    architecture : str
        ``general.architecture`` of the file.
    n_layers, dim, ffn_dim, vocab_size : int
        Number of layers, width of the residual stream, inner width of the dense feed-forward (0 if no layer
        has one), number of tokens in the vocabulary.
    distinct_layers : int
        Number of layers with weights of their own: layer n has those of layer ``n % distinct_layers``. 0 if
        every layer has its own.
    embedding_dim : int
        Number of columns of the embeddings if a projection to `dim` follows; 0 if none does.
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
    activation : {"silu", "gelu", "gelu_erf", "relu", "clamped_silu"}
        Activation of the feed-forward gate, or of its inner layer in models without a gate. ``"gelu"`` is the
        tanh approximation, ``"gelu_erf"`` the exact function. ``"clamped_silu"`` is the gate of gpt-oss:
        ``g * sigmoid(1.702 * g) * (u + 1)`` of the gate g, at most 7, and the up projection u, limited to
        -7 and 7.
    embedding_scale : float
        Factor of the embeddings.
    residual_scale : float
        Factor of the attention and feed-forward outputs before they are added to the residual stream.
    logit_scale : float
        Factor of the logits.
    parallel : bool
        Whether attention and feed-forward of a layer read the same input. If False, the feed-forward reads
        the sum of that input and the output of attention.
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
    score_cap, logit_cap : float
        Soft limits of scores and of logits: x becomes ``cap * tanh(x / cap)``, scores before the bias of
        ALiBi; 0 without one.
    attention_scale : float
        Factor of q.k; 0 selects ``1 / sqrt(key_dim)``.
    relative_rows : int
        Number of relative positions with a key and a query (arXiv:2006.03654), with which content is compared
        as well; 0 without them.
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
    layer_feed_forwards : tuple of {"none", "dense", "experts"}
        Kind of the feed-forward of each layer; empty if all are dense, or if there is none and `ffn_dim` is
        0.
    n_experts, experts_used : int
        Number of experts of a layer, and of those that a token goes through; 0 without experts.
    expert_dim, shared_dim : int
        Inner width of an expert, and of an additional one that every token goes through; 0 without them.
    router_score : {"softmax", "sigmoid"}
        Function of the router's products whose values decide between the experts of a token and are the
        factors of their outputs.
    normalize_routes : bool
        Whether the factors of a token are divided by their sum.
    route_scale : float
        Factor of the outputs of experts.
    conv_taps : int
        Number of tokens that a convolution covers, including the current one; 0 without such layers.
    per_layer_dim : int
        Width of the input that each layer has from the token itself, in addition to the residual stream; 0
        without such inputs.
    value_norm : bool
        Whether each value head is divided by the root of its mean square.
    layer_rope_freqs : tuple of bool
        Whether the factors in ``rope_freqs.weight`` divide the frequencies of each layer; empty if they do
        in every layer.
    layer_cache : tuple of int
        Layer whose keys and values each layer attends to: itself, or an earlier one. Empty if every layer
        has its own.
    layer_kv_heads, layer_head_dim, layer_rope_dim, layer_ffn_dim : tuple of int
        Per-layer values of `n_kv_heads`, of `key_dim` and `value_dim`, of `rope_dim` and of `ffn_dim`, which
        are then the largest; empty if these apply to every layer.
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
    distinct_layers: int = 0
    embedding_dim: int = 0
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
    parallel: bool = False
    causal: bool = True
    has_head: bool = True
    token_types: int = 0
    separator_id: int = -1
    max_alibi_bias: float = 0.0
    score_cap: float = 0.0
    logit_cap: float = 0.0
    attention_scale: float = 0.0
    relative_rows: int = 0
    qk_norm_place: QkNormPlace = "heads"
    layer_uses_rope: tuple[bool, ...] = ()
    layer_window: tuple[int, ...] = ()
    layer_rope_base: tuple[float, ...] = ()
    layer_rope_factor: tuple[float, ...] = ()
    layer_kinds: tuple[LayerKind, ...] = ()
    layer_feed_forwards: tuple[FeedForwardKind, ...] = ()
    n_experts: int = 0
    experts_used: int = 0
    expert_dim: int = 0
    shared_dim: int = 0
    router_score: RouterScore = "softmax"
    normalize_routes: bool = False
    route_scale: float = 1.0
    conv_taps: int = 0
    query_gate: bool = False
    per_layer_dim: int = 0
    value_norm: bool = False
    layer_rope_freqs: tuple[bool, ...] = ()
    layer_cache: tuple[int, ...] = ()
    layer_kv_heads: tuple[int, ...] = ()
    layer_head_dim: tuple[int, ...] = ()
    layer_rope_dim: tuple[int, ...] = ()
    layer_ffn_dim: tuple[int, ...] = ()
    scan_heads: int = 0
    scan_groups: int = 0
    scan_key_dim: int = 0
    scan_value_dim: int = 0

    @property
    def generates(self) -> bool:
        """Whether the model predicts text."""
        return self.causal and self.has_head


def has_attention(kind: LayerKind | None) -> bool:
    """Return whether a layer of a kind keeps keys and values."""
    return kind in ("attention", "attention_and_state_space")


def has_matrix_state(kind: LayerKind | None) -> bool:
    """Return whether the state of a layer of a kind has a matrix for each head."""
    return kind in ("state_space", "attention_and_state_space", "gated_delta")


def layer_kind(config: ModelConfig, layer: int) -> LayerKind:
    return config.layer_kinds[layer] if config.layer_kinds else "attention"
