"""Bulk work on Ray: the classes alone, and a cluster that loses a worker during the job.

Not part of ``make test``, since Ray is large and slow to start: ``make test-ray`` installs and runs it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.small_models import CLASSIFIERS, write

from metal_prefill import ContextOverflowError, Model

ray = pytest.importorskip("ray", reason="needs the extra ray")
pytest.importorskip("ray.data", reason="needs the extra ray")

from metal_prefill.generation._scheduler import Scheduler, Stream  # noqa: E402
from metal_prefill.integrations._ray import (  # noqa: E402
    ContinuePrompts,
    EmbedTexts,
    RerankPairs,
    ScorePrompts,
)
from metal_prefill.session import Piece  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own

ROWS = 240
SPEAKERS = ["ROMEO:", "JULIET:", "HAMLET:", "First Citizen:"]
OPTIONS: dict[str, Any] = {"device": "cpu", "threads": 1}


def prompt(i: int) -> str:
    return f"{SPEAKERS[i % 4]}\nLine the {i // 4}th, and"


def texts(*rows: str) -> dict[str, npt.NDArray[Any]]:
    return {"prompt": np.array(rows, dtype=object), "id": np.arange(len(rows))}


def test_a_batch_is_scored_in_order(demo_path: Path) -> None:
    batch = texts(*(prompt(i) for i in (5, 0, 4, 1, 5)))
    result = ScorePrompts(demo_path, **OPTIONS)(batch)
    assert result["id"].tolist() == [0, 1, 2, 3, 4]
    with Model(demo_path, **OPTIONS) as model:
        for text, scores in zip(batch["prompt"], result["log_probs"], strict=True):
            np.testing.assert_array_equal(scores, model.score(model.tokenizer.encode(text)))


def test_a_batch_of_texts_is_embedded_in_order(demo_path: Path) -> None:
    batch = {"text": np.array(["b", "a", "b", "word " * 5000], dtype=object)}
    result = EmbedTexts(demo_path, pooling="mean", errors="record", **OPTIONS)(batch)
    with Model(demo_path, **OPTIONS) as model:
        expected = model.embed(["b", "a", "b"], pooling="mean")
    np.testing.assert_array_equal(np.array(result["embedding"][:3].tolist(), np.float32), expected)
    assert len(result["embedding"][3]) == 0
    assert "exceed the context" in result["error"][3]


def test_a_text_without_tokens_has_a_zero_vector(demo_path: Path) -> None:
    mapper = EmbedTexts(demo_path, pooling="mean", errors="record", truncate="end", **OPTIONS)
    tokenizer = mapper._model.tokenizer
    tokenizer.frame = tokenizer.frame._replace(begin=())  # which would be its only token
    result = mapper({"text": np.array(["a", "", "word " * 5000], dtype=object)})
    assert list(result["error"]) == [""] * 3
    assert [vector.any() for vector in result["embedding"]] == [True, False, True]


def test_pairs_of_a_batch_get_the_scores_of_their_queries(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", CLASSIFIERS["qwen3, yes and no"])
    batch = {
        "query": np.array(["who", "what", "who"], dtype=object),
        "document": np.array(["he", "it", "she"], dtype=object),
    }
    template = "{query} {document}"
    result = RerankPairs(path, template=template, **OPTIONS)(batch)
    with Model(path, **OPTIONS) as model:
        for query, document, score in zip(batch["query"], batch["document"], result["score"], strict=True):
            assert score == model.rerank(query, [document], template=template)[0].score


def test_a_batch_is_continued_in_order(demo_path: Path) -> None:
    batch = texts(*(prompt(i) for i in (5, 0, 4, 1)))
    result = ContinuePrompts(demo_path, max_tokens=12, stop="\n", **OPTIONS)(batch)
    with Model(demo_path, **OPTIONS) as model:
        expected = ["".join(model.generate(text, 12, stop="\n")) for text in batch["prompt"]]
    assert result["continuation"].tolist() == expected
    assert any(expected)


def test_shared_prefixes_are_computed_once(demo_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    computed: dict[int, int] = {}  # tokens of prompts, by pass
    step = Scheduler.step_pieces

    def counting(scheduler: Scheduler) -> list[tuple[Stream, Piece]]:
        made = step(scheduler)
        computed[scheduler.passes] = scheduler.last_pass.prompts
        return made

    monkeypatch.setattr(Scheduler, "step_pieces", counting)
    shared = np.arange(100, 160)
    prompts = [[*shared, 5, i] if i % 2 else [*(shared + 300), 5, i] for i in range(20)]
    ContinuePrompts(demo_path, max_tokens=1, **OPTIONS)({"prompt": np.array(prompts)})
    assert 2 * 60 + 20 <= sum(computed.values()) <= 2 * 62 + 18 * 2


@pytest.mark.parametrize("kind", [ScorePrompts, ContinuePrompts])
def test_token_ids_and_text_are_equivalent(demo_path: Path, kind: type) -> None:
    with Model(demo_path, **OPTIONS) as model:
        ids = [model.tokenizer.encode(prompt(i)) for i in range(3)]
    ragged = np.empty(3, dtype=object)
    ragged[:] = [np.array(i) for i in ids]
    mapper = kind(demo_path, column="x", **OPTIONS)
    from_ids, from_text = mapper({"x": ragged}), mapper({"x": np.array([prompt(i) for i in range(3)])})
    column = next(name for name in from_ids if name != "x")
    for a, b in zip(from_ids[column], from_text[column], strict=True):
        np.testing.assert_array_equal(a, b)


def test_invalid_prompts_are_recorded_or_end_the_job(demo_path: Path) -> None:
    rows = np.empty(4, dtype=object)
    rows[:] = [[1, 2, 3], [1], [1] * 2000, [1, 1 << 20]]
    result = ScorePrompts(demo_path, errors="record", **OPTIONS)({"prompt": rows})
    assert [len(scores) for scores in result["log_probs"]] == [2, 0, 0, 0]
    assert [bool(message) for message in result["error"]] == [False, True, True, True]
    assert "2000 tokens exceed the limit of 1025" in result["error"][2]
    with pytest.raises(ContextOverflowError, match="row 1 of a batch: 2000 tokens"):
        ScorePrompts(demo_path, **OPTIONS)({"prompt": rows[[0, 2]]})


def test_invalid_usage_is_reported(demo_path: Path) -> None:
    with pytest.raises(ValueError, match="no column 'prompt'; the columns are text"):
        ScorePrompts(demo_path, **OPTIONS)({"text": np.array(["a"])})
    with pytest.raises(ValueError, match="errors must be 'raise' or 'record'"):
        ScorePrompts(demo_path, errors="ignore", **OPTIONS)


class Mortal(ScorePrompts):
    """Records who computed a row. The first actor to receive a third batch is killed after that batch."""

    def __init__(self, *, grave: str, **options: Any) -> None:
        super().__init__(**options)
        self._grave = grave
        self._calls = 0

    def __call__(self, batch: dict[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        result = super().__call__(batch)
        self._calls += 1
        time.sleep(0.05)  # long enough for both actors to receive a share
        if self._calls == 3:
            try:
                with open(self._grave, "x") as file:
                    file.write(str(os.getpid()))
            except FileExistsError:
                pass
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        return {**result, "pid": np.full(len(result["id"]), os.getpid())}


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Two workers, and a place for the tasks that read the data."""
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    ray.init(
        num_cpus=3,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=100 << 20,
    )
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield
    ray.shutdown()


@pytest.mark.usefixtures("cluster")
def test_a_killed_worker_loses_nothing_and_repeats_nothing(demo_path: Path, tmp_path: Path) -> None:
    grave = tmp_path / "grave"
    rows = (
        ray.data.from_items([{"id": i, "prompt": prompt(i)} for i in range(ROWS)], override_num_blocks=24)
        .map_batches(
            Mortal,
            fn_constructor_kwargs={"model": str(demo_path), "grave": str(grave), "device": "cpu"},
            compute=ray.data.ActorPoolStrategy(size=2),
            num_cpus=1,
            batch_size=10,
        )
        .take_all()
    )
    assert sorted(row["id"] for row in rows) == list(range(ROWS))
    pids = {row["pid"] for row in rows}
    assert int(grave.read_text()) in pids, "the worker died before it had delivered anything"
    assert len(pids) == 3, "two workers, and the one that took the dead one's place"
    with Model(demo_path, device="cpu") as model:
        for row in rows:
            expected = model.score(model.tokenizer.encode(prompt(row["id"])))
            np.testing.assert_array_equal(np.asarray(row["log_probs"], np.float32), expected)
