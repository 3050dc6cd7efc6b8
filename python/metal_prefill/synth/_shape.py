"""Shapes of synthetic models."""

import math
from dataclasses import dataclass

from metal_prefill.files._architecture import ARCHITECTURES, Architecture
from metal_prefill.files._metadata_keys import MAX_INT
from metal_prefill.files._model_config import LayerKind, has_attention, has_matrix_state
from metal_prefill.files._task_config import NUMBERED_POOLINGS
from metal_prefill.synth._layers import (
    ExpertShape,
    LayerShape,
    ScanShape,
    check_experts,
    check_layers,
    check_scan,
)
from metal_prefill.synth._tokenizer import VOCABULARIES

TIED = "tied"  # output type without an output tensor: the embedding is the head
ROPE_SCALINGS = ("none", "linear", "yarn", "llama3", "longrope")


@dataclass(frozen=True)
class ModelShape:
    """Properties of a model, except the values and types of its weights.

    Attributes
    ----------
    layers, dim, heads, kv_heads, head_dim, ffn, vocab, context
        Dimensions. `dim` is the width of the residual stream; heads * head_dim may differ from it.
    architecture
        Architecture name, which determines the norms and biases of the layers.
    value_dim
        Width of a value head; None selects `head_dim`.
    window
        Size of the sliding attention window in positions; None if the architecture has none.
    qkv_bias
        Whether q, k and v have biases, in architectures where they are optional.
    all_biases
        Whether all projections have biases, in architectures where they are optional.
    parallel
        Whether attention and feed-forward of a layer read the same input, in files that set it.
    all_norms
        Whether q and k have norms, and layers a second residual norm, in architectures where they are
        optional.
    position_bias
        Whether scores have a bias by relative positions, in architectures where it is optional.
    embedding_dim
        Columns of the embeddings if a projection follows, where that is optional; 0 if none does.
    relative_rows
        Number of relative positions with keys and queries, in architectures that have them.
    output_type
        Tensor type of a separate output head, or "tied".
    tokenizer
        "gpt2" (byte-level BPE), "llama" (SentencePiece) or "bert" (WordPiece).
    rope_base
        Base of RoPE's frequencies.
    rope_dims
        Number of leading dimensions of a head that RoPE rotates. None selects all of them, the only setting
        that llama.cpp supports.
    rope_scaling
        "none", "linear", "yarn", "llama3": the frequency factors of Llama 3 as a tensor `rope_freqs`, or
        "longrope": factors for long and for short contexts, in architectures that support them.
    rope_factor
        Factor by which the scaling extends the context.
    original_context
        Context before the extension; None selects context / rope_factor.
    norm_eps
        Added to the mean square in RMSNorm, or to the variance in LayerNorm.
    pooling
        Pooling of an embedding model, one of `NUMBERED_POOLINGS`; None for a generative model.
    dense
        Inner width of the two dense layers applied to an embedding; None for no dense layers.
    labels
        Labels of a classification head; empty without one.
    scales
        Scale factors of the forward pass: metadata keys without the architecture prefix, and values.
    conv_layers
        Layers with a short convolution instead of attention.
    conv_taps
        Number of tokens that a short convolution covers.
    scan
        Shape of the layers whose state has matrices; None for a model without them.
    experts
        Shape of the feed-forwards with experts; None for a model without them.
    layered
        Dimensions in which layers differ; None for a model of equal layers.
    """

    layers: int
    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    context: int
    output_type: str = TIED
    tokenizer: str = "gpt2"
    rope_base: float = 10000.0
    rope_dims: int | None = None
    rope_scaling: str = "none"
    rope_factor: float = 8.0
    norm_eps: float = 1e-5
    architecture: str = "llama"
    value_dim: int | None = None
    window: int | None = None
    qkv_bias: bool = False
    all_biases: bool = False
    parallel: bool = True
    all_norms: bool = False
    position_bias: bool = False
    embedding_dim: int = 0
    relative_rows: int = 0
    original_context: int | None = None
    pooling: str | None = None
    dense: int | None = None
    labels: tuple[str, ...] = ()
    scales: tuple[tuple[str, float], ...] = ()
    conv_layers: tuple[int, ...] = ()
    conv_taps: int = 3
    scan: ScanShape | None = None
    experts: ExpertShape | None = None
    layered: LayerShape | None = None

    @property
    def traits(self) -> Architecture:
        """Traits of the architecture; those of llama for an unknown one."""
        return ARCHITECTURES.get(self.architecture, Architecture())

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """Kind of each layer."""
        traits, listed = self.traits, self.conv_layers if self.scan is None else self.scan.layers
        recurrent = set(range(self.layers) if listed is None else listed)
        return tuple(
            traits.mixer if traits.recurrent is None or layer not in recurrent else traits.recurrent
            for layer in range(self.layers)
        )

    @property
    def kv_heads_of_layers(self) -> list[int]:
        """Key-value heads of each layer; 0 without attention."""
        if (layered := self.layered) is not None:
            windowed = layered.windowed(self.layers)
            return [layered.window_kv_heads if w else self.kv_heads for w in windowed]
        return [self.kv_heads if has_attention(kind) else 0 for kind in self.kinds]

    @property
    def ffn_of_layers(self) -> list[int]:
        """Inner width of the feed-forward of each layer."""
        wide = self.layered.shared if self.layered is not None else 0
        last = self.layered.shared_ffn if self.layered is not None else 0
        return [self.ffn] * (self.layers - wide) + [last] * wide

    @property
    def value_width(self) -> int:
        """Width of a value head."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def rotated(self) -> int:
        """Number of dimensions of a head that RoPE rotates."""
        return self.rope_dims or self.head_dim

    @property
    def context_before(self) -> int:
        """Context length before the extension."""
        return self.original_context or max(1, int(self.context / self.rope_factor))


def check(shape: ModelShape) -> None:
    """Raise ValueError if a shape is inconsistent; the message names the field."""
    whole = ("layers", "dim", "heads", "kv_heads", "head_dim", "ffn", "vocab", "context")
    for name in whole:  # first, since what follows takes time for each layer
        if getattr(shape, name) > MAX_INT:
            raise ValueError(f"{name} {getattr(shape, name)}: must be at most {MAX_INT}")
    traits, attends = shape.traits, any(has_attention(kind) for kind in shape.kinds)
    unused = {*(("heads", "kv_heads", "head_dim") if not attends else ())}
    unused |= {"ffn"} if traits.ffn == "absent" else set()
    for name in whole:
        if getattr(shape, name) < (0 if name in unused else 1):
            raise ValueError(f"{name} {getattr(shape, name)}: must be at least 1")
    if shape.pooling not in (None, *NUMBERED_POOLINGS):
        raise ValueError(f"pooling {shape.pooling!r}: must be one of {', '.join(NUMBERED_POOLINGS)}")
    for name in ("value_dim", "window", "original_context", "dense"):
        given = getattr(shape, name)
        if given is not None and given < 1:
            raise ValueError(f"{name} {given}: must be at least 1")
    if attends and shape.heads % shape.kv_heads:
        raise ValueError(f"heads {shape.heads}: must be a multiple of kv_heads {shape.kv_heads}")
    rope_dims = shape.head_dim if shape.rope_dims is None else shape.rope_dims
    if attends and (rope_dims % 2 or not 0 < rope_dims <= shape.head_dim):
        raise ValueError(f"rope_dims {rope_dims}: must be even, and in 2..head_dim {shape.head_dim}")
    if shape.rope_scaling not in ROPE_SCALINGS:
        raise ValueError(f"rope_scaling {shape.rope_scaling!r}: must be one of {', '.join(ROPE_SCALINGS)}")
    if (shape.relative_rows > 0) != (traits.relative_positions == "required") or shape.relative_rows < 0:
        has = "has no" if traits.relative_positions == "absent" else "has"
        raise ValueError(
            f"relative_rows {shape.relative_rows}: architecture {shape.architecture} {has} relative positions"
        )
    if shape.embedding_dim < 0 or (shape.embedding_dim and traits.embedding_projection == "absent"):
        raise ValueError(f"embedding_dim {shape.embedding_dim}: {shape.architecture} has no such projection")
    for name in ("rope_base", "rope_factor", "norm_eps"):
        if not (math.isfinite(getattr(shape, name)) and getattr(shape, name) > 0):
            raise ValueError(f"{name} {getattr(shape, name)}: must be finite and above 0")
    if shape.rope_scaling == "longrope" and (traits.long_rope == "absent" or shape.context_before < 2):
        raise ValueError(
            f"rope_scaling 'longrope': architecture {shape.architecture} with an original context of "
            f"{shape.context_before}; must be phi3, with at least 2"
        )
    if shape.conv_layers and traits.recurrent != "short_conv":
        raise ValueError(f"conv_layers {shape.conv_layers}: {shape.architecture} has no short convolutions")
    if not all(0 <= layer < shape.layers for layer in shape.conv_layers) or (
        shape.conv_layers and not attends
    ):
        raise ValueError(
            f"conv_layers {shape.conv_layers}: must be layers, and leave one of {shape.layers} with attention"
        )
    if shape.conv_taps < 2:
        raise ValueError(f"conv_taps {shape.conv_taps}: must be at least 2")
    if shape.tokenizer not in VOCABULARIES:
        raise ValueError(f"tokenizer {shape.tokenizer!r}: must be one of {', '.join(VOCABULARIES)}")
    has_layers = any(has_matrix_state(kind) for kind in (traits.mixer, traits.recurrent))
    if (shape.scan is not None) != has_layers:
        raise ValueError(
            f"architecture {shape.architecture}: {'has' if has_layers else 'has no'} layers with a state, "
            f"unlike the preset; choose a preset of {shape.architecture}{', or set scan' * has_layers}"
        )
    if shape.scan is not None:
        check_scan(shape.scan, shape.layers)
    if traits.experts != "optional" and (shape.experts is None) != (traits.experts == "absent"):
        has = "has no" if traits.experts == "absent" else "has"
        raise ValueError(f"architecture {shape.architecture}: {has} experts, unlike the shape; set experts")
    if shape.experts is not None:
        check_experts(shape.experts)
    if (shape.layered is not None) != traits.layers_differ:
        has = "has" if traits.layers_differ else "has no"
        raise ValueError(
            f"architecture {shape.architecture}: {has} layers of different dimensions, unlike the preset; "
            f"choose a preset of {shape.architecture}{', or set layered' * traits.layers_differ}"
        )
    if shape.layered is not None:
        check_layers(shape.layered, shape.layers, shape.heads, shape.head_dim)
