"""Dimensions in which the layers of a synthetic model differ."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from metal_prefill.files._metadata_keys import MAX_INT

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
        return [layer if layer < own else last[windowed[layer]] for layer in range(layers)]

    def factors(self, count: int) -> NDArray[np.float32]:
        """Return divisors of the frequencies of pairs that leave only the first of them rotated.

        Returns
        -------
        float32 [count]
        """
        rotated = np.arange(count) < int(self.rotated * count)
        return np.where(rotated, np.float32(1), np.float32(_UNROTATED)).astype(np.float32)


def check_layers(layered: LayerShape, layers: int, heads: int, head_dim: int) -> None:
    """Raise ValueError if a shape is inconsistent; the message names the field."""
    limits = {
        "window_period": (1, MAX_INT),
        "window_head_dim": (2, head_dim),
        "window_kv_heads": (1, heads),
        "inputs": (0, MAX_INT),
        "shared": (0, layers - 1),
        "shared_ffn": (1 if layered.shared else 0, MAX_INT),
    }
    for name, (least, most) in limits.items():
        if not least <= getattr(layered, name) <= most:
            raise ValueError(f"layered {name} {getattr(layered, name)}: must be in {least}..{most}")
    if layered.window_head_dim % 2:
        raise ValueError(f"layered window_head_dim {layered.window_head_dim}: must be even")
    if heads % layered.window_kv_heads:
        raise ValueError(f"layered window_kv_heads {layered.window_kv_heads}: must divide the {heads} heads")
    windowed, own = layered.windowed(layers), layers - layered.shared
    if missing := set(windowed[own:]) - set(windowed[:own]):
        kind = "with" if True in missing else "without"
        raise ValueError(f"layered shared {layered.shared}: no layer {kind} a window has keys of its own")
