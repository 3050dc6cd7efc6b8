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


def test_zero_temperature_takes_the_most_probable() -> None:
    assert choose([0.0, 3.0, 1.0]) == 1


def test_lowest_id_wins_a_tie() -> None:
    assert choose([0.0, 3.0, 3.0, 3.0]) == 1


def test_temperature_one_draws_from_the_softmax() -> None:
    assert_close(frequencies(logits_of(0.5, 0.3, 0.2), temperature=1.0), [0.5, 0.3, 0.2])


def test_temperature_is_an_exponent_of_the_probabilities() -> None:
    squares = [0.25 / 0.38, 0.09 / 0.38, 0.04 / 0.38]
    assert_close(frequencies(logits_of(0.5, 0.3, 0.2), temperature=0.5), squares)


def test_tiny_temperature_is_greedy_without_a_warning() -> None:
    assert choose([1.0, 2.0, 1.5], temperature=1e-300) == 1


def test_huge_temperature_is_uniform() -> None:
    assert_close(frequencies([0.0, 5.0, -5.0, 1.0], temperature=1e12), [0.25] * 4)


def test_top_k_keeps_the_k_most_probable() -> None:
    observed = frequencies(logits_of(0.1, 0.4, 0.2, 0.3), temperature=1.0, top_k=2)
    assert_close(observed, [0, 4 / 7, 0, 3 / 7])


def test_top_k_breaks_ties_by_id() -> None:
    observed = frequencies([1.0, 0.0, 1.0, 1.0], temperature=1.0, top_k=2)
    assert_close(observed, [0.5, 0, 0.5, 0])


def test_top_k_of_zero_or_beyond_the_vocabulary_keeps_all() -> None:
    for top_k in [0, 3, 4, 1000]:
        assert_close(frequencies(logits_of(0.5, 0.3, 0.2), temperature=1.0, top_k=top_k), [0.5, 0.3, 0.2])


@pytest.mark.parametrize(
    ("top_p", "expected"),
    [(0.3, [1, 0, 0]), (0.49, [1, 0, 0]), (0.51, [5 / 8, 3 / 8, 0]), (0.81, [0.5, 0.3, 0.2])],
)
def test_top_p_keeps_the_fewest_that_reach_it(top_p: float, expected: list[float]) -> None:
    assert_close(frequencies(logits_of(0.5, 0.3, 0.2), temperature=1.0, top_p=top_p), expected)


def test_top_p_keeps_one_token_at_least() -> None:
    assert choose(np.zeros(1000), temperature=1.0, top_p=1e-9) == 0


@pytest.mark.parametrize(
    ("min_p", "expected"), [(0.39, [0.5, 0.3, 0.2]), (0.41, [5 / 8, 3 / 8, 0]), (1.0, [1, 0, 0])]
)
def test_min_p_is_relative_to_the_highest(min_p: float, expected: list[float]) -> None:
    assert_close(frequencies(logits_of(0.5, 0.3, 0.2), temperature=1.0, min_p=min_p), expected)


@pytest.mark.parametrize(
    ("typical_p", "expected"),
    [(0.2, [0, 1, 0]), (0.31, [5 / 8, 3 / 8, 0]), (0.79, [5 / 8, 3 / 8, 0]), (0.81, [0.5, 0.3, 0.2])],
)
def test_typical_keeps_the_nearest_to_the_expected_surprisal(typical_p: float, expected: list[float]) -> None:
    # The expected surprise is 1.03 nats. The tokens' are 0.69, 1.20 and 1.61: 0.34, 0.17 and 0.58 away.
    assert_close(frequencies(logits_of(0.5, 0.3, 0.2), temperature=1.0, typical_p=typical_p), expected)


def test_typical_comes_before_top_p_and_top_k_before_typical() -> None:
    logits = logits_of(0.5, 0.3, 0.2)
    # Typical leaves 5/8 and 3/8, of which the first reaches 0.6.
    assert_close(frequencies(logits, temperature=1.0, typical_p=0.31, top_p=0.6), [1, 0, 0])
    # Of the two that top_k leaves, with 0.66 nats expected, the first (0.47) is nearer than the other (0.98).
    assert_close(frequencies(logits, temperature=1.0, top_k=2, typical_p=0.5), [1, 0, 0])


def test_sums_equal_to_a_threshold_reach_it() -> None:
    for n in [2, 4, 100]:
        # All weights are equal, and half of them is exactly half of their sum.
        for option in ("top_p", "typical_p"):
            observed = frequencies(np.zeros(n), temperature=1.0, **{option: 0.5})
            assert_close(observed, [2 / n] * (n // 2) + [0] * (n // 2))


def test_min_p_keeps_a_probability_that_is_exactly_the_least() -> None:
    logits = np.array([0.0, math.log(0.5), -1.0])
    half = float(np.exp(np.float64(np.float32(logits[1]))))
    assert_close(frequencies(logits.astype(np.float32), temperature=1.0, min_p=half), [2 / 3, 1 / 3, 0])


def test_top_p_acts_on_what_top_k_left() -> None:
    # Of the two that top_k leaves, 5/8 and 3/8, the first alone reaches 0.6; of all three it would not.
    assert_close(frequencies(logits_of(0.5, 0.3, 0.2), temperature=1.0, top_k=2, top_p=0.6), [1, 0, 0])


def test_filters_use_probabilities_before_the_temperature() -> None:
    # At temperature 100 all three are nearly equal, and top_p=0.6 would have to keep two of any.
    observed = frequencies(logits_of(0.7, 0.2, 0.1), temperature=100.0, top_p=0.6)
    assert_close(observed, [1, 0, 0])


def test_repeat_penalty_divides_positive_and_multiplies_negative_logits() -> None:
    assert choose([2.0, 1.5, -1.0], repeat_penalty=2.0, recent=[0]) == 1
    assert choose([-1.0, -1.5, -9.0], repeat_penalty=2.0, recent=[0]) == 1
    assert choose([2.0, 1.5], repeat_penalty=1.25, recent=[0]) == 0


def test_repeat_penalty_counts_a_token_once() -> None:
    assert choose([2.0, 1.5], repeat_penalty=1.25, recent=[0, 0, 0]) == 0


def test_presence_penalty_applies_once_and_frequency_penalty_per_occurrence() -> None:
    recent = [0, 0, 1]
    assert choose([2.0, 1.75, 1.0], presence_penalty=0.5, recent=recent) == 0
    assert choose([2.0, 1.75, 1.0], frequency_penalty=0.5, recent=recent) == 1
    assert choose([2.0, 1.75, 1.0], frequency_penalty=0.5, presence_penalty=0.5, recent=recent) == 0 + 2
    assert choose([1.0, 1.25], frequency_penalty=-0.5, recent=[0]) == 0
    assert choose([2.0, -1.0], repeat_penalty=2.0, presence_penalty=3.0, recent=[0]) == 1


def test_bias_is_added_before_the_penalties() -> None:
    assert choose([1.0, 0.0, -1.0], logit_bias={2: 2.5}) == 2
    assert choose([5.0, 1.0, 0.0], logit_bias={0: -math.inf}) == 1
    assert choose([math.inf, 1.0], logit_bias={0: -math.inf}) == 1
    observed = frequencies([math.inf, 1.0, 1.0], logit_bias={0: -math.inf}, temperature=1.0)
    assert_close(observed, [0, 0.5, 0.5])
    # 1 - 2 is negative, which a penalty multiplies: -1 * 3 is below -2; 1 / 3 - 2 would not be.
    assert choose([1.0, -2.0], logit_bias={0: -2.0}, repeat_penalty=3.0, recent=[0]) == 1


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


def test_repeat_penalty_below_one_favours_repetition() -> None:
    assert choose([1.0, 1.5], repeat_penalty=0.5, recent=[0]) == 0


def test_infinite_logits_share_the_choice() -> None:
    assert choose([0.0, math.inf, math.inf]) == 1
    assert_close(frequencies([0.0, math.inf, -math.inf, math.inf], temperature=1.0), [0, 0.5, 0, 0.5])


def test_minus_infinity_is_never_drawn() -> None:
    assert_close(frequencies([0.0, -math.inf, 0.0], temperature=1.0), [0.5, 0, 0.5])


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


def test_top_k_must_be_an_integer() -> None:
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


def test_the_seed_determines_the_draws() -> None:
    options, logits = Options(temperature=1.0), np.zeros(1000)
    first, second, other = (Sampler(options, seed=seed) for seed in (5, 5, 6))
    draws = [first(logits) for _ in range(20)]
    assert draws == [second(logits) for _ in range(20)]
    assert draws != [other(logits) for _ in range(20)]


def test_the_sampler_keeps_a_window_of_its_choices() -> None:
    sampler = Sampler(Options(repeat_penalty=1e9), recent=[0])
    logits = np.arange(REPEAT_WINDOW + 2, 0, -1.0)  # the lowest ids are the most probable
    chosen = [sampler(logits) for _ in range(REPEAT_WINDOW + 1)]
    assert chosen[: REPEAT_WINDOW - 1] == list(range(1, REPEAT_WINDOW))
    assert chosen[REPEAT_WINDOW - 1] == REPEAT_WINDOW  # 0 leaves the window, but only after this choice
    assert chosen[REPEAT_WINDOW] == 0
