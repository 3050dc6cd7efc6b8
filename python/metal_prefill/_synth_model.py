"""Shapes of synthetic models, and the tensors that a model of some shape has."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from fnmatch import fnmatchcase

import numpy as np
from numpy.typing import NDArray

from metal_prefill._synth_blocks import TENSOR_TYPES, block_weights, tensor_bytes
from metal_prefill._synth_tokenizer import VOCABULARIES

TIED = "tied"  # the output type that means: no output tensor, the embedding serves as the head
ROPE_SCALINGS = ("none", "linear", "yarn", "llama3")

# Architectures whose layers have more than Llama's: norms of q and k, norms after attention and FFN, biases.
WITH_HEAD_NORMS = ("qwen3", "gemma3")
WITH_POST_NORMS = ("gemma3",)
WITH_BIASES = ("qwen2",)

# Tensors of a layer, in the order of the file.
IN_A_LAYER = (
    "attn_norm",
    "attn_q",
    "attn_q_norm",
    "attn_k",
    "attn_k_norm",
    "attn_v",
    "attn_output",
    "post_attention_norm",
    "ffn_norm",
    "ffn_gate",
    "ffn_up",
    "ffn_down",
    "post_ffw_norm",
)


@dataclass(frozen=True)
class ModelShape:
    """Everything about a model except the values and types of its weights.

    Attributes
    ----------
    layers, dim, heads, kv_heads, head_dim, ffn, vocab, context
        Dimensions. `dim` is the width of the residual stream; heads * head_dim may differ from it.
    architecture
        Name in the file; it decides which norms and biases the layers have.
    value_dim
        Width of a value head; None for `head_dim`.
    window
        Positions that a layer with a sliding window sees; None where the architecture has none.
    qkv_bias
        Biases of q, k and v where the architecture leaves them open.
    output_type
        Tensor type of a separate output head, or "tied".
    tokenizer
        "gpt2" (byte-level BPE) or "llama" (SentencePiece).
    rope_base
        Base of RoPE's frequencies.
    rope_dims
        Leading dimensions of a head that RoPE rotates; None for all, and llama.cpp takes nothing else.
    rope_scaling
        "none", "linear", "yarn", or "llama3": the frequency factors of Llama 3 as a tensor `rope_freqs`.
    rope_factor
        How many times the context was extended by that scaling.
    original_context
        Context before that; None for context / rope_factor.
    norm_eps
        Added to the mean square in RMSNorm.
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
    original_context: int | None = None

    @property
    def value_width(self) -> int:
        """Width of a value head."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def rotated(self) -> int:
        """Dimensions of a head that RoPE rotates."""
        return self.rope_dims or self.head_dim

    @property
    def context_before(self) -> int:
        """Context before it was extended."""
        return self.original_context or max(1, int(self.context / self.rope_factor))


class Role(Enum):
    """Distribution from which the values of a tensor are drawn."""

    MATRIX = "around 0"
    BIAS = "around 0, in F32"
    NORM = "around 1"
    OUTPUT_NORM = "around 1 and -1: a token with a tied embedding does not simply predict itself"
    FACTORS = "divisors of RoPE's frequencies"


@dataclass(frozen=True)
class Tensor:
    """A tensor to be written.

    Attributes
    ----------
    name
        In the file.
    shape
        Rows, then row length; or the length alone.
    kind
        One of `TENSOR_TYPES`.
    role
        What its values are.
    std
        Standard deviation of the values of a matrix or bias.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    role: Role
    std: float = 0.0

    @property
    def count(self) -> int:
        """Number of its values."""
        return math.prod(self.shape)

    @property
    def size(self) -> int:
        """Bytes of its values."""
        return tensor_bytes(self.kind, self.count)


def check(shape: ModelShape) -> None:
    """Raise ValueError where a shape contradicts itself; the message names the field."""
    whole = ("layers", "dim", "heads", "kv_heads", "head_dim", "ffn", "vocab", "context")
    for name in whole:
        if getattr(shape, name) < 1:
            raise ValueError(f"{name} {getattr(shape, name)}: must be at least 1")
    for name in ("value_dim", "window", "original_context"):
        given = getattr(shape, name)
        if given is not None and given < 1:
            raise ValueError(f"{name} {given}: must be at least 1")
    if shape.heads % shape.kv_heads:
        raise ValueError(f"heads {shape.heads}: must be a multiple of kv_heads {shape.kv_heads}")
    rope_dims = shape.head_dim if shape.rope_dims is None else shape.rope_dims
    if rope_dims % 2 or not 0 < rope_dims <= shape.head_dim:
        raise ValueError(f"rope_dims {rope_dims}: must be even, and in 2..head_dim {shape.head_dim}")
    if shape.rope_scaling not in ROPE_SCALINGS:
        raise ValueError(f"rope_scaling {shape.rope_scaling!r}: must be one of {', '.join(ROPE_SCALINGS)}")
    for name in ("rope_base", "rope_factor", "norm_eps"):
        if not (math.isfinite(getattr(shape, name)) and getattr(shape, name) > 0):
            raise ValueError(f"{name} {getattr(shape, name)}: must be finite and above 0")
    if shape.tokenizer not in VOCABULARIES:
        raise ValueError(f"tokenizer {shape.tokenizer!r}: must be one of {', '.join(VOCABULARIES)}")


def tensors(
    shape: ModelShape,
    tensor_type: str,
    embedding_type: str,
    *,
    scores: float = 1.5,
    residual: float | None = None,
) -> Iterator[Tensor]:
    """Every tensor, in the order of the file: the small frequency factors first, then layer after layer.

    A projection of an input of size 1 has outputs of size 1. Logits have a deviation of about 3.

    Parameters
    ----------
    shape
        Of the model.
    tensor_type, embedding_type
        Of the matrices of the layers, and of the embedding.
    scores
        Size of queries and keys. With 1.5, scores have a deviation of about 2, and attention picks some
        positions.
    residual
        Size of what each half of a layer adds to the residual stream. By default all additions together are
        1.5 times the embedding, so the context counts, yet rounding errors do not grow from layer to layer as
        they do where the embedding is drowned.
    """
    dim, q_dim, k_dim = shape.dim, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    v_dim, att_dim = shape.kv_heads * shape.value_width, shape.heads * shape.value_width
    unit, embedding = dim**-0.5, 3 * dim**-0.5
    if residual is None:
        residual = 1.5 * embedding * (2 * shape.layers) ** -0.5
    if shape.rope_scaling == "llama3":
        yield Tensor("rope_freqs.weight", (shape.rotated // 2,), "F32", Role.FACTORS)
    yield Tensor("token_embd.weight", (shape.vocab, dim), embedding_type, Role.MATRIX, embedding)
    for layer in range(shape.layers):
        prefix = f"blk.{layer}."
        matrices = {
            "attn_q": ((q_dim, dim), scores * unit),
            "attn_k": ((k_dim, dim), scores * unit),
            "attn_v": ((v_dim, dim), unit),
            "attn_output": ((dim, att_dim), att_dim**-0.5 * residual),
            "ffn_gate": ((shape.ffn, dim), unit),
            "ffn_up": ((shape.ffn, dim), unit),
            "ffn_down": ((dim, shape.ffn), shape.ffn**-0.5 * residual),
        }
        norms = {"attn_norm": dim, "ffn_norm": dim}
        if shape.architecture in WITH_HEAD_NORMS:
            norms |= {"attn_q_norm": shape.head_dim, "attn_k_norm": shape.head_dim}
        if shape.architecture in WITH_POST_NORMS:
            norms |= {"post_attention_norm": dim, "post_ffw_norm": dim}
        biases = {}
        if shape.qkv_bias or shape.architecture in WITH_BIASES:
            biases = {"attn_q": q_dim, "attn_k": k_dim, "attn_v": v_dim}
        for name in IN_A_LAYER:
            if name in norms:
                yield Tensor(f"{prefix}{name}.weight", (norms[name],), "F32", Role.NORM)
            if name in matrices:
                rows_cols, std = matrices[name]
                yield Tensor(f"{prefix}{name}.weight", rows_cols, tensor_type, Role.MATRIX, std)
            if name in biases:
                yield Tensor(f"{prefix}{name}.bias", (biases[name],), "F32", Role.BIAS, 0.5)
    yield Tensor("output_norm.weight", (dim,), "F32", Role.OUTPUT_NORM)
    if shape.output_type != TIED:
        yield Tensor("output.weight", (shape.vocab, dim), shape.output_type, Role.MATRIX, embedding)


def with_types(tensor: Tensor, overrides: Mapping[str, str]) -> Tensor:
    """Apply the overrides to a matrix and check that its type is known and fits its rows."""
    if tensor.role is not Role.MATRIX:
        return tensor
    for pattern, kind in overrides.items():
        if fnmatchcase(tensor.name, pattern):
            tensor = replace(tensor, kind=kind)
    if tensor.kind not in TENSOR_TYPES:
        raise ValueError(
            f"{tensor.name}: unknown tensor type {tensor.kind!r}; known are {', '.join(TENSOR_TYPES)}"
        )
    block = block_weights(tensor.kind)
    if tensor.shape[-1] % block:
        raise ValueError(
            f"{tensor.name}: rows of {tensor.shape[-1]} weights cannot be {tensor.kind}, "
            f"whose blocks hold {block}"
        )
    return tensor


def llama3_rope_factors(
    rope_dims: int, base: float, factor: float, original_context: int
) -> NDArray[np.float32]:
    """Divisors of RoPE's frequencies that extend the context as Llama 3.1 does.

    Wavelengths up to a quarter of the original context stay, those beyond the whole of it are stretched by
    `factor`, and those between go smoothly from one to the other.

    Returns
    -------
    float32 [rope_dims / 2]
    """
    low_freq_factor, high_freq_factor = 1.0, 4.0  # the published values of every Llama 3.1 and 3.2
    wavelength = 2 * math.pi * np.float64(base) ** (np.arange(0, rope_dims, 2) / rope_dims)
    turns = original_context / wavelength
    smooth = np.clip((turns - low_freq_factor) / (high_freq_factor - low_freq_factor), 0.0, 1.0)
    return (1.0 / ((1.0 - smooth) / factor + smooth)).astype(np.float32)
