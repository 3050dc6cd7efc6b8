"""Shapes of synthetic models: different layers, experts, states with matrices."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from metal_prefill._core import has_attention, has_matrix_state
from metal_prefill.files._architecture import ARCHITECTURES, Architecture, LayerKind
from metal_prefill.files._metadata_keys import MAX_INT
from metal_prefill.files._task_config import NUMBERED_POOLINGS
from metal_prefill.synth._tokenizer import VOCABULARIES

TIED = "tied"  # output type without an output tensor: the embedding is the head
ROPE_SCALINGS = ("none", "linear", "yarn", "llama3", "longrope")


_UNROTATED = 1e30  # a divisor that makes frequencies practically 0


@dataclass(frozen=True)
class LayerShape:
    """Layers with different heads and feed-forwards, which may share keys and values, as in Gemma 4.

    The dimensions of `ModelShape` are those of layers that attend to all positions, and of the first
    feed-forwards.

    Attributes
    ----------
    window_period
        Every n-th layer attends to all positions.
    window_head_dim, window_kv_heads
        Width of a head and number of key-value heads in layers with a window.
    inputs
        Width of the input that each layer has from the token itself; 0 for none.
    shared
        Number of last layers that attend to the keys and values of earlier ones.
    shared_ffn
        Inner width of the feed-forwards of these layers.
    rotated
        Part of the heads of layers without a window that is rotated.
    """

    window_period: int
    window_head_dim: int
    window_kv_heads: int
    inputs: int = 0
    shared: int = 0
    shared_ffn: int = 0
    rotated: float = 0.25

    def windowed(self, layers: int) -> list[bool]:
        """Return whether each layer has a window."""
        return [(layer + 1) % self.window_period != 0 for layer in range(layers)]

    def caches(self, layers: int) -> list[int]:
        """Return the layer whose keys and values each layer attends to."""
        windowed, own = self.windowed(layers), layers - self.shared
        last = {windowed[layer]: layer for layer in range(own)}
        return [layer if layer < own else last.get(windowed[layer], layer) for layer in range(layers)]

    def factors(self, count: int) -> NDArray[np.float32]:
        """Return divisors of frequencies, float32 ``[count]``, by which only the first pairs rotate."""
        rotated = np.arange(count) < int(self.rotated * count)
        return np.where(rotated, np.float32(1), np.float32(_UNROTATED)).astype(np.float32)


@dataclass(frozen=True)
class ExpertShape:
    """Shape of feed-forwards with experts.

    Attributes
    ----------
    count
        Number of experts of a layer.
    used
        Number of experts that a token goes through, at most `count`.
    ffn
        Inner width of an expert.
    shared
        Inner width of an additional expert for all tokens; 0 for none.
    dense_layers
        Number of first layers with a dense feed-forward.
    """

    count: int
    used: int
    ffn: int
    shared: int = 0
    dense_layers: int = 0


@dataclass(frozen=True)
class ScanShape:
    """Shape of layers whose state has a matrix per head: state-space layers (Mamba-2), gated delta rules.

    Attributes
    ----------
    inner
        Width of the layer: its heads together.
    state
        Values that a layer keeps for each column of a head.
    heads
        Number of heads, a divisor of `inner`.
    groups
        Number of groups of heads that read and write their states alike.
    taps
        Number of tokens that the convolution covers.
    layers
        Layers of this kind, instead of attention; None selects all.
    norm
        Whether the output is normalized, in architectures where that is optional.
    """

    inner: int
    state: int
    heads: int
    groups: int = 1
    taps: int = 4
    layers: tuple[int, ...] | None = None
    norm: bool = True


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


# Numbers that may be 0; others are at least 1.
_OPTIONAL = {"embedding_dim", "relative_rows", "inputs", "shared", "shared_ffn", "dense_layers"}


def check(shape: ModelShape) -> None:
    """Raise ValueError for a value that no file can have; the message names the field.

    Other contradictions are found in the header of the file.
    """
    parts = [part for part in (shape, shape.scan, shape.experts, shape.layered) if part is not None]
    numbers = [(name, value) for part in parts for name, value in vars(part).items()]
    for name, value in numbers:  # first, since later checks take time for each layer
        if type(value) is int and value > MAX_INT:
            raise ValueError(f"{name}={value}: must be at most {MAX_INT}")
        if type(value) is float and not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name}={value}: must be finite and above 0")
    traits, attends = shape.traits, any(has_attention(kind) for kind in shape.kinds)
    unused = {"heads", "kv_heads", "head_dim"} if not attends else set()
    unused |= _OPTIONAL | ({"ffn"} if traits.ffn == "absent" else set())
    if shape.layered is not None and shape.layered.shared:
        unused.remove("shared_ffn")
    for name, value in numbers:
        if type(value) is int and value < (least := 0 if name in unused else 1):
            raise ValueError(f"{name}={value}: must be at least {least}")
    if (shape.heads > 0) != (shape.kv_heads > 0):
        raise ValueError(f"heads={shape.heads}, but kv_heads={shape.kv_heads}: use both or neither")
    names = {"pooling": (None, *NUMBERED_POOLINGS), "rope_scaling": ROPE_SCALINGS, "tokenizer": VOCABULARIES}
    for name, known in names.items():
        if (stated := getattr(shape, name)) not in known:
            raise ValueError(f"{name}={stated!r}: must be one of {', '.join(map(str, known))}")
    if shape.conv_layers and traits.recurrent != "short_conv":
        raise ValueError(f"conv_layers={shape.conv_layers}: {shape.architecture} has no short convolutions")
    may_have = traits.experts == "optional" and shape.experts is not None
    has_parts = {
        "scan": any(kind and has_matrix_state(kind) for kind in (traits.mixer, traits.recurrent)),
        "experts": traits.experts == "required" or may_have,
        "layered": traits.layers_differ,
    }
    for name, has in has_parts.items():
        if (getattr(shape, name) is not None) != has:
            raise ValueError(
                f"{name}: architecture {shape.architecture} {'has' if has else 'has no'} such layers; choose "
                f"a preset of {shape.architecture}{f', or set {name}' * has}"
            )
