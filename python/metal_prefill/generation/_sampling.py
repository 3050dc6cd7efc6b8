"""Sampling of the next token from logits.

The steps and their order are those of llama.cpp's default chain: logit bias, penalties, top-k, typical,
top-p, min-p, temperature. Each filter uses the probabilities before the temperature, over the tokens that
earlier filters kept.

:class:`Sampler` and all text generation sample in the native core, where the logits are. :func:`sample`
implements the same steps in NumPy, for experiments and as a reference. Both compute in float64, and a sum
equal to a threshold reaches it. If a sum is within rounding error (relative 1e-15) of a threshold, the two
may differ; each is deterministic.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from metal_prefill import _core
from metal_prefill._support.arguments import integer, number

Ids: TypeAlias = npt.NDArray[np.intp]
Scores: TypeAlias = npt.NDArray[np.float64]

REPEAT_WINDOW = 64  # most recent tokens that the penalties cover
_NO_BIAS: Mapping[int, float] = MappingProxyType({})


@dataclass(frozen=True)
class Options:
    """Sampling options.

    Attributes
    ----------
    temperature : float
        Divisor of the logits; 0 selects the most probable token, with ties broken by the lowest id.
    top_k : int
        Keep the k most probable tokens, with ties broken by the lowest id; 0 keeps all.
    top_p : float
        Keep the fewest most probable tokens whose probabilities sum to at least this; 1 keeps all.
    min_p : float
        Keep tokens of at least this fraction of the highest probability; 0 keeps all.
    repeat_penalty : float
        Divides positive logits of recent tokens and multiplies negative ones (arXiv:1909.05858); 1 changes
        nothing. Recent tokens are the last 64 of prompt and text.
    typical_p : float
        Keep the fewest tokens whose probabilities sum to at least this, in order of the distance of their
        surprisal from its expected value (arXiv:2202.00666); 1 keeps all.
    frequency_penalty : float
        Subtracted from the logit of a recent token for each occurrence.
    presence_penalty : float
        Subtracted from the logit of each recent token.
    logit_bias : mapping of int to float
        Values added to the logits of tokens before all other steps; ``-inf`` excludes a token.

    Raises
    ------
    ValueError
        If an option is out of range.
    TypeError
        If an option is not a number, or `top_k` or an id of `logit_bias` is not an integer.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    typical_p: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not 0 <= number("temperature", self.temperature) < math.inf:
            raise ValueError(f"temperature must be finite and not negative, got {self.temperature}")
        integer("top_k", self.top_k, 0)
        if not 0 < number("top_p", self.top_p) <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if not 0 <= number("min_p", self.min_p) <= 1:
            raise ValueError(f"min_p must be between 0 and 1, got {self.min_p}")
        if not 0 < number("repeat_penalty", self.repeat_penalty) < math.inf:
            raise ValueError(f"repeat_penalty must be positive and finite, got {self.repeat_penalty}")
        if not 0 < number("typical_p", self.typical_p) <= 1:
            raise ValueError(f"typical_p must be above 0 and at most 1, got {self.typical_p}")
        for name in ("frequency_penalty", "presence_penalty"):
            if not math.isfinite(number(name, getattr(self, name))):
                raise ValueError(f"{name} must be finite, got {getattr(self, name)}")
        if not isinstance(self.logit_bias, Mapping):
            kind = type(self.logit_bias).__name__
            raise TypeError(f"logit_bias must be a mapping of token ids to numbers, got {kind}")
        for token, bias in self.logit_bias.items():
            if not 0 <= integer("a token id of logit_bias", token) <= _LARGEST_ID:
                raise ValueError(f"a token id of logit_bias must be between 0 and {_LARGEST_ID}, got {token}")
            added = number(f"logit_bias of token {token}", bias)
            if math.isnan(added) or added == math.inf:
                raise ValueError(f"logit_bias of token {token} must be finite or -inf, got {bias}")

    @property
    def is_greedy(self) -> bool:
        """Whether the choice is the plain argmax of the logits, which the engines compute."""
        return self.temperature == 0 and not self.logit_bias and not self._penalizes

    @property
    def _penalizes(self) -> bool:
        return self.repeat_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0


_LARGEST_ID = 2**31 - 1


def core_sampler(options: Options, seed: int | None, recent: Iterable[int], answer: int = 0) -> _core.Sampler:
    """Create the native sampler of a text.

    Parameters
    ----------
    options, seed, recent
        As for :class:`Sampler`.
    answer
        Index of the text among those of one prompt and seed; each has its own random numbers.
    """
    core = _core.SamplingOptions()
    core.window = REPEAT_WINDOW
    core.temperature = options.temperature
    core.top_k = min(int(options.top_k), _LARGEST_ID)
    core.typical_p, core.top_p, core.min_p = options.typical_p, options.top_p, options.min_p
    core.repeat_penalty = options.repeat_penalty
    core.frequency_penalty, core.presence_penalty = options.frequency_penalty, options.presence_penalty
    core.logit_bias = {int(token): number("logit_bias", bias) for token, bias in options.logit_bias.items()}
    if seed is None:
        seed = secrets.randbits(64)
    seed = integer("seed", seed, 0)
    ids = np.fromiter(recent, dtype=np.int64)
    ids[(ids < 0) | (ids > _LARGEST_ID)] = -1  # also outside the vocabulary; rejected when a penalty uses it
    return _core.Sampler(core, seed % 2**64, answer, ids.astype(np.int32))


class Sampler:
    """Stateful sampler that records its tokens for the penalties.

    A choice depends only on the logits, the tokens before it, the seed and the position. Random numbers are a
    function of seed and position (Philox 4x32-10), the same on every machine.

    Parameters
    ----------
    options
        Sampling options.
    seed
        Seed of the random numbers, not negative, of which the lowest 64 bits are used. None draws a new one.
    recent
        Ids of the tokens before the first choice, oldest first. Their number is the position of that choice.
    """

    def __init__(self, options: Options, *, seed: int | None = None, recent: Iterable[int] = ()) -> None:
        self.options = options
        self._core = core_sampler(options, seed, recent)

    def __call__(self, logits: npt.ArrayLike, *, allowed: npt.ArrayLike | None = None) -> int:
        """Choose a token from logits, converted to float32; see :func:`sample` for mask and errors."""
        with np.errstate(over="ignore"):
            scores = np.ascontiguousarray(logits, dtype=np.float32)
        _check_shape(scores)
        mask = np.empty(0, np.uint8) if allowed is None else _checked_mask(allowed, scores.size)
        self._core.allow(mask.astype(np.uint8))
        token = self._core.choose(scores)
        self._core.accept(token)
        return token


def sample(
    logits: npt.ArrayLike,
    *,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repeat_penalty: float = 1.0,
    typical_p: float = 1.0,
    frequency_penalty: float = 0.0,
    presence_penalty: float = 0.0,
    logit_bias: Mapping[int, float] = _NO_BIAS,
    allowed: npt.ArrayLike | None = None,
    recent: Iterable[int] = (),
    rng: np.random.Generator | None = None,
) -> int:
    """Choose one token from logits.

    Parameters
    ----------
    logits
        ``[vocab_size]``, not modified. ``-inf`` excludes a token; if some are ``+inf``, the choice is among
        those.
    temperature, top_k, top_p, min_p, repeat_penalty, typical_p, frequency_penalty, presence_penalty, \
logit_bias
        See :class:`Options`.
    allowed
        Whether each token may be chosen, bool ``[vocab_size]``; None allows all.
    recent
        Ids that the penalties apply to. The number of occurrences matters only for `frequency_penalty`.
    rng
        Source of random numbers; a fresh one by default.

    Returns
    -------
    int
        Token id.

    Raises
    ------
    ValueError
        If a logit is NaN, no allowed logit is above ``-inf``, the array is not one-dimensional or is empty, a
        recent id is outside the vocabulary, or an option is out of range.
    """
    options = Options(
        temperature,
        top_k,
        top_p,
        min_p,
        repeat_penalty,
        typical_p,
        frequency_penalty,
        presence_penalty,
        logit_bias,
    )
    return _choose(logits, options, allowed, recent, np.random.default_rng() if rng is None else rng)


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
    if not options._penalizes:
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
