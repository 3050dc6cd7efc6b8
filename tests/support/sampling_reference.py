"""An independent reference for samplers in NumPy, with random numbers from their definition."""

import math
from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from metal_prefill import Model
from metal_prefill.generation import Options
from metal_prefill.generation._constraint import Constraint
from metal_prefill.generation._sampling import REPEAT_WINDOW
from support.kernels.float64 import softmax

Ids: TypeAlias = npt.NDArray[np.intp]
Scores: TypeAlias = npt.NDArray[np.float64]


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox 4x32-10 as defined in its paper (Salmon et al., 2011), in unbounded integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        first, second = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [second >> 32 ^ c[1] ^ k[0], second % 2**32, first >> 32 ^ c[3] ^ k[1], first % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def drawn(seed: int, position: int, answer: int = 0) -> float:
    """Return the random number of a seed, a position and an answer."""
    words = philox([position, answer, 0, 0], [seed % 2**32, seed >> 32])
    return ((words[0] >> 5) * 2**26 + (words[1] >> 6)) / 2**53


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
    return below - math.log(math.fsum(np.exp(below)))


def sample(
    logits: npt.ArrayLike,
    number: float,
    *,
    allowed: npt.NDArray[np.bool_] | None = None,
    recent: Iterable[int] = (),
    **options: Any,
) -> int:
    """Choose one token from finite logits like `Sampler`, given a random number from 0 to 1.

    `options` are the fields of `Options`.
    """
    stated, scores = Options(**options), np.array(logits, dtype=np.float64)
    for token, bias in stated.logit_bias.items():
        scores[token] = bias if bias == -math.inf else scores[token] + bias
    if allowed is not None:
        scores[~allowed] = -math.inf
    _penalize(scores, recent, stated)
    if stated.temperature == 0:
        return int(scores.argmax())

    ids = np.flatnonzero(scores > -math.inf)
    ids = _top_k(ids, scores, stated.top_k)
    ids = _typical(ids, scores, stated.typical_p)
    ids = _top_p(ids, scores, stated.top_p)
    ids = _min_p(ids, scores, stated.min_p)
    # Inverse transform sampling over ids in increasing order, as in the native core.
    values = scores[ids]
    cumulative = np.cumsum(softmax((values - values.max()) / stated.temperature))
    place = int(np.searchsorted(cumulative, number * cumulative[-1], side="right"))
    return int(ids[min(place, len(ids) - 1)])


def reference_tokens(
    model: Model, ids: list[int], n: int, seed: int, constraint: Constraint | None = None, **options: Any
) -> list[int]:
    """Choose tokens after a prompt by `sample`, from exported logits, until a constraint ends."""
    made, allowed = list(ids), None
    with model.session() as session:
        logits = session.forward_prompt_logits(ids)
        while len(made) < len(ids) + n:
            if constraint is not None:
                bits = np.unpackbits(np.frombuffer(constraint.mask(), np.uint8), bitorder="little")
                allowed = bits[: logits.size].astype(bool)
            number, recent = drawn(seed, len(made)), made[-REPEAT_WINDOW:]
            made.append(sample(logits, number, allowed=allowed, recent=recent, **options))
            ends = made[-1] in model.tokenizer.stop_ids
            if constraint is not None and (ends or constraint.advance(made[-1:]).take()):
                break
            logits = session.forward_token(made[-1])
    return made[len(ids) :]


def _penalize(scores: Scores, recent: Iterable[int], options: Options) -> None:
    ids, counts = np.unique(np.fromiter(recent, dtype=np.int64), return_counts=True)
    penalty = options.repeat_penalty
    scores[ids] = np.where(scores[ids] > 0, scores[ids] / penalty, scores[ids] * penalty)
    scores[ids] -= counts * options.frequency_penalty + options.presence_penalty


def _top_k(ids: Ids, scores: Scores, k: int) -> Ids:
    if k == 0 or k >= len(ids):
        return ids
    values = scores[ids]
    border = np.partition(values, -k)[-k]
    above = ids[values > border]
    return np.sort(np.concatenate([above, ids[values == border][: k - len(above)]]))


def _typical(ids: Ids, scores: Scores, p: float) -> Ids:
    if p == 1:
        return ids
    weights = softmax(scores[ids])
    below = scores[ids].max() - scores[ids]  # surprisal, relative to that of the most probable token
    distance = np.abs(below - (weights * below).sum())
    return _fewest(ids, distance, weights, p)


def _top_p(ids: Ids, scores: Scores, p: float) -> Ids:
    if p == 1:
        return ids
    return _fewest(ids, -scores[ids], softmax(scores[ids]), p)


def _fewest(ids: Ids, keys: Scores, weights: Scores, p: float) -> Ids:
    """Keep the fewest tokens, by lowest key and then lowest id, whose weights sum to at least `p`."""
    order = np.argsort(keys, kind="stable")
    cumulative = np.cumsum(weights[order])
    return np.sort(ids[order[: int(np.searchsorted(cumulative, p)) + 1]])


def _min_p(ids: Ids, scores: Scores, p: float) -> Ids:
    if p == 0:
        return ids
    values = scores[ids]
    return ids[values >= values.max() + math.log(p)]
