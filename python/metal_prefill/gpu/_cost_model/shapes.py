"""The dispatches of the Metal engine for a model of any shape, recorded by the engine without a GPU."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from metal_prefill import _core
from metal_prefill._core import ModelConfig
from metal_prefill._support.cached_property import cached_property
from metal_prefill.files._gguf_file import GGUFFile, as_matrix
from metal_prefill.files._hyperparameters import read_config
from metal_prefill.files._model_tensors import collect_tensors
from metal_prefill.gpu._trace import Dispatch, from_core

# Results of the dispatches of a prompt for rows after the last layer.
RowOutput: TypeAlias = Literal["none", "greedy", "logits", "log_probs", "hidden", "residual"]


@dataclass(frozen=True)
class TensorShape:
    """Role, GGUF type and dimensions of a tensor."""

    role: str
    layer: int
    type: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Shape:
    """Properties of a model that determine its dispatches."""

    config: ModelConfig
    tensors: tuple[TensorShape, ...]

    @cached_property
    def core(self) -> _core.ModelShape:
        core = _core.ModelShape(self.config)
        for tensor in self.tensors:
            core.add(tensor.role, tensor.layer, tensor.type, *as_matrix(tensor.shape))
        return core


def shape_of(gguf: GGUFFile) -> Shape:
    """Return the shape of a model file; raises as for a model that is opened."""
    config = read_config(gguf)
    found = collect_tensors(gguf, config)
    return Shape(config, tuple(TensorShape(role, layer, t.type, t.shape) for role, layer, t in found))


def plan(
    shape: Shape,
    tokens: int,
    *,
    position: int = 0,
    output: RowOutput | None = None,
    family: int = 9,
    gpu: str = "",
    kv_type: str = "f16",
    chunk_tokens: int = 512,
    fused_norm: bool | None = None,
    matvec_rows: int = 0,
    matmul_tensor: bool = True,
) -> list[Dispatch]:
    """Return the dispatches of a prompt; 1 token is a step of decoding.

    `output` None selects ``"greedy"``, or ``"hidden"`` for models without logits. `family` is that of an
    Apple GPU, 7 (M1) to 10 (M5), and `gpu` the name reported by Metal: Pro and Max have more cores.
    `matvec_rows` is the number of rows of a ``matvec`` for each simdgroup; 0 selects the default. Other
    options are those of :class:`metal_prefill.Model`. Raises ValueError for invalid numbers,
    UnsupportedModelError if the engine would pad the model, or its heads are too large.
    """
    if output is None:
        output = "greedy" if shape.config.has_head else "hidden"
    options = _core.EngineOptions()
    options.kv_type = _core.KvType[kv_type.upper()]
    options.chunk_tokens = chunk_tokens
    options.metal.fused_norm = fused_norm
    options.metal.matvec_rows = matvec_rows
    options.metal.no_matmul_tensor = "" if matmul_tensor else "not wanted"
    return from_core(shape.core.plan(tokens, position, output, family, gpu, options))
