"""Activations of infinity, of the largest and of subnormal floats."""

import math

import numpy as np
from numpy.typing import NDArray

_LARGEST = float(np.finfo(np.float32).max)
_ENDS: list[float] = [np.inf, _LARGEST, 1e38, 1e32, 200, 1e-37, 1e-40, 1e-45, 0]
EXTREME = np.array([sign * end for end in _ENDS for sign in (1, -1)], np.float32)


def extreme_activations() -> dict[str, NDArray[np.float64]]:
    """Return the gated activations of EXTREME by the order of their numbers; the factor is 1.

    The activation of -inf is the limit, 0.
    """
    g = np.clip(EXTREME.astype(np.float64), -1e4, np.inf)  # 0 times infinity is NaN
    clamped = np.minimum(g, 7)
    with np.errstate(over="ignore"):
        tanh = g * (0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3))))
    erf = np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in g])
    return {
        "silu": g / (1 + np.exp(np.minimum(-g, 700))),
        "gelu": tanh,
        "gelu_erf": g * erf,
        "relu": np.maximum(g, 0),
        "clamped silu": 2 * clamped / (1 + np.exp(np.minimum(-1.702 * clamped, 700))),
    }
