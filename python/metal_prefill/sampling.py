"""Choosing the next token from logits.

The steps and their order are those of llama.cpp's default chain: repeat penalty, top-k, top-p, min-p,
temperature. Each filter sees the probabilities before the temperature, over what the filters before it left.
"""

from __future__ import annotations

import math
import operator
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Ids: TypeAlias = npt.NDArray[np.intp]
Scores: TypeAlias = npt.NDArray[np.float64]

REPEAT_WINDOW = 64  # latest tokens that the repeat penalty looks at


@dataclass(frozen=True)
class Options:
    """How to choose.

    Attributes
    ----------
    temperature : float
        Divides the logits; 0 takes the most probable token, and of equal ones the lowest id.
    top_k : int
        Keep the k most probable tokens, of equal ones those of lowest id; 0 keeps all.
    top_p : float
        Keep the fewest most probable tokens whose probabilities sum to at least this; 1 keeps all.
    min_p : float
        Keep tokens of at least this fraction of the highest probability; 0 keeps all.
    repeat_penalty : float
        Divides positive logits of recent tokens and multiplies negative ones (arXiv:1909.05858); 1 changes
        nothing.

    Raises
    ------
    ValueError
        If an option is out of range.
    TypeError
        If `top_k` is not an integer.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be finite and not negative, got {self.temperature}")
        if operator.index(self.top_k) < 0:
            raise ValueError(f"top_k must not be negative, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be between 0 and 1, got {self.min_p}")
        if not 0 < self.repeat_penalty < math.inf:
            raise ValueError(f"repeat_penalty must be positive and finite, got {self.repeat_penalty}")

    @property
    def is_greedy(self) -> bool:
        """Whether the choice is the plain argmax of the logits, as the engines compute it."""
        return self.temperature == 0 and self.repeat_penalty == 1


class Sampler:
    """Chooses token after token, remembering them for the repeat penalty.

    Parameters
    ----------
    options
        How to choose.
    seed
        Of the random numbers; None draws a fresh one.
    recent
        Ids of the tokens before the first choice, oldest first.
    """

    def __init__(self, options: Options, *, seed: int | None = None, recent: Iterable[int] = ()) -> None:
        self.options = options
        self._rng = np.random.default_rng(seed)
        self._recent = deque(recent, maxlen=REPEAT_WINDOW)

    def __call__(self, logits: npt.ArrayLike) -> int:
        """Choose a token; see :func:`sample` for the logits and the errors."""
        token = _choose(logits, self.options, self._recent, self._rng)
        self._recent.append(token)
        return token


def sample(
    logits: npt.ArrayLike,
    *,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repeat_penalty: float = 1.0,
    recent: Iterable[int] = (),
    rng: np.random.Generator | None = None,
) -> int:
    """Choose one token.

    Parameters
    ----------
    logits
        ``[vocab_size]``, left as they are. ``-inf`` excludes a token; where some are ``+inf``, the choice is
        among those.
    temperature, top_k, top_p, min_p, repeat_penalty
        See :class:`Options`.
    recent
        Ids that the repeat penalty applies to, once each however often they occur.
    rng
        Source of random numbers; a fresh one by default.

    Returns
    -------
    int
        The id of the token.

    Raises
    ------
    ValueError
        If a logit is NaN, none is above ``-inf``, the array is not one-dimensional or empty, a recent id is
        outside the vocabulary, or an option is out of range.
    """
    options = Options(temperature, top_k, top_p, min_p, repeat_penalty)
    return _choose(logits, options, recent, np.random.default_rng() if rng is None else rng)


def _choose(logits: npt.ArrayLike, options: Options, recent: Iterable[int], rng: np.random.Generator) -> int:
    scores = np.array(logits, dtype=np.float64)
    if scores.ndim != 1 or scores.size == 0:
        raise ValueError(f"logits must be one-dimensional and not empty, got shape {scores.shape}")
    if np.isnan(scores).any():
        raise ValueError(f"the logit of token {int(np.flatnonzero(np.isnan(scores))[0])} is NaN")
    _penalize(scores, recent, options.repeat_penalty)
    highest = scores.max()
    if highest == -math.inf:
        raise ValueError("every logit is -inf: there is no token to choose")
    if highest == math.inf:
        scores = np.where(scores == math.inf, 0.0, -math.inf)
    if options.temperature == 0:
        return int(scores.argmax())

    ids = np.flatnonzero(scores > -math.inf)
    ids = _top_k(ids, scores, options.top_k)
    ids = _top_p(ids, scores, options.top_p)
    ids = _min_p(ids, scores, options.min_p)
    # A draw in [0, 1) picks the token whose stretch of the cumulative distribution it falls into.
    cumulative = np.cumsum(_softmax(scores[ids], options.temperature))
    drawn = int(np.searchsorted(cumulative, rng.random() * cumulative[-1], side="right"))
    return int(ids[min(drawn, len(ids) - 1)])


def _penalize(scores: Scores, recent: Iterable[int], penalty: float) -> None:
    if penalty == 1:
        return
    ids = np.unique(np.fromiter(recent, dtype=np.int64))
    if ids.size and not 0 <= ids[0] <= ids[-1] < scores.size:
        raise ValueError(f"a recent token id is outside the vocabulary of {scores.size}")
    scores[ids] = np.where(scores[ids] > 0, scores[ids] / penalty, scores[ids] * penalty)


def _top_k(ids: Ids, scores: Scores, k: int) -> Ids:
    if k == 0 or k >= len(ids):
        return ids
    values = scores[ids]
    border = np.partition(values, -k)[-k]
    above = ids[values > border]
    return np.sort(np.concatenate([above, ids[values == border][: k - len(above)]]))


def _top_p(ids: Ids, scores: Scores, p: float) -> Ids:
    if p == 1:
        return ids
    descending = ids[np.argsort(-scores[ids], kind="stable")]
    cumulative = np.cumsum(_softmax(scores[descending]))
    return descending[: int(np.searchsorted(cumulative, p)) + 1]


def _min_p(ids: Ids, scores: Scores, p: float) -> Ids:
    if p == 0:
        return ids
    values = scores[ids]
    kept: Ids = ids[values >= values.max() + math.log(p)]
    return kept


def _softmax(values: Scores, temperature: float = 1.0) -> Scores:
    with np.errstate(
        over="ignore", under="ignore"
    ):  # a tiny temperature sends all but the highest to exp(-inf)
        weights: Scores = np.exp((values - values.max()) / temperature)
    weights /= weights.sum()
    return weights
