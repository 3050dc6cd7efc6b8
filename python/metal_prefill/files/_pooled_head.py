"""Pooling and heads that follow the last layer of an embedding or classification model.

Pooled vectors are few, so NumPy computes their products in float32. Each vector is computed separately, so
that the result of a text does not depend on the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from metal_prefill import _core
from metal_prefill.errors import UnsupportedModelError
from metal_prefill.files._gguf_file import GGUFFile, TensorInfo
from metal_prefill.files._metadata_keys import Keys

Pooling: TypeAlias = Literal["none", "mean", "cls", "last", "rank"]
POOLINGS: tuple[Pooling, ...] = get_args(Pooling)  # indexed by the number in the file
HeadActivation: TypeAlias = Literal["tanh", "gelu_erf"]
# Function that turns the outputs of a classification head into scores; "none" leaves a single one as it is.
Scores: TypeAlias = Literal["softmax", "sigmoid", "none"]
SCORES: tuple[Scores, ...] = get_args(Scores)

Vector: TypeAlias = npt.NDArray[np.float32]

DENSE = ("dense_2", "dense_3")
CLASSIFIER = (
    *("cls.weight", "cls.bias", "cls.norm.weight", "cls.norm.bias"),
    *("cls.output.weight", "cls.output.bias"),
)
HEAD_TENSORS = frozenset((*(f"{name}.weight" for name in DENSE), *CLASSIFIER))


@dataclass(frozen=True)
class HeadTraits:
    """The classification head of an architecture, where the file does not define it.

    Attributes
    ----------
    state : {"last", "cls", "mean"}
        Hidden state of a text that the head reads: of the last token, of the first, or the mean of all.
    activation : {"tanh", "gelu_erf"}
        Activation after the dense layer of the head, if it has one.
    one_score : {"none", "sigmoid"}
        Function of a single output.
    """

    state: Pooling = "last"
    activation: HeadActivation = "tanh"
    one_score: Scores = "none"


_ENCODER = HeadTraits("cls", one_score="sigmoid")  # as sentence-transformers computes the scores of pairs
HEADS: dict[str, HeadTraits] = {
    **dict.fromkeys(("bert", "nomic-bert", "jina-bert-v2", "eurobert"), _ENCODER),
    "modern-bert": HeadTraits("mean", "gelu_erf", "sigmoid"),
}


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
    state : str
        Pooling of the hidden states that the classification head reads.
    activation : {"tanh", "gelu_erf"}
        Activation after the dense layer of the classification head.
    scores : {"softmax", "sigmoid", "none"}
        Function that turns the outputs of the classification head into scores.
    norm_eps : float
        Added to the variance in the norm of the classification head.
    """

    gguf: GGUFFile
    architecture: str
    pooling: Pooling | None
    dense: tuple[str, ...]
    labels: tuple[str, ...]
    width: int
    state: Pooling
    activation: HeadActivation
    scores: Scores
    norm_eps: float

    @property
    def per_token(self) -> bool:
        """Whether the dense layers apply to each token, as in models for late interaction."""
        return bool(self.dense) and self.pooling in (None, "none")

    def embedding_of(self, states: Vector) -> Vector:
        """Apply the dense layers to a pooled vector, or to each row of a matrix."""
        for name in self.dense:
            states = _product(self._matrix(f"{name}.weight"), states)
        return states

    def logits_of(self, states: Vector) -> Vector:
        """Apply the classification head to a pooled vector, ``[labels]``, or to rows, ``[n, labels]``."""
        tensors = self.gguf.tensors
        if "cls.weight" in tensors:
            states = self._affine("cls", states)
            states = np.tanh(states) if self.activation == "tanh" else _gelu(states)
        if "cls.norm.weight" in tensors:
            states = _layer_norm(states, self.norm_eps) * self._matrix("cls.norm.weight")
            if "cls.norm.bias" in tensors:
                states = states + self._matrix("cls.norm.bias")
        return self._affine("cls.output", states)

    def probabilities_of(self, logits: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.float64]:
        """Convert outputs of the classification head, ``[n, labels]``, to probabilities.

        That of a single label is the sigmoid of its output, whatever a score is.
        """
        x = np.asarray(logits, np.float64)
        return sigmoid(x) if self.scores == "sigmoid" or x.shape[-1] == 1 else softmax(x)

    def _affine(self, name: str, x: Vector) -> Vector:
        y = _product(self._matrix(f"{name}.weight"), x)
        return y + self._matrix(f"{name}.bias") if f"{name}.bias" in self.gguf.tensors else y

    def _matrix(self, name: str) -> Vector:
        matrices: dict[str, Vector] = self.__dict__.setdefault("_matrices", {})
        if name not in matrices:
            matrices[name] = dequantized(self.gguf, self.gguf.tensors[name])
        return matrices[name]


def softmax(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the softmax over the last axis."""
    weights = np.exp(x - x.max(axis=-1, keepdims=True, initial=-np.inf))
    probabilities: npt.NDArray[np.float64] = weights / weights.sum(axis=-1, keepdims=True)
    return probabilities


def sigmoid(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return ``1 / (1 + exp(-x))``, without overflow."""
    small = np.exp(-np.abs(x))
    result: npt.NDArray[np.float64] = np.where(x < 0, small, 1) / (1 + small)
    return result


def _product(matrix: Vector, x: Vector) -> Vector:
    y: Vector = matrix.reshape(-1, x.shape[-1]) @ x if x.ndim == 1 else x @ matrix.reshape(-1, x.shape[-1]).T
    return y


def _layer_norm(x: Vector, eps: float) -> Vector:
    centred = x - x.mean(axis=-1, keepdims=True, dtype=np.float64)
    variance = np.square(centred).mean(axis=-1, keepdims=True)
    normed: Vector = (centred / np.sqrt(variance + eps)).astype(np.float32)
    return normed


def _gelu(x: Vector) -> Vector:
    """Return ``x * P(X <= x)`` for a standard normal X.

    The error function is formula 7.1.26 of Abramowitz and Stegun, whose error is at most 1.5e-7.
    """
    z = np.abs(x, dtype=np.float64) / np.sqrt(2)
    t = 1 / (1 + 0.3275911 * z)
    powers = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)
    tail = t * np.polynomial.polynomial.polyval(t, powers) * np.exp(-z * z)
    result: Vector = (x * np.where(x < 0, tail, 2 - tail) / 2).astype(np.float32)
    return result


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
    traits = HEADS.get(architecture, HeadTraits())
    labels = _read_labels(keys, dim)
    if pooling == "rank" and "cls.output.weight" not in gguf.tensors:
        raise keys.error(f"{architecture}.pooling_type is rank, but tensor cls.output.weight is missing")
    return PooledHead(
        gguf,
        architecture,
        pooling,
        dense,
        labels,
        width,
        _read_state(keys, traits),
        traits.activation,
        _read_scores(keys, traits, len(labels)),
        keys.positive_float("attention.layer_norm_epsilon", default=1e-5),
    )


def _read_state(keys: Keys, traits: HeadTraits) -> Pooling:
    suffix = "classifier.pooling_type"
    state = _read_pooling(keys, suffix) or traits.state
    if state in ("none", "rank"):
        raise keys.error(
            f"{keys.architecture}.{suffix} is {state}, must be the pooling whose result the head reads"
        )
    return state


def _read_scores(keys: Keys, traits: HeadTraits, labels: int) -> Scores:
    suffix = "classifier.activation"
    if not keys.has(suffix):
        return "softmax" if labels > 1 else traits.one_score
    stated = keys.string(suffix, default="")
    scores = next((known for known in SCORES if known == stated), None)
    if scores is None:
        raise keys.unsupported(
            f"{keys.architecture}.{suffix} {stated!r} is not supported; supported are {', '.join(SCORES)}"
        )
    return scores


def _read_pooling(keys: Keys, suffix: str = "pooling_type") -> Pooling | None:
    key = f"{keys.architecture}.{suffix}"
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
        names.append(layer)
        width = rows
    return tuple(names), width


def _read_labels(keys: Keys, dim: int) -> tuple[str, ...]:
    key = f"{keys.architecture}.classifier.output_labels"
    stated = keys.gguf.metadata.get(key)
    if stated is not None and not (isinstance(stated, list) and all(isinstance(s, str) for s in stated)):
        raise keys.error(f"{key} has type {keys.gguf.metadata.type_name(key)}, expected array[string]")
    if "cls.output.weight" not in keys.gguf.tensors:
        left = next((name for name in CLASSIFIER if name in keys.gguf.tensors), None)
        if left is not None:
            raise keys.error(f"tensor {left} requires cls.output.weight, which is missing")
        if stated:
            raise keys.error(f"{key} names {len(stated)} labels, but tensor cls.output.weight is missing")
        return ()
    width = dim
    if "cls.weight" in keys.gguf.tensors:
        width, columns = _matrix_shape(keys, "cls.weight")
        if columns != dim:
            raise keys.error(f"tensor cls.weight has rows of {columns} values, its input has {dim}")
        _check_vector(keys, "cls.bias", width)
    _check_vector(keys, "cls.norm.weight", width)
    _check_vector(keys, "cls.norm.bias", width)
    for name, needed in (("cls.bias", "cls.weight"), ("cls.norm.bias", "cls.norm.weight")):
        if name in keys.gguf.tensors and needed not in keys.gguf.tensors:
            raise keys.error(f"tensor {name} requires {needed}, which is missing")
    count, columns = _matrix_shape(keys, "cls.output.weight")
    if columns != width:
        raise keys.error(f"tensor cls.output.weight has rows of {columns} values, its input has {width}")
    _check_vector(keys, "cls.output.bias", count)
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


def _check_vector(keys: Keys, name: str, length: int) -> None:
    tensor = keys.gguf.tensors.get(name)
    if tensor is not None and (tensor.shape != (length,) or tensor.type_name != "F32"):
        raise keys.error(
            f"tensor {name} has shape {tensor.shape} and type {tensor.type_name}, "
            f"expected ({length},) and F32"
        )
