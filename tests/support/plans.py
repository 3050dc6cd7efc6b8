"""The dispatches of the Metal engine for a model of any shape, recorded by the engine without a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from gguf import GGMLQuantizationType

from metal_prefill import _core
from metal_prefill.files import GGUFFile, ModelConfig
from metal_prefill.files._gguf_file import as_matrix
from metal_prefill.files._hyperparameters import read_config
from metal_prefill.files._model_config import core_config
from metal_prefill.files._model_tensors import collect_tensors, expected_tensors
from metal_prefill.gpu._kernel_checks.arguments import decode_args


@dataclass(frozen=True)
class Dispatch:
    """A dispatch of a GPU kernel, as `_core.Dispatch` with the fields of its arguments by name."""

    kernel: str
    layer: int
    grid: tuple[int, int, int]
    threads: int
    threadgroup_bytes: int
    after_barrier: bool
    args: dict[str, Any]
    buffers: tuple[str, ...]
    runs: tuple[tuple[int, int], ...]


def from_core(dispatches: Sequence[_core.Dispatch]) -> list[Dispatch]:
    """Convert dispatches from the native module."""
    return [
        Dispatch(
            kernel=d.kernel,
            layer=d.layer,
            grid=d.grid,
            threads=d.threads,
            threadgroup_bytes=d.threadgroup_bytes,
            after_barrier=d.after_barrier,
            args=decode_args(d.args_struct, d.args),
            buffers=tuple(d.buffers),
            runs=tuple(d.runs),
        )
        for d in dispatches
    ]


@dataclass(frozen=True)
class TensorShape:
    """A tensor without its values: its role, its GGUF type and its dimensions."""

    role: str
    layer: int
    type: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Shape:
    """Everything about a model that its dispatches depend on."""

    config: ModelConfig
    tensors: tuple[TensorShape, ...]

    @cached_property
    def core(self) -> _core.ModelShape:
        """The shape as the core has it."""
        core = _core.ModelShape(core_config(self.config))
        for tensor in self.tensors:
            core.add(tensor.role, tensor.layer, tensor.type, *as_matrix(tensor.shape))
        return core


def shape_of(gguf: GGUFFile) -> Shape:
    """Return the shape of a model file."""
    config = read_config(gguf)
    found = collect_tensors(gguf, config)
    return Shape(config, tuple(TensorShape(role, layer, t.type, t.shape) for role, layer, t in found))


def uniform_shape(
    config: ModelConfig, kind: str, embedding: str, output: str | None = None, *, optional: bool = False
) -> Shape:
    """Return the shape of a model whose layers have matrices of one type.

    Parameters
    ----------
    config
        Of the model.
    kind, embedding, output
        Tensor types in the layers, of the embedding and of the head; without `output` the head is tied.
    optional
        Whether the model has optional tensors of layers.
    """
    types = {"token_embedding": embedding, "output": output or embedding}
    tensors = []
    for spec, layer, presence in expected_tensors(config):
        has_types = spec.role == "token_types" and config.token_types
        if presence == "optional" and not (has_types or (optional and layer >= 0)):
            continue
        name = types.get(spec.role, kind if spec.kind in ("matrix", "experts") else "f32")
        tensors.append(TensorShape(spec.role, layer, GGMLQuantizationType[name.upper()], spec.shape))
    return Shape(config, tuple(tensors))


def plan(
    shape: Shape,
    tokens: int,
    *,
    position: int = 0,
    output: str = "greedy",
    family: int = 9,
    gpu: str = "",
    kv_dtype: str = "f16",
    chunk_tokens: int = 512,
    fused_norm: bool | None = None,
    matvec_rows: int = 0,
) -> list[Dispatch]:
    """Return the dispatches of a prompt; 1 token is a step of decoding.

    `family` and `gpu` are an Apple GPU family and the name reported by Metal.
    """
    options = _core.EngineOptions()
    options.kv_type = _core.KvType[kv_dtype.upper()]
    options.chunk_tokens = chunk_tokens
    options.metal.fused_norm = fused_norm
    options.metal.matvec_rows = matvec_rows
    return from_core(shape.core.plan(tokens, position, _core.RowOutput[output.upper()], family, gpu, options))
