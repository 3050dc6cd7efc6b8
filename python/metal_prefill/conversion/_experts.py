"""Division of tensors that hold the matrices of all experts.

gpt-oss and related models store ``[experts, inputs, outputs]``, with the gates before the ups. In
nomic-embed-text-v2-moe, the rows of all experts follow one another, and the second matrix of each is
transposed.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from metal_prefill.conversion._fields import Fields
from metal_prefill.conversion._weights import FloatArray, Index, Stack, Weight
from metal_prefill.errors import GGUFError

_TENSOR = re.compile(r"(.+\.mlp\.experts)\.(gate_up|down)_proj(_bias)?")
_SINKS = ".self_attn.sinks"
_ROWS = re.compile(r"(.+\.mlp\.experts)\.mlp\.(w1|w2)")
_BIAS_OF_SUM = re.compile(r".*\.layers\.(\d+)\.mlp\.experts\.bias")
BIAS = r"blk\.\d+\.ffn_exps\.bias"  # of the sum of the experts, in a file


def with_matrices(config: Fields, weights: Mapping[str, Weight]) -> Mapping[str, Weight]:
    """Divide the tensors of experts into matrices with inputs as columns, and name sinks as weights."""
    found: dict[str, Weight] = {}
    for name, weight in weights.items():
        match = _TENSOR.fullmatch(name)
        if match is not None:
            parts = ("gate", "up") if match[2] == "gate_up" else ("down",)
            tensors = _biases if match[3] else _matrices
            found |= {made.name: made for made in tensors(weight, match[1], parts)}
        elif name.endswith(_SINKS):
            found[f"{name}.weight"] = weight.computed(weight.rows, name=f"{name}.weight")
        else:
            found[name] = weight
    return found


def _width(weight: Weight, dimensions: int, parts: int) -> int:
    """Return the number of outputs of each part."""
    if len(weight.shape) != dimensions or weight.shape[-1] % parts or 0 in weight.shape:
        raise GGUFError(
            f"{weight.file}: tensor {weight.name} has shape {weight.shape}, expected {dimensions} "
            f"dimensions, none of them 0 and the last a multiple of {parts}"
        )
    return weight.shape[-1] // parts


def _matrices(weight: Weight, stem: str, parts: tuple[str, ...]) -> Iterator[Weight]:
    width = _width(weight, 3, len(parts))
    for expert, matrix in enumerate(Stack.of(weight).matrices):
        for i, part in enumerate(parts):
            name, columns = f"{stem}.{expert}.{part}_proj.weight", slice(i * width, (i + 1) * width)
            order = np.arange(weight.shape[2])[columns]
            yield replace(matrix.transposed().reordered(order), name=name)


def _biases(weight: Weight, stem: str, parts: tuple[str, ...]) -> Iterator[Weight]:
    width = _width(weight, 2, len(parts))
    for i, part in enumerate(parts):
        shape, columns = (weight.shape[0], width), slice(i * width, (i + 1) * width)
        name = f"{stem}.{part}_proj.bias"
        yield weight.computed(partial(_columns, weight, columns), name=name, shape=shape)


def _columns(weight: Weight, columns: slice, index: Index) -> FloatArray:
    return weight.rows(index)[:, columns]


def with_divided(config: Fields, weights: Mapping[str, Weight]) -> Mapping[str, Weight]:
    """Divide the rows of the tensors of experts into matrices, and name the biases of their sums."""
    found: dict[str, Weight] = {}
    count = config.integer("num_experts")
    for name, weight in weights.items():
        rows, bias = _ROWS.fullmatch(name), _BIAS_OF_SUM.fullmatch(name)
        if rows is not None:
            if len(weight.shape) != 2:
                raise GGUFError(f"{weight.file}: tensor {name} has shape {weight.shape}, expected a matrix")
            for expert, matrix in enumerate(weight.parts((name,) * count)):
                made = matrix.transposed() if rows[2] == "w2" else matrix
                own = f"{rows[1]}.{expert}.mlp.{rows[2]}.weight"
                found[own] = made.computed(made.rows, name=own)
        elif bias is not None:
            own = f"blk.{bias[1]}.ffn_exps.bias"
            found[own] = weight.computed(weight.rows, name=own)
        else:
            found[name] = weight
    return found
