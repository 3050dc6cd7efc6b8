"""Passes over texts, and pooled states."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from support import model_folders
from support.encoder_tasks import FileOf, opened
from support.model_folders import DIM

from metal_prefill.tasks._text_passes import TextPasses, pooled_states


def test_a_text_that_fails_is_named_and_the_others_can_be_computed(file_of: FileOf) -> None:
    path = file_of(model_folders.bert)
    with opened(path) as model:
        passes = TextPasses(model.engine)
        good, bad = np.array([1, 2, 3], np.int32), np.array([1, model.config.vocab_size], np.int32)
        with pytest.raises(ValueError, match=rf"^text 1: token id {model.config.vocab_size} at index 1 "):
            list(pooled_states(passes, "mean", [good, bad], ["text 0", "text 1"]))
        alone = list(pooled_states(passes, "mean", [good], ["text 0"]))
        assert alone[0].shape == (DIM,)
        assert np.all(np.isfinite(alone[0]))


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_pooled_states_are_those_of_all_tokens(file_of: FileOf, pooling: Any) -> None:
    path = file_of(model_folders.bert)
    with opened(path) as model:
        passes = TextPasses(model.engine, rows=lambda: 7)  # of several passes
        texts = [np.arange(1, n + 1, dtype=np.int32) for n in (3, 4, 1, 9, 2)]
        names = [f"text {i}" for i in range(5)]
        whole = list(pooled_states(passes, "none", texts, names))
        assert [len(states) for states in whole] == [3, 4, 1, 9, 2]
        for states, vector in zip(whole, pooled_states(passes, pooling, texts, names), strict=True):
            expected = {"mean": states.mean(axis=0, dtype=np.float64), "cls": states[0], "last": states[-1]}
            assert np.array_equal(vector, expected[pooling].astype(np.float32))


def test_texts_fill_the_rows_of_a_pass(file_of: FileOf) -> None:
    path = file_of(model_folders.bert)
    counts: list[int] = []
    with opened(path) as model:
        core = model.engine.core

        def run(call: Any) -> list[Any]:
            counts.append(call.rows)
            return core.forward_batch(call.take_requests())

        texts = [np.arange(1, n + 1, dtype=np.int32) for n in (3, 4, 1, 9, 2, 5, 1)]
        passes = TextPasses(model.engine, run, rows=lambda: 7)
        assert len(list(pooled_states(passes, "mean", texts, ["text"] * 7))) == 7
    assert counts == [7, 1, 9, 7, 1]  # a longer text goes alone


@pytest.mark.parametrize(
    ("lengths", "pooling", "message"),
    [
        ([2, 2], "mean", "text 1 has 2 tokens, of 1 that are left"),
        ([2, 0], "mean", "text 1 has 0 tokens, of 1 that are left"),
        ([2, -1], "mean", "text 1 has -1 tokens, of 1 that are left"),
        ([2], "mean", "the texts have 2 tokens, but 3 were given"),
        ([3], "max", "pooling of a text is none, mean, cls or last, not 'max'"),
    ],
)
def test_texts_of_wrong_lengths_are_refused(
    file_of: FileOf, lengths: list[int], pooling: str, message: str
) -> None:
    path = file_of(model_folders.bert)
    with opened(path) as model, pytest.raises(ValueError, match=re.escape(message)):
        model.engine.core.text_requests(np.zeros(3, np.int32), np.array(lengths, np.int32), pooling)
