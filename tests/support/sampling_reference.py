"""For tests of samplers: random numbers by their definition, logits like a model's, log probabilities."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox 4x32-10 as its paper gives it (Salmon et al., 2011), in integers without limits."""
    c, k = list(counter), list(key)
    for _ in range(10):
        first, second = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [second >> 32 ^ c[1] ^ k[0], second % 2**32, first >> 32 ^ c[3] ^ k[1], first % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


class Drawn(np.random.Generator):
    """Gives one number: the one of a seed, a position and an answer."""

    def __init__(self, seed: int, position: int, answer: int = 0) -> None:
        super().__init__(np.random.PCG64())
        words = philox([position, answer, 0, 0], [seed % 2**32, seed >> 32])
        self._number = ((words[0] >> 5) * 2**26 + (words[1] >> 6)) / 2**53

    def random(self, *args: Any, **kwargs: Any) -> Any:
        return self._number


def logits_like_a_model(rng: np.random.Generator, n: int) -> npt.NDArray[np.float32]:
    """Return logits of which some are far above the rest, with ties and excluded tokens among them."""
    logits = rng.normal(0, 3, n) + np.where(rng.random(n) < 20 / n, rng.uniform(0, 15, n), 0)
    if rng.random() < 0.5:
        logits = np.round(logits * 2) / 2  # many are equal
    logits[rng.random(n) < 0.1 * (rng.random() < 0.3)] = -math.inf
    logits[int(rng.integers(n))] = rng.uniform(0, 10)
    return logits.astype(np.float32)


def log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    below = logits.astype(np.float64) - logits.max()
    result: npt.NDArray[np.float64] = below - math.log(math.fsum(np.exp(below)))
    return result
