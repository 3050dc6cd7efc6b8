"""Shape of synthetic layers whose state has matrices, and their vectors."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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


def check_scan(scan: ScanShape, layers: int) -> None:
    """Raise ValueError if a shape is inconsistent; the message names the field."""
    for name in ("inner", "state", "heads", "groups"):
        if getattr(scan, name) < 1:
            raise ValueError(f"scan {name} {getattr(scan, name)}: must be at least 1")
    if scan.inner % scan.heads:
        raise ValueError(f"scan inner {scan.inner}: must be a multiple of heads {scan.heads}")
    if scan.heads % scan.groups:
        raise ValueError(f"scan heads {scan.heads}: must be a multiple of groups {scan.groups}")
    if scan.taps < 2:
        raise ValueError(f"scan taps {scan.taps}: must be at least 2")
    if not all(0 <= layer < layers for layer in scan.layers or ()):
        raise ValueError(f"scan layers {scan.layers}: must be below {layers}")
    if scan.layers is not None and len(set(scan.layers)) == layers:
        raise ValueError(f"scan layers {scan.layers}: must leave one of {layers} layers with attention")


def random_decay(rng: np.random.Generator, count: int) -> NDArray[np.uint8]:
    """Generate rates at which heads forget, as float32 bytes: between -1 and -16, as models begin with."""
    return (-rng.uniform(1.0, 16.0, count)).astype(np.float32).view(np.uint8)


def random_step(rng: np.random.Generator, count: int) -> NDArray[np.uint8]:
    """Generate biases of steps, before softplus, as float32 bytes."""
    low, high = (float(bound) for bound in np.log(_STEPS))
    steps = np.exp(rng.uniform(low, high, count))
    biases: NDArray[np.float32] = np.log(np.expm1(steps)).astype(np.float32)  # the inverse of softplus
    return biases.view(np.uint8)
