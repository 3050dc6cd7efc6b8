"""Scores of pairs by cross-encoders, next to sentence-transformers'."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.encoder_tasks import INT8, NEAR, FileOf, opened, scores_of
from support.task_folders import (
    DOCUMENTS,
    QUERY,
    RANKERS,
)

from metal_prefill import Model


@pytest.mark.parametrize("name", RANKERS)
def test_scores_of_pairs_match_sentence_transformers(
    device: str, file_of: FileOf, record: dict[str, Any], name: str
) -> None:
    with opened(file_of(RANKERS[name]), device) as model:
        ranked = model.rerank(QUERY, DOCUMENTS)
        assert [item.score for item in ranked] == sorted((item.score for item in ranked), reverse=True)
        np.testing.assert_allclose(scores_of(model), record["ranks"][name], rtol=0, atol=NEAR[device] * 4)


def test_8_bit_products_stay_near_the_scores(file_of: FileOf, record: dict[str, Any]) -> None:
    with Model(file_of(RANKERS["xlm-roberta"], "Q8_0"), device="cpu") as model:
        np.testing.assert_allclose(scores_of(model), record["ranks"]["xlm-roberta"], rtol=0, atol=INT8)


def test_a_pair_has_the_same_score_alone_and_in_any_batch(file_of: FileOf) -> None:
    path = file_of(RANKERS["bert"], "Q8_0")
    with Model(path, device="cpu") as model, Model(path, device="cpu", threads=1) as one:
        together = scores_of(model)
        for i, document in enumerate(DOCUMENTS):
            assert scores_of(one, [document])[0] == together[i]
        np.testing.assert_array_equal(scores_of(model, DOCUMENTS[::-1])[::-1], together)
