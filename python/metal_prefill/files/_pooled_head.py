"""Pooling and heads that follow the last layer of an embedding or classification model.

Pooled vectors are few, so NumPy computes their products in float32. Each vector is computed separately, so
that the result of a text does not depend on the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from metal_prefill import _core
from metal_prefill.errors import UnsupportedModelError
from metal_prefill.files._gguf_file import GGUFFile, TensorInfo
from metal_prefill.files._metadata_keys import Keys

Pooling: TypeAlias = Literal["none", "mean", "cls", "last", "rank"]
POOLINGS: tuple[Pooling, ...] = get_args(Pooling)  # indexed by the number in the file

Vector: TypeAlias = npt.NDArray[np.float32]

DENSE = ("dense_2", "dense_3")
CLASSIFIER = ("cls.weight", "cls.bias", "cls.output.weight", "cls.output.bias")
HEAD_TENSORS = frozenset((*(f"{name}.weight" for name in DENSE), *CLASSIFIER))


@dataclass(frozen=True)
class PooledHead:
    """Validated pooling and heads of a file.

    Attributes
    ----------
    pooling : str or None
        Pooling that the file declares.
    dense : tuple of str
        Names of the matrices applied to an embedding, in order.
    labels : tuple of str
        Labels of the classification head, which are numbers if the file has no names. Empty without a head.
    width : int
        Length of an embedding.
    """

    gguf: GGUFFile
    architecture: str
    pooling: Pooling | None
    dense: tuple[str, ...]
    labels: tuple[str, ...]
    width: int

    def embedding_of(self, pooled: Vector) -> Vector:
        """Apply the dense layers to a pooled vector."""
        for name in self.dense:
            pooled = self._matrix(name) @ pooled
        return pooled

    def logits_of(self, pooled: Vector) -> Vector:
        """Apply the classification head to a pooled vector, ``[labels]``."""
        if "cls.weight" in self.gguf.tensors:
            pooled = np.tanh(self._affine("cls", pooled))
        return self._affine("cls.output", pooled)

    def _affine(self, name: str, x: Vector) -> Vector:
        y: Vector = self._matrix(f"{name}.weight") @ x
        return y + self._matrix(f"{name}.bias") if f"{name}.bias" in self.gguf.tensors else y

    def _matrix(self, name: str) -> Vector:
        matrices: dict[str, Vector] = self.__dict__.setdefault("_matrices", {})
        if name not in matrices:
            matrices[name] = dequantized(self.gguf, self.gguf.tensors[name])
        return matrices[name]


def dequantized(gguf: GGUFFile, tensor: TensorInfo, rows: slice | None = None) -> Vector:
    """Return a tensor, or a slice of its rows, as float32."""
    data = gguf.tensor(tensor.name).reshape(tensor.shape[0] if len(tensor.shape) == 2 else 1, -1)
    data = data if rows is None else data[rows]
    values = _core.dequantize(tensor.type, np.ascontiguousarray(data).ravel(), len(data) * tensor.shape[-1])
    result: Vector = values.reshape(len(data), -1) if len(tensor.shape) == 2 else values
    return result


def read_head(gguf: GGUFFile, architecture: str, dim: int) -> PooledHead:
    """Read and check the pooling and heads of a file.

    Raises
    ------
    GGUFError
        A tensor that the metadata declares is missing, a shape contradicts the metadata, or the pooling
        requires a head that the file lacks.
    UnsupportedModelError
        The pooling or the type of a tensor is not supported.
    """
    keys = Keys(gguf)
    pooling = _read_pooling(keys)
    dense, width = _read_dense(keys, dim)
    labels = _read_labels(keys, dim)
    if pooling == "rank" and "cls.output.weight" not in gguf.tensors:
        raise keys.error(f"{architecture}.pooling_type is rank, but tensor cls.output.weight is missing")
    return PooledHead(gguf, architecture, pooling, dense, labels, width)


def _read_pooling(keys: Keys) -> Pooling | None:
    key = f"{keys.architecture}.pooling_type"
    value = keys.number(key, default=-1)
    if value == -1:
        return None
    if value not in range(len(POOLINGS)):
        known = ", ".join(f"{i} ({name})" for i, name in enumerate(POOLINGS))
        raise keys.unsupported(f"{key} {value} is not supported; supported are {known}")
    return POOLINGS[int(value)]


def _read_dense(keys: Keys, dim: int) -> tuple[tuple[str, ...], int]:
    names: list[str] = []
    width = dim
    for layer in DENSE:
        name = f"{layer}.weight"
        declared = [keys.positive(f"{layer}_feat_{end}", default=0) for end in ("out", "in")]
        if name not in keys.gguf.tensors:
            if any(declared):
                raise keys.error(
                    f"{keys.architecture}.{layer}_feat_in and _out declare a layer of {declared[1]} to "
                    f"{declared[0]}, but tensor {name} is missing"
                )
            continue
        if layer == DENSE[1] and not names:
            raise keys.error(f"tensor {name} requires {DENSE[0]}.weight, which is missing")
        rows, columns = _matrix_shape(keys, name)
        if columns != width:
            raise keys.error(f"tensor {name} has rows of {columns} values, its input has {width}")
        for end, stated, actual in (("out", declared[0], rows), ("in", declared[1], columns)):
            if stated not in (0, actual):
                raise keys.error(
                    f"tensor {name} has shape ({rows}, {columns}), but {layer}_feat_{end} is {stated}"
                )
        names.append(name)
        width = rows
    if len(names) == 1:
        raise keys.error(f"tensor {names[0]} requires {DENSE[1]}.weight, which is missing")
    return tuple(names), width


def _read_labels(keys: Keys, dim: int) -> tuple[str, ...]:
    key = f"{keys.architecture}.classifier.output_labels"
    stated = keys.gguf.metadata.get(key)
    if stated is not None and not (isinstance(stated, list) and all(isinstance(s, str) for s in stated)):
        raise keys.error(f"{key} has type {keys.gguf.metadata.type_name(key)}, expected array[string]")
    if "cls.output.weight" not in keys.gguf.tensors:
        if stated:
            raise keys.error(f"{key} names {len(stated)} labels, but tensor cls.output.weight is missing")
        return ()
    width = dim
    if "cls.weight" in keys.gguf.tensors:
        width, columns = _matrix_shape(keys, "cls.weight")
        if columns != dim:
            raise keys.error(f"tensor cls.weight has rows of {columns} values, its input has {dim}")
        _check_bias(keys, "cls.bias", width)
    count, columns = _matrix_shape(keys, "cls.output.weight")
    if columns != width:
        raise keys.error(f"tensor cls.output.weight has rows of {columns} values, its input has {width}")
    _check_bias(keys, "cls.output.bias", count)
    if stated and len(stated) != count:
        raise keys.error(f"{key} names {len(stated)} labels, but cls.output.weight has {count} rows")
    return tuple(stated) if stated else tuple(map(str, range(count)))


def _matrix_shape(keys: Keys, name: str) -> tuple[int, int]:
    tensor = keys.gguf.tensors[name]
    if tensor.type_name not in _core.tensor_types():
        raise UnsupportedModelError(f"{keys.gguf.path}: tensor {name} has type {tensor.type_name}")
    if len(tensor.shape) == 1:  # a head with one output
        return 1, tensor.shape[0]
    if len(tensor.shape) != 2:
        raise keys.error(f"tensor {name} has shape {tensor.shape}, expected a matrix")
    return tensor.shape[0], tensor.shape[1]


def _check_bias(keys: Keys, name: str, length: int) -> None:
    tensor = keys.gguf.tensors.get(name)
    if tensor is not None and (tensor.shape != (length,) or tensor.type_name != "F32"):
        raise keys.error(
            f"tensor {name} has shape {tensor.shape} and type {tensor.type_name}, "
            f"expected ({length},) and F32"
        )
