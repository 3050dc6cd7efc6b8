"""Sampling: each filter alone, their order, the frequencies of draws, and invalid input.

What is expected is computed by hand; `test_native_sampling` compares random options with NumPy.
"""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from metal_prefill.generation import Options, Sampler
from metal_prefill.generation._sampling import REPEAT_WINDOW

DRAWS = 1500
LOG_HALF = float(np.float32(math.log(0.5)))


def logits_of(*probabilities: float) -> npt.NDArray[np.float32]:
    logits: npt.NDArray[np.float32] = np.log(np.array(probabilities)).astype(np.float32)
    return logits


def choose(
    logits: npt.ArrayLike, *, seed: int = 0, recent: Iterable[int] = (), allowed: Any = None, **options: Any
) -> int:
    return Sampler(Options(**options), seed=seed, recent=recent)(logits, allowed=allowed)


def frequencies(logits: npt.ArrayLike, **options: Any) -> npt.NDArray[np.float64]:
    draws = [choose(logits, seed=seed, **options) for seed in range(DRAWS)]
    return np.bincount(draws, minlength=len(np.asarray(logits))) / DRAWS


def assert_close(observed: npt.NDArray[np.float64], expected: list[float]) -> None:
    """Each frequency is within 4.5 standard deviations; tokens of probability 0 are never drawn."""
    p = np.array(expected)
    deviation = np.sqrt(p * (1 - p) / DRAWS)
    assert (np.abs(observed - p) <= 4.5 * deviation).all(), (observed, p)


LOGITS = logits_of(0.5, 0.3, 0.2)


@pytest.mark.parametrize(
    ("logits", "options", "expected"),
    [
        (LOGITS, {}, [0.5, 0.3, 0.2]),
        # The temperature is an exponent of the probabilities.
        (LOGITS, {"temperature": 0.5}, [0.25 / 0.38, 0.09 / 0.38, 0.04 / 0.38]),
        ([0.0, 5.0, -5.0, 1.0], {"temperature": 1e12}, [0.25] * 4),
        # top_k keeps the most probable, ties by id; 0, or more than there are, keeps all.
        (logits_of(0.1, 0.4, 0.2, 0.3), {"top_k": 2}, [0, 4 / 7, 0, 3 / 7]),
        ([1.0, 0.0, 1.0, 1.0], {"top_k": 2}, [0.5, 0, 0.5, 0]),
        *((LOGITS, {"top_k": top_k}, [0.5, 0.3, 0.2]) for top_k in (0, 3, 4, 1000)),
        # top_p keeps the fewest that reach it.
        (LOGITS, {"top_p": 0.3}, [1, 0, 0]),
        (LOGITS, {"top_p": 0.49}, [1, 0, 0]),
        (LOGITS, {"top_p": 0.51}, [5 / 8, 3 / 8, 0]),
        (LOGITS, {"top_p": 0.81}, [0.5, 0.3, 0.2]),
        # min_p is relative to the highest, and keeps a probability that is exactly the least.
        (LOGITS, {"min_p": 0.39}, [0.5, 0.3, 0.2]),
        (LOGITS, {"min_p": 0.41}, [5 / 8, 3 / 8, 0]),
        (LOGITS, {"min_p": 1.0}, [1, 0, 0]),
        ([0.0, LOG_HALF, -1.0], {"min_p": math.exp(LOG_HALF)}, [2 / 3, 1 / 3, 0]),
        # The expected surprisal is 1.03 nats. The tokens' are 0.69, 1.20 and 1.61: 0.34, 0.17 and 0.58 away.
        (LOGITS, {"typical_p": 0.2}, [0, 1, 0]),
        (LOGITS, {"typical_p": 0.31}, [5 / 8, 3 / 8, 0]),
        (LOGITS, {"typical_p": 0.79}, [5 / 8, 3 / 8, 0]),
        (LOGITS, {"typical_p": 0.81}, [0.5, 0.3, 0.2]),
        # All weights are equal, and half of them is exactly half of their sum, which reaches it.
        *(
            (np.zeros(n), {option: 0.5}, [2 / n] * (n // 2) + [0] * (n // 2))
            for n in (2, 4, 100)
            for option in ("top_p", "typical_p")
        ),
        # Typical leaves 5/8 and 3/8, of which the first reaches 0.6.
        (LOGITS, {"typical_p": 0.31, "top_p": 0.6}, [1, 0, 0]),
        # Of the two that top_k leaves, with 0.66 nats expected, the first (0.47) is nearer than the other
        # (0.98).
        (LOGITS, {"top_k": 2, "typical_p": 0.5}, [1, 0, 0]),
        # Of the two that top_k leaves, 5/8 and 3/8, the first alone reaches 0.6; of all three it would not.
        (LOGITS, {"top_k": 2, "top_p": 0.6}, [1, 0, 0]),
        # Filters precede the temperature: at 100 all three are nearly equal, and 0.6 would keep two of any.
        (logits_of(0.7, 0.2, 0.1), {"temperature": 100.0, "top_p": 0.6}, [1, 0, 0]),
        # Infinite logits share the choice.
        ([0.0, math.inf, -math.inf, math.inf], {}, [0, 0.5, 0, 0.5]),
        ([0.0, -math.inf, 0.0], {}, [0.5, 0, 0.5]),
        ([math.inf, 1.0, 1.0], {"logit_bias": {0: -math.inf}}, [0, 0.5, 0.5]),
    ],
)
def test_draws_have_the_frequencies_of_the_definition(
    logits: npt.ArrayLike, options: dict[str, Any], expected: list[float]
) -> None:
    assert_close(frequencies(logits, **{"temperature": 1.0, **options}), expected)


@pytest.mark.parametrize(
    ("logits", "options", "chosen"),
    [
        ([0.0, 3.0, 1.0], {}, 1),
        ([0.0, 3.0, 3.0, 3.0], {}, 1),  # the lowest id wins a tie
        ([1.0, 2.0, 1.5], {"temperature": 1e-300}, 1),
        ([0.0, math.inf, math.inf], {}, 1),
        (np.zeros(1000), {"temperature": 1.0, "top_p": 1e-9}, 0),  # which keeps one token at least
        # The repeat penalty divides positive and multiplies negative logits, once for each token.
        ([2.0, 1.5, -1.0], {"repeat_penalty": 2.0, "recent": [0]}, 1),
        ([-1.0, -1.5, -9.0], {"repeat_penalty": 2.0, "recent": [0]}, 1),
        ([2.0, 1.5], {"repeat_penalty": 1.25, "recent": [0]}, 0),
        ([2.0, 1.5], {"repeat_penalty": 1.25, "recent": [0, 0, 0]}, 0),
        ([1.0, 1.5], {"repeat_penalty": 0.5, "recent": [0]}, 0),
        # The presence penalty applies once, the frequency penalty for each occurrence.
        ([2.0, 1.75, 1.0], {"presence_penalty": 0.5, "recent": [0, 0, 1]}, 0),
        ([2.0, 1.75, 1.0], {"frequency_penalty": 0.5, "recent": [0, 0, 1]}, 1),
        ([2.0, 1.75, 1.0], {"frequency_penalty": 0.5, "presence_penalty": 0.5, "recent": [0, 0, 1]}, 2),
        ([1.0, 1.25], {"frequency_penalty": -0.5, "recent": [0]}, 0),
        ([2.0, -1.0], {"repeat_penalty": 2.0, "presence_penalty": 3.0, "recent": [0]}, 1),
        # The bias is added before the penalties: 1 - 2 is negative, which a penalty multiplies; -3 is below
        # -2, and 1 / 3 - 2 would not be.
        ([1.0, 0.0, -1.0], {"logit_bias": {2: 2.5}}, 2),
        ([5.0, 1.0, 0.0], {"logit_bias": {0: -math.inf}}, 1),
        ([math.inf, 1.0], {"logit_bias": {0: -math.inf}}, 1),
        ([1.0, -2.0], {"logit_bias": {0: -2.0}, "repeat_penalty": 3.0, "recent": [0]}, 1),
    ],
)
def test_the_choice_is_that_of_the_definition(
    logits: npt.ArrayLike, options: dict[str, Any], chosen: int
) -> None:
    assert choose(logits, **options) == chosen


def test_a_mask_excludes_all_but_what_it_allows() -> None:
    allowed = np.zeros(100, bool)
    allowed[[31, 32, 64, 99]] = True
    expected = np.where(allowed, 0.25, 0.0).tolist()
    assert_close(frequencies(np.zeros(100), temperature=1.0, allowed=allowed), expected)
    assert choose(np.arange(100.0, 0, -1), allowed=allowed) == 31
    assert choose(np.zeros(100), allowed=allowed, logit_bias={0: 9.0, 64: 1.0}) == 64
    for wrong in (allowed[:99], allowed.astype(np.uint8)):
        with pytest.raises(ValueError, match=r"must be bool \[100\]"):
            choose(np.zeros(100), allowed=wrong)
    with pytest.raises(ValueError, match="there is no token to choose"):
        choose(np.zeros(100), allowed=~allowed & allowed)


def test_logits_are_not_modified() -> None:
    logits = np.array([1.0, 2.0, 3.0], dtype=np.float32)
    choose(logits, temperature=0.7, top_k=2, top_p=0.9, min_p=0.1, repeat_penalty=1.3, recent=[2])
    assert logits.tolist() == [1.0, 2.0, 3.0]


def test_invalid_logits_are_rejected() -> None:
    logits: Any
    for logits, message in [
        ([0.0, math.nan], "token 1 is NaN"),
        ([-math.inf, -math.inf], "every logit is -inf"),
        ([], "not empty"),
        ([[1.0, 2.0]], "one-dimensional"),
    ]:
        for temperature in [0.0, 1.0]:
            with pytest.raises(ValueError, match=message):
                choose(logits, temperature=temperature)


def test_recent_ids_outside_the_vocabulary_are_rejected() -> None:
    for recent in [[-1], [3], [0, 10**12]]:
        with pytest.raises(ValueError, match="outside the vocabulary of 3"):
            choose([0.0, 1.0, 2.0], repeat_penalty=1.1, recent=recent)


def test_options_out_of_range_are_rejected_by_name() -> None:
    value: Any
    for option, value in [
        *(("temperature", v) for v in (-0.1, math.inf, math.nan)),
        ("top_k", -1),
        *(("top_p", v) for v in (0.0, -0.5, 1.01, math.nan)),
        *(("min_p", v) for v in (-0.1, 1.5, math.nan)),
        *(("repeat_penalty", v) for v in (0.0, -1.0, math.inf, math.nan)),
        *(("typical_p", v) for v in (0.0, -0.5, 1.01, math.nan)),
        *(("frequency_penalty", v) for v in (math.inf, math.nan)),
        *(("presence_penalty", v) for v in (-math.inf, math.nan)),
        *(("logit_bias", v) for v in ({-1: 1.0}, {2**31: 1.0}, {1: math.inf}, {1: math.nan})),
    ]:
        with pytest.raises(ValueError, match=option):
            Options(**{option: value})
    with pytest.raises(TypeError):
        Options(top_k=2.5)  # type: ignore[arg-type]


def test_a_bias_outside_the_vocabulary_is_rejected() -> None:
    with pytest.raises(ValueError, match="logit bias 3 is outside the vocabulary of 3"):
        choose([0.0, 1.0, 2.0], logit_bias={3: 1.0})


def test_greedy_sampling_has_no_penalty() -> None:
    assert not Options(frequency_penalty=0.1).is_greedy
    assert not Options(presence_penalty=-0.1).is_greedy
    assert not Options(logit_bias={0: 0.0}).is_greedy
    assert Options().is_greedy
    assert not Options(temperature=0.1).is_greedy
    assert not Options(repeat_penalty=1.1).is_greedy


def test_the_sampler_keeps_a_window_of_its_choices() -> None:
    sampler = Sampler(Options(repeat_penalty=1e9), recent=[0])
    logits = np.arange(REPEAT_WINDOW + 2, 0, -1.0)  # the lowest ids are the most probable
    chosen = [sampler(logits) for _ in range(REPEAT_WINDOW + 1)]
    assert chosen[: REPEAT_WINDOW - 1] == list(range(1, REPEAT_WINDOW))
    assert chosen[REPEAT_WINDOW - 1] == REPEAT_WINDOW  # 0 leaves the window, but only after this choice
    assert chosen[REPEAT_WINDOW] == 0
