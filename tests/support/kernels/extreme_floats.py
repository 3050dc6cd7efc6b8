"""Activations of infinite, the largest and subnormal floats."""

import numpy as np
from numpy.typing import NDArray

from support.kernels.float64 import ACTIVATIONS, clamped_silu

_LARGEST = float(np.finfo(np.float32).max)
_ENDS: list[float] = [np.inf, _LARGEST, 1e38, 1e32, 200, 1e-37, 1e-40, 1e-45, 0]
EXTREME = np.array([sign * end for end in _ENDS for sign in (1, -1)], np.float32)


def extreme_activations() -> dict[str, NDArray[np.float64]]:
    """Return the gated activations of EXTREME with a factor of 1, in the order of their numbers.

    The activation of -inf is the limit, 0.
    """
    g = np.clip(EXTREME.astype(np.float64), -1e4, np.inf)  # 0 times infinity is NaN
    found = {name: activation(g) for name, activation in ACTIVATIONS.items()}
    return {**found, "clamped silu": clamped_silu(g, np.ones_like(g))}
