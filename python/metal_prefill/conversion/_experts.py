"""Experts of gpt-oss and its relatives: the tensors of a layer's experts, and how files divide them.

A folder has the matrices of all experts as one tensor, ``[experts, inputs, outputs]``. The outputs of one of
them are the gates, then the ups.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np

from metal_prefill.conversion._fields import Fields
from metal_prefill.conversion._weights import Computed, FloatArray, Weight
from metal_prefill.errors import GGUFError

_TENSOR = re.compile(r"(.+\.mlp\.experts)\.(gate_up|down)_proj(_bias)?")
_SINKS = ".self_attn.sinks"


def with_matrices(config: Fields, weights: Mapping[str, Weight]) -> Mapping[str, Weight]:
    """Divide the tensors of experts into matrices with inputs as columns, and name sinks as weights.

    Raises
    ------
    GGUFError
        A tensor of experts has a wrong number of dimensions, or its outputs are not pairs.
    """
    found: dict[str, Weight] = {}
    for name, weight in weights.items():
        match = _TENSOR.fullmatch(name)
        if match is not None:
            parts = ("gate", "up") if match[2] == "gate_up" else ("down",)
            tensors = _biases if match[3] else _matrices
            found |= {made.name: made for made in tensors(weight, match[1], parts)}
        elif name.endswith(_SINKS):
            found[f"{name}.weight"] = _named(weight, f"{name}.weight")
        else:
            found[name] = weight
    return found


def _named(weight: Weight, name: str) -> Weight:
    return Computed(weight.file, name, weight.dtype, weight.shape, weight.start, weight.end, weight.values)


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
    for expert, matrix in enumerate(weight.parts((weight.name,) * weight.shape[0])):
        for i, part in enumerate(parts):
            name, columns = f"{stem}.{expert}.{part}_proj.weight", slice(i * width, (i + 1) * width)
            shape = (width, weight.shape[1])
            yield Computed(weight.file, name, weight.dtype, shape, 0, 0, partial(_rows, matrix, columns))


def _rows(matrix: Weight, columns: slice) -> FloatArray:
    return np.ascontiguousarray(matrix.values()[0, :, columns].T)


def _biases(weight: Weight, stem: str, parts: tuple[str, ...]) -> Iterator[Weight]:
    width = _width(weight, 2, len(parts))
    for i, part in enumerate(parts):
        shape, columns = (weight.shape[0], width), slice(i * width, (i + 1) * width)
        name = f"{stem}.{part}_proj.bias"
        yield Computed(weight.file, name, weight.dtype, shape, 0, 0, partial(_columns, weight, columns))


def _columns(weight: Weight, columns: slice) -> FloatArray:
    return weight.values()[:, columns]
