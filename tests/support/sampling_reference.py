"""An independent reference for samplers: NumPy, random numbers by their definition, log probabilities."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from metal_prefill.generation import Options

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


class Drawn(np.random.Generator):
    """Returns the one random number of a seed, a position and an answer."""

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


def sample(
    logits: npt.ArrayLike,
    *,
    allowed: npt.ArrayLike | None = None,
    recent: Iterable[int] = (),
    rng: np.random.Generator | None = None,
    **options: Any,
) -> int:
    """Choose one token as `Sampler` does; `options` are the fields of `Options`."""
    return _choose(
        logits, Options(**options), allowed, recent, np.random.default_rng() if rng is None else rng
    )


def _check_shape(logits: npt.NDArray[np.floating]) -> None:
    if logits.ndim != 1 or logits.size == 0:
        raise ValueError(f"logits must be one-dimensional and not empty, got shape {logits.shape}")


def _checked_mask(allowed: npt.ArrayLike, vocab_size: int) -> npt.NDArray[np.bool_]:
    mask = np.asarray(allowed)
    if mask.dtype != np.bool_ or mask.shape != (vocab_size,):
        raise ValueError(
            f"a mask of allowed tokens must be bool [{vocab_size}], got {mask.dtype} {list(mask.shape)}"
        )
    return mask


def _choose(
    logits: npt.ArrayLike,
    options: Options,
    allowed: npt.ArrayLike | None,
    recent: Iterable[int],
    rng: np.random.Generator,
) -> int:
    scores = np.array(logits, dtype=np.float64)
    _check_shape(scores)
    if np.isnan(scores).any():
        raise ValueError(f"the logit of token {int(np.flatnonzero(np.isnan(scores))[0])} is NaN")
    _add_bias(scores, options.logit_bias)
    if allowed is not None:
        scores[~_checked_mask(allowed, scores.size)] = -math.inf
    _penalize(scores, recent, options)
    highest = scores.max()
    if highest == -math.inf:
        raise ValueError("every logit is -inf: there is no token to choose")
    if highest == math.inf:
        scores = np.where(scores == math.inf, 0.0, -math.inf)
    if options.temperature == 0:
        return int(scores.argmax())

    ids = np.flatnonzero(scores > -math.inf)
    ids = _top_k(ids, scores, options.top_k)
    ids = _typical(ids, scores, options.typical_p)
    ids = _top_p(ids, scores, options.top_p)
    ids = _min_p(ids, scores, options.min_p)
    # Inverse transform sampling over ids in increasing order, as in the native core.
    cumulative = np.cumsum(_softmax(scores[ids], options.temperature))
    drawn = int(np.searchsorted(cumulative, rng.random() * cumulative[-1], side="right"))
    return int(ids[min(drawn, len(ids) - 1)])


def _add_bias(scores: Scores, logit_bias: Mapping[int, float]) -> None:
    for token, bias in logit_bias.items():
        if token >= scores.size:
            raise ValueError(f"the id of a logit bias {token} is outside the vocabulary of {scores.size}")
        scores[token] = bias if bias == -math.inf else scores[token] + bias


def _penalize(scores: Scores, recent: Iterable[int], options: Options) -> None:
    if not (options.repeat_penalty != 1 or options.frequency_penalty or options.presence_penalty):
        return
    ids, counts = np.unique(np.fromiter(recent, dtype=np.int64), return_counts=True)
    if ids.size and not 0 <= ids[0] <= ids[-1] < scores.size:
        raise ValueError(f"a recent token id is outside the vocabulary of {scores.size}")
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
    weights = _softmax(scores[ids])
    below = scores[ids].max() - scores[ids]  # surprisal, relative to that of the most probable token
    distance = np.abs(below - (weights * below).sum())
    return _fewest(ids, distance, weights, p)


def _top_p(ids: Ids, scores: Scores, p: float) -> Ids:
    if p == 1:
        return ids
    return _fewest(ids, -scores[ids], _softmax(scores[ids]), p)


def _fewest(ids: Ids, keys: Scores, weights: Scores, p: float) -> Ids:
    """Keep the fewest tokens, by lowest key and then lowest id, whose weights sum to at least `p`."""
    order = np.argsort(keys, kind="stable")
    cumulative = np.cumsum(weights[order])
    return np.sort(ids[order[: int(np.searchsorted(cumulative, p)) + 1]])


def _min_p(ids: Ids, scores: Scores, p: float) -> Ids:
    if p == 0:
        return ids
    values = scores[ids]
    kept: Ids = ids[values >= values.max() + math.log(p)]
    return kept


def _softmax(values: Scores, temperature: float = 1.0) -> Scores:
    with np.errstate(over="ignore", under="ignore"):  # a tiny temperature underflows all but the highest
        weights: Scores = np.exp((values - values.max()) / temperature)
    weights /= weights.sum()
    return weights
