"""The tensors of a synthetic model of a given shape."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from metal_prefill import _core
from metal_prefill.conversion._rotation import llama3_factors
from metal_prefill.files._gguf_writer import OutlinedTensor
from metal_prefill.files._hyperparameters import leading_dense
from metal_prefill.files._model_tensors import presence_of, tensor_name
from metal_prefill.synth._blocks import (
    TENSOR_TYPES,
    Bytes,
    block_size,
    random_decay,
    random_norm,
    random_step,
    random_tensor,
)
from metal_prefill.synth._shape import TIED, ModelShape

TOKEN_TYPES = 2  # of an encoder that has them, as in BERT
_FACTORS = ("rope_freqs", "rope_long", "rope_short")


class Role(Enum):
    """Distribution from which the values of a tensor are drawn."""

    MATRIX = "around 0"
    BIAS = "around 0, in F32"
    FILTER = "around 0, in F32: of a convolution"
    HEAD = "around 0, in F32: after pooling"
    NORM = "around 1"
    SMALL_NORM = "around the fourth root of 1 / count: of queries and keys whose products are not scaled"
    OUTPUT_NORM = "around 1 and -1, so that with a tied embedding tokens do not predict themselves"
    FACTORS = "divisors of RoPE's frequencies"
    ROWS = "rows of relative positions, by distance"
    DECAY = "negative: rates at which the heads of a recurrence forget"
    STEP = "biases of step sizes, before softplus"


# Presences of norms that only some models of an architecture have.
_OPTIONAL_NORMS = ("qk_norm", "qk_norm_bias", "second_residual_norm")
# By the role of a row of the table, or by its kind.
_ROLES = {
    **dict.fromkeys(_FACTORS, Role.FACTORS),
    **dict.fromkeys(("scan_rates", "gated_delta_decay"), Role.DECAY),
    **dict.fromkeys(("scan_skip", "layer_scale", "norm"), Role.NORM),
    "scan_step": Role.STEP,
    "output_norm": Role.OUTPUT_NORM,
    "relative_row_of": Role.ROWS,
}


@dataclass(frozen=True)
class Tensor:
    name: str  # name in the file
    shape: tuple[int, ...]  # number of rows and row length, or only the length of a vector
    kind: str  # one of `TENSOR_TYPES`
    role: Role  # distribution of the values
    std: float = 0.0  # standard deviation of the values of a matrix or bias

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def size(self) -> int:
        weights, size = block_size(self.kind)
        return self.count // weights * size

    @property
    def outline(self) -> OutlinedTensor:
        return self.name, self.shape, GGMLQuantizationType[self.kind], self.size


def tensors(
    shape: ModelShape,
    # Types of the layer matrices and of the embedding.
    tensor_type: str,
    embedding_type: str,
    *,
    # Magnitude of queries and keys. With 1.5, attention scores have a standard deviation of about 2, so that
    # attention concentrates on some positions.
    scores: float = 1.5,
    # Magnitude of the output that each half of a layer adds to the residual stream. By default, the sum of
    # all outputs is 1.5 times the embedding: the context has an effect, but rounding errors do not grow from
    # layer to layer, as they would if the embedding were negligible.
    residual: float | None = None,
) -> Iterator[Tensor]:
    """Return all tensors in file order: the small frequency factors first, then layer by layer.

    A projection of inputs of magnitude 1 has outputs of magnitude 1. Logits have a standard deviation of
    about 3.
    """
    embedding = 3 * shape.dim**-0.5
    if residual is None:
        residual = 1.5 * embedding * (2 * shape.layers) ** -0.5
    # llama.cpp never quantizes the router.
    kinds = {"token_embedding": embedding_type, "output": shape.output_type, "router": "F32"}
    # Magnitudes of the outputs; those of other projections are 1.
    sizes = {"wq": scores, "wk": scores}
    sizes |= dict.fromkeys(
        ("wo", "w_down", "conv_out", "scan_out", "shared_down", "down_experts", "per_layer_out"), residual
    )
    sizes["router"] = 2.0  # so that tokens differ in their experts
    traits = shape.traits

    def tensor(spec: _core.TensorSpec, layer: int = -1) -> Tensor:
        name = tensor_name(traits, spec, layer)
        small = traits.value_norm and spec.role in ("q_norm", "k_norm")
        role = Role.SMALL_NORM if small else _ROLES.get(spec.role, _ROLES.get(spec.kind))
        if role is not None:
            return Tensor(name, spec.shape, "F32", role)
        if spec.kind == "vector":
            return Tensor(name, spec.shape, "F32", Role.BIAS, 0.5)
        if spec.role == "per_layer_embedding":  # which is scaled by the root of the width
            std = shape.layered.inputs**-0.5 if shape.layered is not None else 0.0
            return Tensor(name, spec.shape, tensor_type, Role.MATRIX, std)
        if spec.role in ("token_types", "position_embedding"):  # llama.cpp never quantizes it
            return Tensor(name, spec.shape, "F32", Role.MATRIX, embedding)
        if spec.kind == "filter" or spec.role == "position_bias":
            return Tensor(name, spec.shape, "F32", Role.FILTER, spec.shape[1] ** -0.5)
        std = (
            embedding
            if spec.role in ("token_embedding", "output")
            else spec.shape[-1] ** -0.5 * sizes.get(spec.role, 1.0)
        )
        return Tensor(name, spec.shape, kinds.get(spec.role, tensor_type), Role.MATRIX, std)

    config = _config(shape)
    specs = _present_tensors(config, shape)
    whole = [spec for spec in specs if not spec.per_layer]
    after = ("output_norm", "output")
    yield from (tensor(spec) for spec in whole if spec.role in _FACTORS)
    yield from (tensor(spec) for spec in whole if spec.role not in (*after, *_FACTORS))
    for layer in range(shape.layers):
        # An optional norm of the first layer would repeat the norm of the embedding.
        repeated = "attn_norm" if layer == 0 and traits.attn_norm == "optional" else ""
        if shape.layered is not None:
            specs = _present_tensors(config.of_layer(layer), shape)
        own = (
            tensor(spec, layer)
            for spec in specs
            if spec.per_layer and spec.is_in(config, layer) and spec.role != repeated
        )
        yield from {made.name: made for made in own}.values()  # a tensor may have several roles
    yield from (tensor(spec) for spec in whole if spec.role in after)
    yield from _heads(shape)


def _present_tensors(config: _core.ModelConfig, shape: ModelShape) -> list[_core.TensorSpec]:
    return [spec for spec in _core.tensors(config) if _is_present(spec, shape)]


def stacks(shape: ModelShape) -> Iterator[tuple[str, list[str]]]:
    """Yield each tensor that files of this architecture may have in place of others, and their names."""
    names = {spec.role: spec.name for spec in _core.tensors(_config(shape))}
    for layer in range(shape.layers):
        for name, roles in shape.traits.fused.items():
            yield f"blk.{layer}.{name}", [names[role].format(layer=layer) for role in roles]


def stacked(listed: Iterable[Tensor], shape: ModelShape) -> list[Tensor]:
    """Combine the layer matrices that files of this architecture store as one tensor.

    The combined tensor has the position, type and standard deviation of the first matrix.
    """
    found = {tensor.name: tensor for tensor in listed}
    result = dict(found)
    for whole, parts in stacks(shape):
        if parts[0] in found:
            first, rows = found[parts[0]], sum(found[part].shape[0] for part in parts)
            result[parts[0]] = replace(first, name=whole, shape=(rows, *first.shape[1:]))
            for part in parts[1:]:
                del result[part]
    return list(result.values())


def _heads(shape: ModelShape) -> Iterator[Tensor]:
    """Yield the tensors after pooling, in F32: dense layers and classification head."""
    if shape.dense is not None:
        for name, rows, columns in (("dense_2", shape.dense, shape.dim), ("dense_3", shape.dim, shape.dense)):
            yield Tensor(f"{name}.weight", (rows, columns), "F32", Role.HEAD, columns**-0.5)
    if shape.labels:
        size = (len(shape.labels), shape.dim)
        yield Tensor("cls.output.weight", size, "F32", Role.HEAD, shape.dim**-0.5)


def _config(shape: ModelShape) -> _core.ModelConfig:
    traits = shape.traits
    config = _core.ModelConfig(
        qk_norm_place=traits.qk_norm_place,
        vocab_size=shape.vocab,
        dim=shape.dim,
        embedding_dim=shape.embedding_dim,
        relative_rows=shape.relative_rows,
        ffn_dim=0 if traits.ffn == "absent" else shape.ffn,
        context_length=shape.context,
        token_types=TOKEN_TYPES if traits.token_types != "absent" else 0,
        n_heads=shape.heads,
        n_kv_heads=shape.kv_heads,
        key_dim=shape.head_dim,
        value_dim=shape.value_width,
        rope_dim=shape.rotated,
        conv_taps=shape.conv_taps,
        query_gate=traits.query_gate,
        n_layers=shape.layers,
        layer_kinds=shape.kinds,
    )
    if (scan := shape.scan) is not None:
        config = config.replace(
            conv_taps=scan.taps,
            scan_heads=scan.heads,
            scan_groups=scan.groups,
            scan_key_dim=scan.state,
            scan_value_dim=scan.inner // scan.heads,
        )
    if (experts := shape.experts) is not None:
        config = config.replace(
            layer_feed_forwards=leading_dense(shape.layers, experts.dense_layers),
            n_experts=experts.count,
            experts_used=experts.used,
            expert_dim=experts.ffn,
            shared_dim=experts.shared,
        )
    if (layered := shape.layered) is not None:
        windowed = layered.windowed(shape.layers)
        head_dims = [layered.window_head_dim if w else shape.head_dim for w in windowed]
        config = config.replace(
            layer_head_dim=head_dims,
            layer_rope_dim=head_dims,
            layer_kv_heads=shape.kv_heads_of_layers,
            layer_ffn_dim=shape.ffn_of_layers,
            layer_cache=layered.caches(shape.layers),
            per_layer_dim=layered.inputs,
        )
    return config


def _is_present(spec: _core.TensorSpec, shape: ModelShape) -> bool:
    layered, presence = shape.layered, presence_of(spec.presence, shape.traits)
    if spec.presence == "per_layer_inputs" and (layered is None or layered.inputs == 0):
        return False
    if presence == "tied":
        return shape.output_type != TIED
    # Whether a model has optional tensors with these roles or presences.
    optional = {
        "rope_freqs": shape.rope_scaling == "llama3" or layered is not None,
        "long_rope": shape.rope_scaling == "longrope",
        "position_bias": shape.position_bias,
        "embedding_projection": shape.embedding_dim > 0,
        "scan_group_norm": shape.scan is not None and shape.scan.norm,
        "qkv_bias": shape.all_biases or shape.qkv_bias,
        **dict.fromkeys(_OPTIONAL_NORMS, shape.all_norms),
    }
    usual = shape.all_biases or not spec.presence.endswith("bias")
    has = optional.get(spec.role, optional.get(spec.presence, usual))
    return presence == "required" or (presence == "optional" and has)


def with_types(tensor: Tensor, overrides: Mapping[str, str]) -> Tensor:
    """Apply the overrides to a matrix, and check that its type is supported and fits its rows."""
    if tensor.role is not Role.MATRIX:
        return tensor
    for pattern, kind in overrides.items():
        if fnmatchcase(tensor.name, pattern):
            tensor = replace(tensor, kind=kind)
    if tensor.kind not in TENSOR_TYPES:
        raise ValueError(
            f"{tensor.name}: unknown tensor type {tensor.kind!r}; known are {', '.join(TENSOR_TYPES)}"
        )
    block, _ = block_size(tensor.kind)
    if tensor.shape[-1] % block:
        raise ValueError(
            f"{tensor.name}: rows of {tensor.shape[-1]} weights, "
            f"must be a multiple of the {tensor.kind} block size {block}"
        )
    return tensor


def rows_of_distances(rows: int, count: int) -> NDArray[np.float32]:
    """Return the row of each distance, ``[count]``; those beyond the number of rows share the last ones."""
    return np.clip(np.arange(count) - count // 2 + rows // 2, 0, rows - 1).astype(np.float32)


def _factors(tensor: Tensor, shape: ModelShape) -> NDArray[np.float32]:
    """Return the divisors of the RoPE frequencies."""
    if shape.layered is not None:
        return shape.layered.factors(tensor.count)
    if shape.rope_scaling == "longrope":
        # Factors of published models were found by a search. These grow in a similar way, from that of the
        # fastest pair to that of the slowest.
        last = shape.rope_factor if "long" in tensor.name else 1.1
        return np.geomspace(1.0, last, tensor.count, dtype=np.float32)
    return llama3_factors(shape.rotated, shape.rope_base, shape.rope_factor, shape.context_before)


def values_of(listed: Iterable[Tensor], shape: ModelShape, seed: int) -> Iterator[NDArray[Any]]:
    """Yield the values of each tensor, with a separate stream of random numbers for each that is drawn."""
    seeds = np.random.SeedSequence(seed)
    for tensor in listed:
        if tensor.role is Role.FACTORS:
            yield _factors(tensor, shape)
        elif tensor.role is Role.ROWS:
            yield rows_of_distances(shape.relative_rows, tensor.count)
        else:
            (stream,) = seeds.spawn(1)
            yield draw(np.random.Generator(np.random.SFC64(stream)), tensor)


def draw(rng: np.random.Generator, tensor: Tensor) -> Bytes:
    """Draw the values of a tensor in file format, uint8."""
    if tensor.role is Role.DECAY:
        return random_decay(rng, tensor.count)
    if tensor.role is Role.STEP:
        return random_step(rng, tensor.count)
    if tensor.role is Role.SMALL_NORM:
        # Scores then have the same deviation as scaled products of norms with weights around 1.
        weights = random_norm(rng, tensor.count).view(np.float32)
        return (weights * np.float32(weights.size**-0.25)).view(np.uint8)
    if tensor.role in (Role.NORM, Role.OUTPUT_NORM):
        return random_norm(rng, tensor.count, signed=tensor.role is Role.OUTPUT_NORM)
    return random_tensor(rng, tensor.kind, tensor.count, tensor.std)
