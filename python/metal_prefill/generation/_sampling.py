"""Options of a text, and the choice of its next token by sampling.

The steps and their order are those of llama.cpp's default chain: logit bias, penalties, top-k, typical,
top-p, min-p, temperature. Each filter uses the probabilities before the temperature, over the tokens that
earlier filters kept.

:class:`Sampler` and all text generation sample in the native core, where the logits are. It computes in
float64; a sum equal to a threshold counts as reaching it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt

from metal_prefill import _core
from metal_prefill._support.arguments import integer, number
from metal_prefill.generation._speculation import Speculate

REPEAT_WINDOW = 64  # most recent tokens that the penalties cover
_RANGES: Mapping[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (lambda x: 0 <= x < math.inf, "finite and not negative"),
    "top_p": (lambda x: 0 < x <= 1, "above 0 and at most 1"),
    "min_p": (lambda x: 0 <= x <= 1, "between 0 and 1"),
    "repeat_penalty": (lambda x: 0 < x < math.inf, "positive and finite"),
    "typical_p": (lambda x: 0 < x <= 1, "above 0 and at most 1"),
    "frequency_penalty": (math.isfinite, "finite"),
    "presence_penalty": (math.isfinite, "finite"),
}


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
        integer("top_k", self.top_k, 0)
        for name, (allows, values) in _RANGES.items():
            if not allows(number(name, getattr(self, name))):
                raise ValueError(f"{name} must be {values}, got {getattr(self, name)}")
        if not isinstance(self.logit_bias, Mapping):
            kind = type(self.logit_bias).__name__
            raise TypeError(f"logit_bias must be a mapping of token ids to numbers, got {kind}")
        biases: dict[int, float] = {}  # a copy, since the caller may change the mapping
        for token, bias in list(self.logit_bias.items()):
            token_id = integer("a token id of logit_bias", token)
            if not 0 <= token_id <= _LARGEST_ID:
                raise ValueError(f"a token id of logit_bias must be between 0 and {_LARGEST_ID}, got {token}")
            biases[token_id] = added = number(f"logit_bias of token {token}", bias)
            if math.isnan(added) or added == math.inf:
                raise ValueError(f"logit_bias of token {token} must be finite or -inf, got {bias}")
        object.__setattr__(self, "logit_bias", biases)

    @property
    def is_greedy(self) -> bool:
        """Whether the choice is the plain argmax of the logits, which the engines compute."""
        penalties = (self.repeat_penalty, self.frequency_penalty, self.presence_penalty)
        return self.temperature == 0 and not self.logit_bias and penalties == (1, 0, 0)


SAMPLING = tuple(option.name for option in fields(Options))  # options that choose tokens


class TextOptions(TypedDict, total=False):
    """Options of a text: those of `SAMPLING`, and others of :meth:`metal_prefill.Session.generate`."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    typical_p: float
    frequency_penalty: float
    presence_penalty: float
    logit_bias: Mapping[int, float]
    seed: int | None
    stop: str | int | Sequence[str | int]
    min_tokens: int
    reasoning: bool
    calls: bool
    echo: bool
    logprobs: int | None
    prompt_logprobs: bool
    speculate: Speculate
    json_schema: Mapping[str, Any] | str | None
    regex: str | None
    grammar: str | None


def sampling_of(options: TextOptions) -> Options:
    """Return the sampling options among those of a text; raises TypeError for an unknown option."""
    if unknown := options.keys() - TextOptions.__annotations__.keys():
        known = ", ".join(sorted(TextOptions.__annotations__))
        raise TypeError(f"{min(unknown)!r} is not an option of a text; options are {known}")
    given: dict[str, Any] = {name: value for name, value in options.items() if name in SAMPLING}
    if given.get("logit_bias") is None:
        given.pop("logit_bias", None)
    return Options(**given)


_LARGEST_ID = 2**31 - 1


def core_sampler(options: Options, seed: int | None, recent: Iterable[int], answer: int = 0) -> _core.Sampler:
    """Create the native sampler of a text; `options`, `seed` and `recent` are as for :class:`Sampler`.

    Texts of one prompt and seed have different random numbers, by their index `answer`.
    """
    core = _core.SamplingOptions()
    core.window = REPEAT_WINDOW
    for name, value in {**vars(options), "top_k": min(int(options.top_k), _LARGEST_ID)}.items():
        setattr(core, name, value)
    if seed is None:
        seed = int.from_bytes(os.urandom(8), "little")
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
        """Choose a token.

        Parameters
        ----------
        logits
            ``[vocab_size]``, converted to float32, not modified. ``-inf`` excludes a token; if some are
            ``+inf``, the choice is among those.
        allowed
            Whether each token may be chosen, bool ``[vocab_size]``; None allows all.

        Returns
        -------
        int
            Token id.

        Raises
        ------
        ValueError
            If a logit is NaN, no allowed logit is above ``-inf``, the array is not one-dimensional or is
            empty, or a recent id is outside the vocabulary.
        """
        with np.errstate(over="ignore"):
            scores = np.array(logits, np.float32, order="C")  # a copy: another thread may change them
        if scores.ndim != 1 or scores.size == 0:
            raise ValueError(f"logits must be one-dimensional and not empty, got shape {scores.shape}")
        self._core.allow([] if allowed is None else [_checked_mask(allowed, scores.size)])
        token = self._core.choose(scores)
        self._core.accept(token)
        return token


def _checked_mask(allowed: npt.ArrayLike, vocab_size: int) -> bytes:
    """Return a bit of each token, in the order of ids."""
    mask = np.array(allowed, order="C")
    if mask.dtype != np.bool_ or mask.shape != (vocab_size,):
        raise ValueError(
            f"a mask of allowed tokens must be bool [{vocab_size}], got {mask.dtype} {list(mask.shape)}"
        )
    return np.packbits(mask, bitorder="little").tobytes()
