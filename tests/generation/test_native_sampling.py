"""The sampler of the native core: its random numbers, and its choices against `sampling.sample` in NumPy.

`tests/generation/test_sampling.py` compares both with the definition of each filter. Here they use the same
random numbers and must choose the same tokens.
"""

import math
from typing import Any

import numpy as np
import pytest
from support.sampling_reference import drawn, log_softmax, logits_like_a_model, philox, sample

from metal_prefill import _core
from metal_prefill.generation import Options, Sampler
from metal_prefill.generation._sampling import core_sampler


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
    assert _core.philox(counter, key) == expected
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


def test_a_given_token_outside_the_vocabulary_is_an_error() -> None:
    for token in (-1, 3):
        sampler = core_sampler(Options(), 1, [])
        sampler.report(0)
        sampler.follow([token])
        with pytest.raises(ValueError, match=f"token id {token} is outside the vocabulary of 3"):
            sampler.choose(np.zeros(3, np.float32))


def test_a_top_p_just_below_one_ends_although_sums_are_rounded() -> None:
    """The sum of all probabilities may be below it, depending on the order of additions."""
    rng = np.random.default_rng(1)
    for _ in range(50):
        sampler = core_sampler(Options(1.0, top_p=math.nextafter(1, 0)), 1, [])
        assert 0 <= sampler.choose(rng.normal(0, 1, 1000).astype(np.float32)) < 1000


@pytest.mark.parametrize(
    ("logits", "options", "expected"),
    [
        # A token with a bias is compared with the others by id if scores are equal, else in float64.
        ([1, 1], {"logit_bias": {0: 0.0}}, 0),
        ([1, 1], {"logit_bias": {1: 1e-9}}, 1),
        # The most probable token is kept, with and without a bias.
        ([1, 2], {"temperature": 1.0, "min_p": 1.0}, 1),
        ([1, 2], {"temperature": 1.0, "min_p": 1.0, "logit_bias": {1: 0.0}}, 1),
        # A bias does not make a finite logit one of the infinite ones.
        ([math.inf, 1, 2], {"temperature": 4.0, "logit_bias": {1: 1.0, 2: 1.0}}, 0),
        # The least temperature is that of the argmax.
        ([1, 3, 2], {"temperature": math.nextafter(0, 1)}, 1),
        # An excluded token has no part in the expected surprisal, to which the second token is nearest, nor
        # among the tokens of top-k.
        *(
            (
                [*np.log([0.5, 0.3, 0.2]), *logits, *[-math.inf] * 9],
                {"temperature": 1.0, "typical_p": 0.2, "logit_bias": {3: -math.inf}, **more},
                1,
            )
            for logits in ([1.0], [math.inf], [-math.inf])
            for more in ({}, {"top_k": 3}, {"top_k": 5}, {"top_k": 50})
        ),
    ],
)
def test_choices_at_the_edges_of_filters(logits: list[float], options: dict[str, Any], expected: int) -> None:
    for seed in range(10):
        assert Sampler(Options(**options), seed=seed)(logits) == expected
