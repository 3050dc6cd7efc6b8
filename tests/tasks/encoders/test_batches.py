"""Results of tasks are the same for a text alone and in any batch, and progress is reported."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.encoder_tasks import FileOf, scores_of
from support.folders import bidirectional_folders, entity_folders, task_folders
from support.folders.encoder_folders import distilbert_masked, private_parts
from support.folders.model_folders import Folder
from support.folders.task_folders import DOCUMENTS, LATE, MODULES, QUERY, RANKERS, TAGGERS, TEXTS

from metal_prefill import Model

QUERIES = [QUERY, "who", "the king", "", f"{QUERY} he"]
vectors = partial(Model.embed, normalize=False)
queries = partial(Model.embed, instruction="query")


def entities(name: str) -> Callable[..., Any]:
    options = next(iter(entity_folders.calls_of(name).values()))
    return partial(Model.find_entities, labels=entity_folders.LABELS, **options)


def scores(model: Model, texts: list[str], **_: Any) -> Any:
    return scores_of(model, texts)


def three_kinds(model: Model, texts: list[str], **more: Any) -> Any:
    """Return three kinds of vectors of each text, which are those of their own calls."""
    found = model.embed_hybrid(texts, **more)
    weights = [(v.ids, v.weights) for v in found.sparse]
    np.testing.assert_array_equal(found.dense, model.embed(texts))
    np.testing.assert_equal(sparse(model, texts), weights)
    return list(zip(found.dense, found.tokens, weights, strict=True))


def sparse(model: Model, texts: list[str], **more: Any) -> Any:
    return [(v.ids, v.weights) for v in model.embed_sparse(texts, **more)]


# Folders, compute modes, calls and texts.
CASES: dict[str, tuple[Callable[[Path], Folder], str, Callable[..., Any], list[str]]] = {
    **{
        f"entities, {name}": (entity_folders.RECORDED[name], "int8", entities(name), entity_folders.TEXTS)
        for name in ("deberta", "bert, words", "modernbert and bert")
    },
    "labels": (TAGGERS["bert"], "int8", Model.label_tokens, ["", *TEXTS]),
    "parts": (private_parts, "int8", Model.label_tokens, ["", *TEXTS]),
    "scores": (RANKERS["bert"], "int8", scores, DOCUMENTS),
    "over the vocabulary": (distilbert_masked, "f32", sparse, TEXTS),
    "three kinds": (task_folders.hybrid, "int8", three_kinds, TEXTS),
    **{f"vectors, {name}": (MODULES[name], "f32", vectors, TEXTS) for name in MODULES},
    **{
        f"without causality, {name}": (bidirectional_folders.RECORDED[name], "int8", vectors, TEXTS)
        for name in ("llama", "qwen3, projected", "qwen3, integers")
    },
    **{f"queries in {mode}": (LATE["unseen"], mode, queries, QUERIES) for mode in ("f32", "int8", "bf16")},
    "fixed queries": (LATE["seen, fixed"], "int8", queries, QUERIES),
    "queries of PyLate": (LATE["PyLate"], "bf16", queries, QUERIES),
    "queries with windows": (LATE["modernbert"], "int8", queries, QUERIES),
}


@pytest.mark.parametrize("name", CASES)
def test_a_text_has_the_same_result_alone_and_in_any_batch(file_of: FileOf, name: str) -> None:
    make, compute, call, texts = CASES[name]
    path, counts = file_of(make, "auto" if compute == "f32" else "Q8_0"), []
    options: dict[str, Any] = {"device": "cpu", "compute": compute}
    with Model(path, **options) as model, Model(path, threads=1, **options) as one:
        together = list(call(model, texts, progress=lambda *done: counts.append(done)))
        assert len(set(map(repr, together))) > 1
        np.testing.assert_equal(list(call(model, texts[::-1]))[::-1], together)
        np.testing.assert_equal([call(one, [text])[0] for text in texts], together)
    assert counts == [(i, len(texts)) for i in range(1, len(texts) + 1)] or call is scores
