"""Helpers of tests of encoders' tasks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from metal_prefill import Model
from support.folders.model_folders import Folder
from support.folders.task_folders import CLASSIFIERS, DOCUMENTS, QUERY, RANKERS, TAGGERS

# Probabilities and products of vectors: sums in float32, and products of half precision on Metal.
NEAR = {"cpu": 1e-5, "metal": 5e-3}
INT8 = 2e-2  # with matrices in 8 bits, on models of 32 columns


class FileOf(Protocol):
    """Converts a folder, and returns the path of the file."""

    def __call__(self, make: Callable[[Path], Folder], tensor_type: str = "auto") -> Path: ...


def opened(path: Path, device: str = "cpu", max_context: int | None = None) -> Model:
    """Open a file in float32."""
    return Model(path, device=device, compute="f32", kv_dtype="f32", max_context=max_context)


# Tasks of encoders: folders, and calls that compute comparable results of a list of texts.
TASKS: dict[str, tuple[Callable[[Path], Folder], Callable[..., Any]]] = {
    "embed": (RANKERS["bert"], lambda m, texts, **o: m.embed(texts, pooling="mean", **o).tolist()),
    "rerank": (RANKERS["bert"], lambda m, texts, **o: m.rerank("q", texts, **o)),
    "classify": (CLASSIFIERS["bert"], lambda m, texts, **o: m.classify(texts, **o).probabilities.tolist()),
    "label": (
        TAGGERS["bert"],
        lambda m, texts, **o: m.label_tokens(texts, strategy="none", ignore=(), **o),
    ),
}


def scores_of(model: Model, documents: list[str] = DOCUMENTS, **options: Any) -> npt.NDArray[np.float64]:
    scores = np.empty(len(documents))
    for item in model.rerank(QUERY, documents, **options):
        scores[item.index] = item.score
    return scores
