"""Texts: tokens match a reference that samples from the logits, and each text ends as requested."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.sampling_reference import log_softmax, reference_tokens
from support.scheduled_texts import texts_of

from metal_prefill import Model, Piece
from metal_prefill.generation._stream import make_streams

PROMPT = "ROMEO:\nBut soft, what light"
CHAINS: list[dict[str, Any]] = [
    {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "repeat_penalty": 1.1},
    {"temperature": 1.0},
    {"temperature": 1.2, "min_p": 0.05, "frequency_penalty": 0.3, "presence_penalty": 0.1},
    {"temperature": 0.9, "typical_p": 0.8, "logit_bias": {30: 2.0, 31: -math.inf}},
    {"repeat_penalty": 1.3},
]


def tokens_of(pieces: Iterator[Piece]) -> list[int]:
    return [piece.token for piece in pieces]


@pytest.mark.parametrize("options", CHAINS)
def test_a_text_matches_a_reference_sampler(demo: Model, options: dict[str, Any]) -> None:
    n = 4 if demo.backend == "metal" else 40
    ids = demo.tokenizer.encode(PROMPT)
    expected = reference_tokens(demo, ids, n, 17, **options)
    assert tokens_of(demo.session().stream(ids, n, seed=17, **options)) == expected
    text = demo.tokenizer.decode(expected)
    assert "".join(demo.generate(ids, n, seed=17, **options)) == text
    assert texts_of(demo.generate_many([ids], n, seed=17, **options), 1) == [text]


def test_streams_of_a_batch_sample_each_with_its_own_seed_and_options(bundled: Model) -> None:
    chains = [(chain | {"seed": i, "max_tokens": 30}) for i, chain in enumerate(CHAINS * 8)]
    pieces = bundled.generate_many([(PROMPT, chain) for chain in chains], max_streams=40)
    texts = texts_of(pieces, len(chains))
    for i in (0, 7, 13, 24, 39):  # more than go through the head together
        assert texts[i] == "".join(bundled.session().generate(PROMPT, **chains[i])), i


def test_a_text_generated_in_parts_equals_the_whole_text(bundled: Model) -> None:
    """Random numbers belong to positions, wherever the text began."""
    ids = bundled.tokenizer.encode(PROMPT)
    options = CHAINS[0] | {"seed": 3}
    whole = tokens_of(bundled.session().stream(ids, 40, **options))
    for cut in (1, 20):
        assert tokens_of(bundled.session().stream([*ids, *whole[:cut]], 40 - cut, **options)) == whole[cut:]


@pytest.mark.parametrize("options", [{}, CHAINS[0]], ids=["greedy", "sampled"])
def test_pieces_have_the_models_log_probabilities(demo: Model, options: dict[str, Any]) -> None:
    n = 4 if demo.backend == "metal" else 12
    ids = demo.tokenizer.encode(PROMPT)
    pieces = list(demo.session().stream(ids, n, logprobs=3, seed=1, **options))
    assert [p.token for p in pieces] == tokens_of(demo.session().stream(ids, n, seed=1, **options))
    assert "".join(p.text for p in pieces) == "".join(demo.generate(ids, n, seed=1, **options))
    with demo.session() as session:
        logits = session.forward_prompt_logits(ids)
        for piece in pieces:
            expected = log_softmax(logits)
            best = np.argsort(-logits, kind="stable")[:3]
            assert piece.logprob == pytest.approx(expected[piece.token], rel=1e-9)
            assert [token for token, _ in piece.top_logprobs] == best.tolist()
            np.testing.assert_allclose([p for _, p in piece.top_logprobs], expected[best], rtol=1e-9)
            logits = session.forward_token(piece.token)
    assert [p.finish_reason for p in pieces] == [None] * (n - 1) + ["length"]
    assert all(p.logprob is None and p.top_logprobs == () for p in demo.session().stream(ids, 2, **options))


def test_a_stop_token_ends_the_text_before_it(bundled: Model) -> None:
    whole = tokens_of(bundled.session().stream(PROMPT, 30))
    stop = whole[12]
    first = whole.index(stop)
    pieces = list(bundled.session().stream(PROMPT, 30, stop=[stop, "no such text"]))
    assert [p.token for p in pieces] == whole[: first + 1]
    assert pieces[-1].finish_reason == "stop"
    text = bundled.tokenizer.decode(whole[:first])
    assert "".join(p.text for p in pieces) == text
    assert "".join(bundled.generate(PROMPT, 30, stop=stop)) == text
    assert texts_of(bundled.generate_many([PROMPT], 30, stop=stop), 1) == [text]


def test_nothing_ends_a_text_before_min_tokens(bundled: Model) -> None:
    stop = tokens_of(bundled.session().stream(PROMPT, 4))[3]
    ends = {stop, *bundled.tokenizer.stop_ids}
    options: dict[str, Any] = {"stop": stop, "logit_bias": dict.fromkeys(ends, 100.0)}
    for least in (0, 3, 10):
        tokens = tokens_of(bundled.session().stream(PROMPT, 30, min_tokens=least, **options))
        assert len(tokens) == least + 1
        assert ends.isdisjoint(tokens[:least])
        assert tokens[least] in ends


def test_stop_strings_before_min_tokens_are_text(bundled: Model) -> None:
    whole = "".join(bundled.generate(PROMPT, 30))
    early = whole[2:4]
    assert "".join(bundled.generate(PROMPT, 30, stop=early)) == whole[: whole.index(early)]
    text = "".join(bundled.generate(PROMPT, 30, stop=early, min_tokens=29))
    assert text.startswith(whole[: whole.index(early) + 2])
    pieces = [piece.text for piece in bundled.session().stream(PROMPT, 9)]
    at = next(i for i in range(1, 9) if pieces[i] not in "".join(pieces[:i]))
    ends = [
        len(tokens_of(bundled.session().stream(PROMPT, 9, stop=pieces[at], min_tokens=at + i)))
        for i in (0, 1)
    ]
    assert ends[0] == at + 1 < ends[1]


def test_echo_prepends_the_prompt(bundled: Model) -> None:
    text = "".join(bundled.generate(PROMPT, 8))
    ids = bundled.tokenizer.encode(PROMPT)
    assert "".join(bundled.generate(PROMPT, 8, echo=True)) == PROMPT + text
    assert "".join(bundled.generate(ids, 8, echo=True)) == bundled.tokenizer.decode(ids) + text
    assert texts_of(bundled.generate_many([PROMPT], 8, echo=True), 1) == [PROMPT + text]
    assert "".join(bundled.generate(PROMPT, 0, echo=True)) == PROMPT
    assert next(iter(bundled.session().stream(PROMPT, 8, echo=True))).text.startswith(PROMPT)


def test_excluding_every_token_is_an_error_and_changes_nothing(demo: Model) -> None:
    none = dict.fromkeys(range(demo.config.vocab_size), -math.inf)
    demo.forward_prompt([1, 2, 3])
    with pytest.raises(ValueError, match="there is no token to choose"):
        list(demo.generate([1, 2, 3, 4, 5], 3, logit_bias=none))
    assert demo.position == 3
    results = list(demo.generate_many([([1, 2], {"logit_bias": none}), [3]], 2, errors="return"))
    assert {i: type(r) for i, r in results} == {0: ValueError, 1: str}


@pytest.mark.parametrize("max_tokens", [0, 1, 6])
def test_prompt_tokens_are_scored_as_pieces(demo: Model, max_tokens: int) -> None:
    ids = demo.tokenizer.encode("ROMEO:\nBut soft, what light")
    options: dict[str, Any] = {"temperature": 0.8, "seed": 2, "repeat_penalty": 1.2}
    pieces = list(demo.session().stream(ids, max_tokens, logprobs=3, prompt_logprobs=True, **options))
    scored, made = pieces[: len(ids) - 1], pieces[len(ids) - 1 :]
    assert [piece.token for piece in scored] == ids[1:]
    assert "".join(piece.text for piece in scored) == ""
    with demo.session() as session:
        logits = [session.forward_token(token) for token in ids[:-1]]
    expected = [log_softmax(row)[token] for row, token in zip(logits, ids[1:], strict=True)]
    scores = np.array([piece.logprob for piece in scored])
    np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-9)  # of sums in float64
    assert [piece.top_logprobs[0][0] for piece in scored] == [row.argmax() for row in logits]
    # The rest is the text without scores, with the same random numbers.
    alone = list(demo.session().stream(ids, max_tokens, logprobs=3, **options))
    if demo.backend == "cpu":
        assert made == alone
    assert [piece.token for piece in made] == [piece.token for piece in alone]


def test_text_alone_has_no_log_probabilities(bundled: Model) -> None:
    with pytest.raises(ValueError, match="stream also returns logprobs"):
        bundled.generate(PROMPT, 2, logprobs=1)


def test_log_probabilities_of_a_pass_are_read_once(demo: Model) -> None:
    """Each reading copies those of all its tokens, so reading them for each token takes quadratic time."""

    class Counted:
        readings = 0

        @property
        def reports(self) -> list[tuple[float, list[tuple[int, float]]]]:
            self.readings += 1
            return [(-float(i), [(i, 0.0)]) for i in range(3)]

    (stream,) = make_streams(demo.engine, [1, 2, 3, 4, 5], 1, 2, logprobs=1, prompt_logprobs=True)
    sampler: Any = Counted()
    stream.text.sampler = sampler
    pieces = list(stream.text.take([2, 3, 4]))
    assert [(piece.logprob, piece.top_logprobs) for piece in pieces] == [
        (-float(i), ((i, 0.0),)) for i in range(3)
    ]
    assert sampler.readings == 1
