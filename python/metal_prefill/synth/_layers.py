"""Shapes of synthetic layers: different dimensions, experts, states with matrices."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_UNROTATED = 1e30  # a divisor of frequencies that leaves none


@dataclass(frozen=True)
class LayerShape:
    """Layers with different heads and feed-forwards, which may share keys and values, as in Gemma 4.

    The dimensions of `ModelShape` are those of layers that attend to all positions, and of the first
    feed-forwards.

    Attributes
    ----------
    window_period
        Every n-th layer attends to all positions.
    window_head_dim, window_kv_heads
        Width of a head and number of key-value heads in layers with a window.
    inputs
        Width of the input that each layer has from the token itself; 0 for none.
    shared
        Number of last layers that attend to the keys and values of earlier ones.
    shared_ffn
        Inner width of the feed-forwards of these layers.
    rotated
        Part of the heads of layers without a window that is rotated.
    """

    window_period: int
    window_head_dim: int
    window_kv_heads: int
    inputs: int = 0
    shared: int = 0
    shared_ffn: int = 0
    rotated: float = 0.25

    def windowed(self, layers: int) -> list[bool]:
        """Return whether each layer has a window."""
        return [(layer + 1) % self.window_period != 0 for layer in range(layers)]

    def caches(self, layers: int) -> list[int]:
        """Return the layer whose keys and values each layer attends to."""
        windowed, own = self.windowed(layers), layers - self.shared
        last = {windowed[layer]: layer for layer in range(own)}
        return [layer if layer < own else last.get(windowed[layer], layer) for layer in range(layers)]

    def factors(self, count: int) -> NDArray[np.float32]:
        """Return divisors of the frequencies of pairs that leave only the first of them rotated.

        Returns
        -------
        float32 [count]
        """
        rotated = np.arange(count) < int(self.rotated * count)
        return np.where(rotated, np.float32(1), np.float32(_UNROTATED)).astype(np.float32)


@dataclass(frozen=True)
class ExpertShape:
    """Shape of feed-forwards with experts.

    Attributes
    ----------
    count
        Number of experts of a layer.
    used
        Number of experts that a token goes through, at most `count`.
    ffn
        Inner width of an expert.
    shared
        Inner width of an additional expert for all tokens; 0 for none.
    dense_layers
        Number of first layers with a dense feed-forward.
    """

    count: int
    used: int
    ffn: int
    shared: int = 0
    dense_layers: int = 0


_STEPS = (0.01, 0.3)  # range of the steps that the biases select


@dataclass(frozen=True)
class ScanShape:
    """Shape of layers whose state has a matrix for each head: state-space layers (Mamba-2), delta rules.

    Attributes
    ----------
    inner
        Width of the layer: its heads together.
    state
        Values that a layer keeps for each column of a head.
    heads
        Number of heads, a divisor of `inner`.
    groups
        Number of groups of heads that read and write their states alike.
    taps
        Number of tokens that the convolution covers.
    layers
        Layers of this kind, instead of attention; None selects all.
    norm
        Whether the output is normalized, in architectures where that is optional.
    """

    inner: int
    state: int
    heads: int
    groups: int = 1
    taps: int = 4
    layers: tuple[int, ...] | None = None
    norm: bool = True


def random_decay(rng: np.random.Generator, count: int) -> NDArray[np.uint8]:
    """Generate rates at which heads forget, as float32 bytes: between -1 and -16, as models begin with."""
    return (-rng.uniform(1.0, 16.0, count)).astype(np.float32).view(np.uint8)


def random_step(rng: np.random.Generator, count: int) -> NDArray[np.uint8]:
    """Generate biases of steps, before softplus, as float32 bytes."""
    low, high = (float(bound) for bound in np.log(_STEPS))
    steps = np.exp(rng.uniform(low, high, count))
    biases: NDArray[np.float32] = np.log(np.expm1(steps)).astype(np.float32)  # the inverse of softplus
    return biases.view(np.uint8)
