"""Beam search finds the most probable texts, as transformers does, and computes its beams together."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.places import DATA
from support.small_models import MODELS, write

from metal_prefill import ContextOverflowError, KVMemoryError, Model
from metal_prefill.generation._beams import Search

RECORDED = json.loads((DATA / "transformers_beams.json").read_text())
STOP = 3  # of a vocabulary of 4

Table = dict[tuple[int, ...], list[float]]


def log_softmax(logits: Any) -> Any:
    shifted = np.asarray(logits, np.float64) - np.max(logits)
    return shifted - np.log(np.exp(shifted).sum())


def found(search: Search, log_probs: Callable[[tuple[int, ...]], Any]) -> list[tuple[float, tuple[int, ...]]]:
    """Run a search to its end."""
    while search.running:
        best = [
            sorted(enumerate(log_probs(beam.tokens)), key=lambda scored: -scored[1])[: search.width]
            for beam in search.running
        ]
        search.advance(best)
    return [(score, text.tokens) for score, text in search.finished]


@pytest.mark.parametrize("case", RECORDED["cases"], ids=lambda case: str(case["seed"]))
def test_texts_and_scores_match_transformers(case: dict[str, Any]) -> None:
    rows = np.random.default_rng(case["seed"]).normal(size=(7, 6, 6)) * 1.5
    search = Search(
        case["num_beams"],
        case["length_penalty"],
        case["early_stopping"],
        7,
        frozenset(case["stop"]),
        case["min_tokens"],
    )
    texts = found(search, lambda tokens: log_softmax(rows[len(tokens), tokens[-1] if tokens else 0]))
    assert [list(tokens) for _, tokens in texts] == [text["tokens"] for text in case["texts"]]
    # transformers adds up in float32.
    np.testing.assert_allclose([s for s, _ in texts], [t["score"] for t in case["texts"]], rtol=1e-5)


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, -1.0, 2.5])
@pytest.mark.parametrize("min_tokens", [0, 2])
def test_enough_beams_find_every_text_in_order(length_penalty: float, min_tokens: int) -> None:
    """As many beams as there are texts: the same as trying all of them."""
    rng, most = np.random.default_rng(7), 4
    table: dict[tuple[int, ...], Any] = {}
    texts = []
    for length in range(most + 1):
        for tokens in itertools.product(range(4), repeat=length):
            table[tokens] = log_softmax(rng.normal(size=4))
            if length == 0 or STOP in tokens[:-1]:
                continue
            if length > min_tokens if tokens[-1] == STOP else length == most:
                logprob = sum(table[tokens[:i]][token] for i, token in enumerate(tokens))
                texts.append((logprob / length**length_penalty, tokens))
    texts.sort(key=lambda scored: -scored[0])
    search = Search(400, length_penalty, False, most, frozenset([STOP]), min_tokens)
    made = found(search, table.__getitem__)
    assert [tokens for _, tokens in made] == [tokens for _, tokens in texts]
    np.testing.assert_allclose([s for s, _ in made], [s for s, _ in texts])


@pytest.mark.parametrize("length_penalty", [0.0, 1.0])
def test_a_stop_string_ends_a_text_as_a_token_does(length_penalty: float) -> None:
    """The result equals that of trying all texts, with texts that contain "012" ending there."""
    rng, most = np.random.default_rng(9), 4
    stopped = (0, 1, 2)
    table: dict[tuple[int, ...], Any] = {}
    texts = []
    for length in range(most + 1):
        for tokens in itertools.product(range(4), repeat=length):
            table[tokens] = log_softmax(rng.normal(size=4))
            ended = tokens[-3:] == stopped or tokens[-1:] == (STOP,)
            begun = tokens[:-1]
            earlier = STOP in begun or any(begun[i : i + 3] == stopped for i in range(length))
            if length == 0 or earlier or not (ended or length == most):
                continue
            logprob = sum(table[tokens[:i]][token] for i, token in enumerate(tokens))
            texts.append((logprob / length**length_penalty, tokens))
    texts.sort(key=lambda scored: -scored[0])
    search = Search(
        400, length_penalty, False, most, frozenset([STOP]), stops=lambda tokens: tokens[-3:] == stopped
    )
    assert [tokens for _, tokens in found(search, table.__getitem__)] == [tokens for _, tokens in texts]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path = write(tmp_path_factory.mktemp("beams") / "tiny.gguf", MODELS["gqa 1"])
    with Model(path, device="cpu", threads=1) as model:
        yield model


def test_the_engine_finds_the_best_of_all_texts_of_two_tokens(tiny: Model) -> None:
    prompt, vocab = [5, 9, 5], tiny.config.vocab_size
    first = log_softmax(tiny.session().forward_prompt_logits(prompt))
    after = tiny.forward_prompts([[*prompt, token] for token in range(vocab)], return_logits=True)
    both = first[:, None] + np.array([log_softmax(row) for row in after])
    stops = sorted(tiny.tokenizer.stop_ids)
    both[stops] = -np.inf  # texts of one token
    best = sorted(
        [(both[a, b] / 2, [a, b]) for a in range(vocab) for b in np.argsort(both[a])[-25:].tolist()]
        + [(first[a], [a]) for a in stops],
        reverse=True,
    )[:20]
    beams = tiny.generate_beams(prompt, 2, num_beams=vocab)
    assert [beam.tokens for beam in beams[:20]] == [tokens for _, tokens in best]
    np.testing.assert_allclose([beam.score for beam in beams[:20]], [score for score, _ in best], rtol=1e-5)


def test_beams_are_rows_of_one_pass(tiny: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[int] = []
    engine = tiny.engine.core

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(engine, name)

        def forward_batch(self, requests: Any) -> Any:
            passes.append(len(requests))
            return engine.forward_batch(requests)

    monkeypatch.setattr(tiny.engine, "_core", Counting())
    position = tiny.position
    beams = tiny.generate_beams([7] * 100, 6, num_beams=3, min_tokens=6)
    assert passes == [1, 3, 3, 3, 3, 3]
    assert len(beams) == 3
    assert tiny.position == position


def test_probabilities_match_the_texts(device: str, model_path: Callable[[str], Path]) -> None:
    with Model(model_path("gqa 1"), device=device) as model:
        prompt = [5, 9, 5, 8]
        for beam in model.generate_beams(prompt, 5, num_beams=3, length_penalty=0.5):
            scores = model.session().score([*prompt, *beam.tokens])[len(prompt) - 1 :]
            assert beam.logprob == pytest.approx(float(scores.sum()), abs=1e-3)
            assert beam.score == pytest.approx(beam.logprob / len(beam.tokens) ** 0.5)


def test_texts_have_finish_reasons(demo_path: Path) -> None:
    with Model(demo_path, device="cpu", max_context=12) as model:
        tokenizer = model.tokenizer
        prompt = tokenizer.encode("ROMEO:\n")
        comma = tokenizer.encode(",", add_bos=False)[0]
        for least, reason in ((0, "stop"), (20, "context")):
            beams = model.generate_beams("ROMEO:\n", 30, stop=comma, length_penalty=0.0, min_tokens=least)
            assert reason in {beam.finish_reason for beam in beams}
            for beam in beams:
                stopped = beam.finish_reason == "stop"
                assert beam.text == tokenizer.decode(beam.tokens[: -1 if stopped else None])
                assert (beam.tokens[-1] in {comma, *tokenizer.stop_ids}) == stopped
                assert len(beam.tokens) == 12 - len(prompt) + 1 or stopped
            assert [beam.score for beam in beams] == sorted((beam.score for beam in beams), reverse=True)
        (short,) = model.generate_beams(prompt, 1, num_beams=1)
        assert (short.tokens, short.finish_reason) == ([model.session().forward_prompt(prompt)], "length")


@pytest.mark.parametrize("least", [0, 10])
def test_texts_end_before_a_stop_string(demo_path: Path, least: int) -> None:
    """Also one that several tokens spell, and that begins in the middle of one."""
    with Model(demo_path, device="cpu") as model:
        decode = model.tokenizer.decode
        (free,) = model.generate_beams("JULIET:\n", 14, num_beams=1, min_tokens=14)
        stop = decode(free.tokens[8:11])[1:]
        assert len(stop) > 3
        beams = model.generate_beams(
            "JULIET:\n", 14, num_beams=4, stop=stop, min_tokens=least, length_penalty=0.0, echo=True
        )
        options: dict[str, Any] = {"num_beams": 1, "stop": [stop, "no text has this"], "min_tokens": least}
        (first,) = model.generate_beams("JULIET:\n", 14, **options)
        early = decode(free.tokens[:least])
        before, found, _ = decode(free.tokens)[len(early) :].partition(stop)
        assert bool(found) == (least == 0)
        assert (first.text, first.finish_reason) == (early + before, "stop" if found else "length")
        assert first.tokens == free.tokens[: len(first.tokens)]
        for beam in beams:
            assert beam.text.startswith("JULIET:\n")
            whole, early = decode(beam.tokens), decode(beam.tokens[:least])
            text, _, _ = whole[len(early) :].partition(stop)
            assert beam.text == "JULIET:\n" + early + text
            assert stop not in decode(beam.tokens[:-1])[len(early) :]
            if beam.finish_reason == "length":
                assert len(beam.tokens) == 14


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_beams": 0}, ValueError, "num_beams"),
        ({"max_tokens": 0}, ValueError, "max_tokens"),
        ({"early_stopping": "soon"}, ValueError, "early_stopping must be True, False or 'never', got 'soon'"),
        ({"length_penalty": float("nan")}, ValueError, "length_penalty must be finite, got nan"),
        ({"stop": ""}, ValueError, "a stop string is empty"),
        ({"stop": [400]}, ValueError, "400"),
        ({"prompt": []}, ValueError, "the prompt is empty"),
        ({"prompt": [1] * 2000}, ContextOverflowError, "a prompt of 2000 tokens exceeds the context of 1024"),
    ],
)
def test_invalid_searches_are_rejected(
    tiny: Model, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        tiny.generate_beams(**{"prompt": [1], **options})


def test_exhausted_memory_is_an_error_and_is_released(model_path: Callable[[str], Path]) -> None:
    with Model(model_path("gqa 1"), device="cpu", kv_memory=1, prefix_memory=0) as model:
        with pytest.raises(KVMemoryError) as kept:  # with its traceback
            model.generate_beams([1] * 60, 10, num_beams=4)
        assert model.session().forward_prompt([1] * 60) >= 0
        assert kept.value
