"""Computation of the heads that follow the last layer of an embedding or classification model.

Pooled vectors are few, so NumPy computes their products in float32. Each vector is computed separately, so
that the result of a text does not depend on the others.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from metal_prefill.files._gguf_file import FloatArray
from metal_prefill.files._task_config import (
    NORM,
    NORMALIZE,
    TANH_INT8,
    DenseActivation,
    HeadActivation,
    PooledHead,
)
from metal_prefill.tasks._text_passes import finite

# Of the modules LayerNorm and Normalize: added to the variance, and the least length that divides a vector.
_NORM_EPS, _TINY = 1e-5, 1e-12


def embedding_of(head: PooledHead, states: FloatArray) -> FloatArray:
    """Apply the steps after pooling to a pooled vector, or to each row of a matrix."""
    for name in head.steps:
        if name == NORMALIZE:
            states = states / np.maximum(np.linalg.norm(states, axis=-1, keepdims=True), _TINY)
        elif name == TANH_INT8:
            states = np.rint(127 * np.tanh(states))
        elif name == NORM:
            states = _normed(head, name, states, _NORM_EPS)
        else:
            states = _ACTIVATIONS[head.activations[name]](affine(head, name, states))
    return states


def logits_of(head: PooledHead, states: FloatArray) -> FloatArray:
    """Apply the classification head to a pooled vector, ``[labels]``, or to rows, ``[n, labels]``."""
    return _output_of(head, "cls", head.activation, states)


def vocabulary_vector(head: PooledHead, states: FloatArray) -> FloatArray:
    """Return the vector of a text over the vocabulary, ``[vocab]``, from the states of its tokens."""
    logits = np.maximum(_output_of(head, "mlm", head.vocabulary_activation, states), 0)
    for _ in range(head.logarithms):
        logits = np.log1p(logits)
    return logits.max(axis=0) if head.vocabulary_pooling == "max" else logits.sum(axis=0)


def _output_of(head: PooledHead, name: str, activation: HeadActivation, states: FloatArray) -> FloatArray:
    """Apply a head: a dense layer, an activation and a norm, if it has them, and the output."""
    tensors = head.gguf.tensors
    if f"{name}.weight" in tensors:
        states = _ACTIVATIONS[activation](affine(head, name, states))
    if f"{name}.norm.weight" in tensors:
        states = _normed(head, f"{name}.norm", states, head.norm_eps)
    tied = f"{name}.output.weight" not in tensors
    output = affine(head, f"{name}.output", states, "token_embd.weight" if tied else "")
    return finite(output, f"an output of the head {name}")


def probabilities_of(head: PooledHead, logits: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.float64]:
    """Convert outputs of the classification head, ``[n, labels]``, to probabilities.

    For a single label it is the sigmoid of the output, even if scores are outputs.
    """
    x = np.asarray(logits, np.float64)
    return sigmoid(x) if head.scores == "sigmoid" or x.shape[-1] == 1 else softmax(x)


def affine(head: PooledHead, name: str, x: FloatArray, weight: str = "") -> FloatArray:
    """Apply a layer: a matrix, by default of the same name, and its bias if it has one."""
    matrix = head.matrix(weight or f"{name}.weight").reshape(-1, x.shape[-1])
    y: FloatArray = matrix @ x if x.ndim == 1 else x @ matrix.T
    return y + head.matrix(f"{name}.bias") if f"{name}.bias" in head.gguf.tensors else y


def softmax(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    weights = np.exp(x - x.max(axis=-1, keepdims=True, initial=-np.inf))
    return weights / weights.sum(axis=-1, keepdims=True)


def sigmoid(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return ``1 / (1 + exp(-x))``, without overflow."""
    small = np.exp(-np.abs(x))
    return np.where(x < 0, small, 1) / (1 + small)


def _normed(head: PooledHead, name: str, x: FloatArray, eps: float) -> FloatArray:
    centred = x - x.mean(axis=-1, keepdims=True, dtype=np.float64)
    variance = np.square(centred).mean(axis=-1, keepdims=True)
    normed: FloatArray = (centred / np.sqrt(variance + eps)).astype(np.float32)
    y = normed * head.matrix(f"{name}.weight")
    return y + head.matrix(f"{name}.bias") if f"{name}.bias" in head.gguf.tensors else y


def _gelu(x: FloatArray) -> FloatArray:
    """Return ``x * P(X <= x)`` for a standard normal X.

    The error function is formula 7.1.26 of Abramowitz and Stegun, whose error is at most 1.5e-7.
    """
    z = np.abs(x, dtype=np.float64) / np.sqrt(2)
    t = 1 / (1 + 0.3275911 * z)
    powers = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)
    tail = t * np.polynomial.polynomial.polyval(t, powers) * np.exp(-z * z)
    return (x * np.where(x < 0, tail, 2 - tail) / 2).astype(np.float32)


def _gelu_tanh(x: FloatArray) -> FloatArray:
    argument = np.asarray(1.5957691216057308 * (x + 0.044715 * x**3), np.float32)
    return x * _sigmoid(argument)


def _sigmoid(x: FloatArray) -> FloatArray:
    return sigmoid(x.astype(np.float64)).astype(np.float32)


_ACTIVATIONS: dict[HeadActivation | DenseActivation, Callable[[FloatArray], FloatArray]] = {
    "none": lambda x: x,
    "tanh": np.tanh,
    "gelu": _gelu_tanh,
    "gelu_erf": _gelu,
    "relu": lambda x: np.maximum(x, 0),
    "silu": lambda x: x * _sigmoid(x),
    "sigmoid": _sigmoid,
}
