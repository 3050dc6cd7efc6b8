"""Threads that embed, rank, classify and label hostile texts, each result compared with the same call alone.

The suite runs half a second of it; ``make soak MINUTES=n`` runs longer, with another seed each time.
"""

import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from support.folders import model_folders, task_folders
from support.folders.task_folders import CLASSIFIERS, LATE, RANKERS, TAGGERS
from support.hostile_texts import hostile_texts
from support.soak import SECONDS, SEED, rounds

from metal_prefill import Model
from metal_prefill.conversion import convert

THREADS = 6

pytestmark = [
    pytest.mark.timeout(0 if SECONDS else 300),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

Task = Callable[[Model, Random, list[str]], Any]


def _options(random: Random) -> dict[str, Any]:
    return {"truncate": random.choice(("end", "error")), "unicode": random.choice((None, "NFC"))}


def _embed(model: Model, random: Random, texts: list[str]) -> Any:
    return model.embed(texts, pooling=random.choice(("mean", "cls", "last", "none")), **_options(random))


def _queries(model: Model, random: Random, texts: list[str]) -> Any:
    return model.embed(texts, instruction="query", **_options(random))


def _rank(model: Model, random: Random, texts: list[str]) -> Any:
    return model.rerank(texts[0], texts[1:], **_options(random))


def _classify(model: Model, random: Random, texts: list[str]) -> Any:
    found = model.classify(texts, **_options(random))
    return found.best, found.probabilities, found.log_likelihoods


def _label(model: Model, random: Random, texts: list[str]) -> Any:
    truncate = random.choice(("end", "error"))
    return model.label_tokens(texts, strategy=random.choice(task_folders.STRATEGIES), truncate=truncate)


# Folders and the calls that their models take.
MODELS: dict[str, tuple[Callable[[Path], model_folders.Folder], tuple[Task, ...]]] = {
    "plain": (model_folders.bert, (_embed,)),
    "pairs": (RANKERS["xlm-roberta"], (_rank,)),
    "classes": (CLASSIFIERS["modernbert"], (_classify,)),
    "labels": (TAGGERS["bert"], (_label,)),
    "late, unseen": (LATE["unseen"], (_queries, _rank)),
    "late, fixed": (LATE["seen, fixed"], (_queries, _rank)),
    "late, windows": (LATE["modernbert"], (_queries, _rank)),
    "ColBERT": (task_folders.stanford, (_queries, _rank)),
}


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except ValueError as error:
        return type(error), str(error).partition("/")[0]


def same(a: Any, b: Any) -> bool:
    """Return whether two results have the same bits."""
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def test_results_of_encoders_match_sequential_calls(tmp_path: Path) -> None:
    paths = {
        name: convert(make(tmp_path / name).write(), tmp_path / f"{name}.gguf", tensor_type="Q8_0")
        for name, (make, _) in MODELS.items()
    }
    hostile = [*hostile_texts(400), "\ud800", "the king " * 40, "", " ", "\0", "[MASK] [SEP]"]
    options: dict[str, Any] = {"device": "cpu"}
    shared = {name: Model(path, threads=2, **options) for name, path in paths.items()}
    alone = {name: Model(path, threads=1, **options) for name, path in paths.items()}
    counts: Counter[str] = Counter()

    def work(seed: str, until: float) -> list[tuple[str, Task, str, list[str], Any]]:
        random = Random(seed)
        done: list[tuple[str, Task, str, list[str], Any]] = []
        while time.monotonic() < until or not done:
            name = random.choice(list(MODELS))
            task = random.choice(MODELS[name][1])
            texts = random.choices(hostile, k=random.randint(2, 12))
            call = f"{seed}.{len(done)}"
            done.append((name, task, call, texts, outcome(partial(task, shared[name], Random(call), texts))))
        return done

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for n, seconds in rounds(counts):
            until = time.monotonic() + seconds / 2
            with ThreadPoolExecutor(THREADS) as pool:
                seeds = [f"{SEED}.{n}.{i}" for i in range(THREADS)]
                finished = list(pool.map(work, seeds, [until] * THREADS))
            for name, task, call, texts, found in (item for done in finished for item in done):
                expected = outcome(partial(task, alone[name], Random(call), texts))
                assert same(found, expected), (name, task.__name__, texts)
                error = isinstance(found, tuple) and isinstance(found[0], type)
                counts[f"{name}, {'refused' if error else 'answered'}"] += 1
    for model in (*shared.values(), *alone.values()):
        model.close()
