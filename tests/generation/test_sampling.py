"""Sampling: random numbers, choices compared with a reference in NumPy, edges of filters, invalid input."""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.sampling_reference import drawn, log_softmax, logits_like_a_model, philox, sample

from metal_prefill.generation import Options, Sampler
from metal_prefill.generation._sampling import REPEAT_WINDOW, core_sampler

LOG_HALF = float(np.float32(math.log(0.5)))


def choose(
    logits: npt.ArrayLike, *, seed: int = 0, recent: Iterable[int] = (), allowed: Any = None, **options: Any
) -> int:
    return Sampler(Options(**options), seed=seed, recent=recent)(logits, allowed=allowed)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        # Known answers that the authors' library Random123 publishes.
        ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_random_numbers_are_those_of_philox(counter: list[int], key: list[int], expected: list[int]) -> None:
    assert philox(counter, key) == expected


def some_options(rng: np.random.Generator, n: int) -> dict[str, Any]:
    """Each option has its own value in one of two cases."""
    values = {
        "top_k": int(rng.integers(1, 2 * min(n, 200) + 1)),
        "top_p": float(rng.uniform(0.05, 1)),
        "min_p": float(rng.uniform(0, 0.3)),
        "typical_p": float(rng.uniform(0.05, 1)),
        "repeat_penalty": float(rng.uniform(0.7, 2)),
        "frequency_penalty": float(rng.uniform(-1, 1)),
        "presence_penalty": float(rng.uniform(-1, 1)),
        "logit_bias": {int(i): float(rng.normal(0, 5)) for i in rng.integers(0, n, 3)},
    }
    chosen = {name: value for name, value in values.items() if rng.random() < 0.5}
    return {"temperature": float(rng.choice([0.0, 0.3, 1.0, 4.0], p=[0.1, 0.3, 0.3, 0.3]))} | chosen


def test_choices_match_the_reference() -> None:
    for n in [1, 2, 63, 64, 65, 1000, 49152]:
        rng = np.random.default_rng(n)
        for _ in range(60 if n > 10_000 else 300):
            logits, options = logits_like_a_model(rng, n), some_options(rng, n)
            recent = [int(i) for i in rng.integers(0, n, int(rng.integers(0, 64)))]
            allowed = rng.random(n) < 0.8 if rng.random() < 0.2 else None
            if allowed is not None:
                allowed[int(logits.argmax())] = True
            seed = int(rng.integers(2**63))
            expected = sample(logits, drawn(seed, len(recent)), recent=recent, allowed=allowed, **options)
            sampler = Sampler(Options(**options), seed=seed, recent=recent)
            assert sampler(logits, allowed=allowed) == expected, (options, recent)


def test_each_seed_position_and_answer_has_its_own_random_number() -> None:
    logits = np.zeros(1 << 20, np.float32)  # the token identifies the number

    def draw(seed: int, position: int, answer: int) -> int:
        return core_sampler(Options(1.0), seed, [0] * position, answer).choose(logits)

    cases = [(s, p, a) for s in (0, 1, 2**32, 2**63) for p in (0, 1, 64, 65) for a in (0, 1)]
    numbers = {case: draw(*case) for case in cases}
    assert len(set(numbers.values())) == len(cases)
    for (seed, position, answer), token in numbers.items():
        assert token == int(drawn(seed, position, answer) * len(logits))


def test_a_seed_counts_by_its_lowest_64_bits_and_is_not_negative() -> None:
    logits = np.zeros(1000, np.float32)
    assert Sampler(Options(1.0), seed=2**64 + 5)(logits) == Sampler(Options(1.0), seed=5)(logits)
    with pytest.raises(ValueError, match="seed must not be negative, got -1"):
        Sampler(Options(1.0), seed=-1)


def test_without_a_seed_texts_differ() -> None:
    logits = np.zeros(1 << 20, np.float32)
    assert len({Sampler(Options(1.0))(logits) for _ in range(4)}) > 1


@pytest.mark.parametrize("n", [1, 5, 64, 49152])
def test_log_probabilities_are_those_of_unmodified_logits(n: int) -> None:
    for best in [0, 1, 5, 100]:
        rng = np.random.default_rng(n)
        logits = logits_like_a_model(rng, n)
        expected = log_softmax(logits)
        options = Options(0.8, repeat_penalty=1.3, top_k=3, logit_bias={0: 1.0})
        sampler = core_sampler(options, 1, range(min(n, 9)))
        sampler.report(best)
        chosen = sampler.choose(logits)
        ((log_prob, found),) = sampler.reports
        assert log_prob == pytest.approx(expected[chosen], rel=1e-12, abs=1e-12)
        order = np.argsort(-logits, kind="stable")[:best]
        order = order[np.isfinite(logits[order])]
        assert [token for token, _ in found] == order.tolist()
        np.testing.assert_allclose([p for _, p in found], expected[order], rtol=1e-12, atol=1e-12)


def test_infinite_logits_share_the_probability() -> None:
    sampler = core_sampler(Options(), 1, [])
    sampler.report(3)
    assert sampler.choose(np.array([0, math.inf, math.inf, -math.inf], np.float32)) == 1
    ((log_prob, best),) = sampler.reports
    assert log_prob == pytest.approx(math.log(0.5))
    assert best == [(1, pytest.approx(math.log(0.5))), (2, pytest.approx(math.log(0.5))), (0, -math.inf)]


def test_forbidden_tokens_are_not_chosen_before_their_position() -> None:
    sampler = core_sampler(Options(logit_bias={1: 0.0}), 1, [7, 7])
    sampler.forbid([0, 1], 4)
    logits, chosen = np.array([3, 2, 1], np.float32), []
    for _ in range(3):
        chosen.append(sampler.choose(logits))
        sampler.accept(chosen[-1])
    assert chosen == [2, 2, 0]


def test_a_choice_that_fails_or_is_not_accepted_changes_nothing() -> None:
    options = Options(1.0, repeat_penalty=5.0)
    logits = np.random.default_rng(1).normal(0, 1, 50).astype(np.float32)
    sampler, other = core_sampler(options, 3, [1, 2]), core_sampler(options, 3, [1, 2])
    for bad in (np.full(50, math.nan), np.full(50, -math.inf), np.zeros(2)):
        with pytest.raises(ValueError, match=r"is NaN|no token to choose|outside the vocabulary of 2"):
            sampler.choose(bad.astype(np.float32))
    assert sampler.choose(logits) == sampler.choose(logits)
    for _ in range(5):
        token = sampler.choose(logits)
        assert token == other.choose(logits)
        sampler.accept(token)
        other.accept(token)
    assert sampler.position == 7


def test_penalties_cover_the_latest_tokens_after_drafts_were_rejected() -> None:
    """Choices after drafts are those of a sampler that accepted them, however many it accepts then."""
    for seed in range(12):
        rng = np.random.default_rng(seed)
        options: dict[str, Any] = {"temperature": 1.0, "frequency_penalty": 1.5, "repeat_penalty": 1.2}
        tokens = [int(i) for i in rng.integers(0, 20, int(rng.choice([0, 3, 55, 63, 64, 70])))]
        sampler = core_sampler(Options(**options), seed, tokens)
        for _ in range(8):
            drafts = [int(i) for i in rng.integers(0, 20, int(rng.integers(0, 32)))]
            for n in range(len(drafts) + 1):
                logits = rng.normal(0, 1, 20).astype(np.float32)
                whole = [*tokens, *drafts[:n]]
                expected = sample(logits, drawn(seed, len(whole)), recent=whole[-64:], **options)
                assert sampler.choose(logits, drafts[:n]) == expected, (seed, len(tokens), n)
            for token in drafts[: int(rng.integers(0, len(drafts) + 1))]:
                sampler.accept(token)
                tokens.append(token)


def test_the_last_mask_applies_to_all_later_tokens() -> None:
    sampler, logits = core_sampler(Options(), 1, []), np.array([3, 2, 1], np.float32)
    sampler.allow([bytes([0b100]), bytes([0b010])])
    chosen = []
    for _ in range(3):
        chosen.append(sampler.choose(logits))
        sampler.accept(chosen[-1])
    assert chosen == [2, 1, 1]


def test_a_mask_excludes_tokens_beyond_its_end() -> None:
    """A vocabulary may be padded beyond the tokens that a constraint knows."""
    logits = np.arange(100, dtype=np.float32)
    for words in (1, 2, 3):
        sampler = core_sampler(Options(), 1, [])
        sampler.allow([b"\xff" * 4 * words])
        assert sampler.choose(logits) == 32 * words - 1


def test_a_top_p_just_below_one_ends_although_sums_are_rounded() -> None:
    """The sum of all probabilities may be below it, depending on the order of additions."""
    rng = np.random.default_rng(1)
    for _ in range(50):
        sampler = core_sampler(Options(1.0, top_p=math.nextafter(1, 0)), 1, [])
        assert 0 <= sampler.choose(rng.normal(0, 1, 1000).astype(np.float32)) < 1000


@pytest.mark.parametrize(
    ("logits", "options", "expected"),
    [
        # Of equal tokens, those of lowest id are kept.
        ([0.0, 3.0, 3.0, 3.0], {"temperature": 0.0}, {1}),
        ([1.0, 0.0, 1.0, 1.0], {"top_k": 2}, {0, 2}),
        # All weights are equal, and half of them is exactly half of their sum, which reaches it.
        *((np.zeros(n), {p: 0.5}, {*range(n // 2)}) for n in (2, 4) for p in ("top_p", "typical_p")),
        (np.zeros(1000), {"top_p": 1e-9}, {0}),  # one token at least
        # The least is relative to the highest, and a probability that is exactly the least is kept.
        *((np.log([0.5, 0.3, 0.2]), {"min_p": p}, {*range(n)}) for p, n in ((0.39, 3), (0.41, 2))),
        ([0.0, LOG_HALF, -1.0], {"min_p": math.exp(LOG_HALF)}, {0, 1}),
        # The least temperature is that of the argmax; at the highest all are equal.
        ([1, 3, 2], {"temperature": math.nextafter(0, 1)}, {1}),
        ([0.0, 5.0, -5.0, 1.0], {"temperature": 1e12}, {0, 1, 2, 3}),
        # Infinite logits share the choice, and a finite one with a bias is not one of them.
        ([0.0, math.inf, -math.inf, math.inf], {}, {1, 3}),
        ([0.0, -math.inf, 0.0], {}, {0, 2}),
        ([math.inf, 1.0, 1.0], {"logit_bias": {0: -math.inf}}, {1, 2}),
        ([math.inf, 1.0], {"temperature": 0.0, "logit_bias": {0: -math.inf}}, {1}),
        ([math.inf, 1, 2], {"temperature": 4.0, "logit_bias": {1: 1.0, 2: 1.0}}, {0}),
        # A token with a bias is compared with the others by id if scores are equal, else in float64.
        ([1, 1], {"temperature": 0.0, "logit_bias": {0: 0.0}}, {0}),
        ([1, 1], {"temperature": 0.0, "logit_bias": {0: 0.0, 1: 0.0}}, {0}),
        ([1, 1], {"temperature": 0.0, "logit_bias": {1: 1e-9}}, {1}),
        # The most probable token is kept, with and without a bias.
        ([1, 2], {"min_p": 1.0}, {1}),
        ([1, 2], {"min_p": 1.0, "logit_bias": {1: 0.0}}, {1}),
        # An excluded token has no part in the expected surprisal, to which the second token is nearest, nor
        # among the tokens of top-k.
        *(
            (
                [*np.log([0.5, 0.3, 0.2]), *logits, *[-math.inf] * 9],
                {"typical_p": 0.2, "logit_bias": {3: -math.inf}, **more},
                {1},
            )
            for logits in ([1.0], [math.inf], [-math.inf])
            for more in ({}, {"top_k": 3}, {"top_k": 5}, {"top_k": 50})
        ),
    ],
)
def test_tokens_that_are_chosen_at_the_edges_of_filters(
    logits: npt.ArrayLike, options: dict[str, Any], expected: set[int]
) -> None:
    options = {"temperature": 1.0, **options}
    assert {choose(logits, seed=seed, **options) for seed in range(40)} == expected


def test_a_mask_excludes_all_but_what_it_allows() -> None:
    allowed = np.zeros(100, bool)
    allowed[[31, 32, 64, 99]] = True
    drawn_ones = {choose(np.zeros(100), seed=i, temperature=1.0, allowed=allowed) for i in range(60)}
    assert drawn_ones == {31, 32, 64, 99}
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


def test_ids_outside_the_vocabulary_are_rejected() -> None:
    for recent in [[-1], [3], [0, 10**12]]:
        with pytest.raises(ValueError, match="outside the vocabulary of 3"):
            choose([0.0, 1.0, 2.0], repeat_penalty=1.1, recent=recent)
    with pytest.raises(ValueError, match="logit bias 3 is outside the vocabulary of 3"):
        choose([0.0, 1.0, 2.0], logit_bias={3: 1.0})
    for token in (-1, 3):
        sampler = core_sampler(Options(), 1, [])
        sampler.report(0)
        sampler.follow([token])
        with pytest.raises(ValueError, match=f"token id {token} is outside the vocabulary of 3"):
            sampler.choose(np.zeros(3, np.float32))


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


def test_greedy_sampling_has_no_penalty() -> None:
    assert Options().is_greedy
    changes: list[dict[str, Any]] = [{"frequency_penalty": 0.1}, {"presence_penalty": -0.1}]
    changes += [{"logit_bias": {0: 0.0}}, {"temperature": 0.1}, {"repeat_penalty": 1.1}]
    assert not any(Options(**change).is_greedy for change in changes)


def test_the_sampler_keeps_a_window_of_its_choices() -> None:
    sampler = Sampler(Options(repeat_penalty=1e9), recent=[0])
    logits = np.arange(REPEAT_WINDOW + 2, 0, -1.0)  # the lowest ids are the most probable
    chosen = [sampler(logits) for _ in range(REPEAT_WINDOW + 1)]
    assert chosen[: REPEAT_WINDOW - 1] == list(range(1, REPEAT_WINDOW))
    assert chosen[REPEAT_WINDOW - 1] == REPEAT_WINDOW  # 0 leaves the window, but only after this choice
    assert chosen[REPEAT_WINDOW] == 0
