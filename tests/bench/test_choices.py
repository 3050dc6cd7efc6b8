"""Tokens that engines choose: inputs, results, rows, and engines without support."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.bench_fakes import FakeWorker, RecordingEngine, compare, fakes

from metal_prefill import Model
from metal_prefill.bench import _engines, _worker
from metal_prefill.bench._cases import SAMPLING, Case, Choice, make_cases, token_ids
from metal_prefill.bench._engines import Ids, Options
from metal_prefill.bench._model_file import task_ids
from metal_prefill.bench._peers import metal_prefill

VOCAB = 1024  # of the bundled model
CHOICES: tuple[Choice, ...] = ("argmax", "sampled", "greedy", "lookup")


class Recorder(RecordingEngine):
    """An engine that remembers its calls."""

    def choose(self, ids: Ids, count: int, choice: Choice) -> list[int]:
        self.calls.append(("choose", ids.tolist(), count, choice))
        return []


def test_tokens_are_chosen_after_a_context_that_is_not_timed() -> None:
    task = np.array([5, 6, 7, 8], np.int32)
    for choice in CHOICES:
        engine = Recorder()
        _worker.timed_run(engine, Case(0, 9, 3, choice=choice), VOCAB, lambda: task)
        ids = token_ids(4, VOCAB).tolist() if choice in ("argmax", "sampled") else task.tolist()
        assert engine.calls == [("clear",), ("prefill", ids[:3]), ("choose", ids, 9, choice)]


def test_cases_have_names_and_enough_context() -> None:
    cases = make_cases([8], 16, 32, sampled=True, task=90)
    assert [case.name for case in cases] == ["pp8", "tg16", "greedy16", "sampled16", "copy16", "lookup16"]
    assert [case.context for case in cases[1:]] == [48, 48, 48, 89 + 16, 89 + 16 + 31]
    assert [case.timed_tokens for case in cases[2:]] == [16] * 4
    for options in ({"sampled": True}, {"task": 90}):
        with pytest.raises(ValueError, match="no tokens to choose: n_gen is 0"):
            make_cases([8], 0, **options)


def options_for(path: Path) -> Options:
    return Options(path=str(path), max_context=256, max_prompt=200, threads=1, device="cpu", compute="f32")


@pytest.mark.parametrize("choice", CHOICES)
def test_our_tokens_match_generate(demo_path: Path, choice: Choice) -> None:
    ids = task_ids(demo_path)
    engine: Any = metal_prefill.load(options_for(demo_path))
    with Model(demo_path, device="cpu", threads=1, compute="f32") as model:
        options: dict[str, Any] = dict(SAMPLING) if choice == "sampled" else {}
        expected = [
            p.token for p in model.session().stream(ids, 20, min_tokens=20, speculate="off", **options)
        ]
    assert len(expected) == 20
    for _ in range(2):
        engine.clear()
        engine.prefill(ids[:-1])
        assert engine.choose(ids, 20, choice) == expected
        assert engine._session.stats()["tokens_reused"] == len(ids) - 1


def test_llama_cpp_chooses_the_same_with_and_without_drafts(demo_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    from metal_prefill.bench._peers import llama_cpp

    ids = np.concatenate([task_ids(demo_path)[:60]] * 2)  # a text that repeats itself
    engine: Any = llama_cpp.load(options_for(demo_path))
    texts: dict[str, list[int]] = {}
    for choice in CHOICES:
        for _ in range(2):
            engine.clear()
            engine.prefill(ids[:-1])
            made = engine.choose(ids, 24, choice)
            assert texts.setdefault(choice, made) == made
            assert engine._single._position == len(ids) + 23
    assert texts["lookup"] == texts["greedy"] == texts["argmax"] != texts["sampled"]
    ours: Any = metal_prefill.load(options_for(demo_path))
    ours.prefill(ids[:-1])
    assert ours.choose(ids, 8, "greedy") == texts["greedy"][:8]


@pytest.mark.usefixtures("_quiet_machine")
def test_rows_of_choices_summarize_their_samples(demo_path: Path) -> None:
    workers = fakes(ours=10, llama=40, openvino=20)
    results = compare(workers, demo_path, prompts=[8], n_gen=4, sampled=True, speculate=True)
    assert results.tests == ["pp8", "tg4", "greedy4", "sampled4", "copy4", "lookup4"]
    for name, choice in (
        ("greedy4", "argmax"),
        ("sampled4", "sampled"),
        ("copy4", "greedy"),
        ("lookup4", "lookup"),
    ):
        ours, llama, openvino = (results.row(engine, name) for engine in results.engines)
        assert (ours.choice, ours.n_gen) == (choice, 4)
        assert ours.samples_ns == [40] * 3
        assert ours.median_ts == pytest.approx(1e8)
        assert llama.ratio is not None
        assert llama.ratio.median == pytest.approx(4.0)
        assert not openvino.measured
        assert openvino.note == "not measured: its graph computes logits but chooses no tokens"
    html = results._repr_html_()
    assert "sampled4: tokens sampled by the engine, temperature 0.8, top_k 40" in html
    assert "lookup4: the same with drafts" in html


@pytest.mark.usefixtures("_quiet_machine")
def test_compared_cases_alternate(demo_path: Path) -> None:
    """A slowdown affects both: here every sample takes longer than the previous one."""
    asked: list[str] = []

    class Slowing(FakeWorker):
        def sample(self, case: Case) -> tuple[int, int]:
            asked.append(case.name)
            share = 4 if case.name == "lookup4" else 5 if case.name == "sampled4" else 4.8
            return int(share * 1.1 ** len(asked) * 1000), 0

    workers: dict[str, FakeWorker] = {_engines.OURS: Slowing(_engines.OURS, 1)}
    results = compare(workers, demo_path, prompts=[], n_gen=4, sampled=True, speculate=True, repetitions=20)
    assert asked[:21] == ["tg4"] * 21
    assert asked[21:23] == ["greedy4", "sampled4"]  # warm-up
    for at in range(23, 63, 2):
        assert sorted(asked[at : at + 2]) == ["greedy4", "sampled4"]
    assert asked[23:25] != asked[25:27]  # the order rotates
    shares = {row.test: row.of_compared for row in results.rows}
    assert shares["tg4"] is shares["greedy4"] is shares["copy4"] is None
    sampled, lookup = shares["sampled4"], shares["lookup4"]
    assert sampled is not None
    assert lookup is not None
    assert sampled.low <= 0.96 <= sampled.high < 1.1
    assert lookup.low <= 1.2 <= lookup.high
    assert f"metal_prefill sampled4: {sampled.median:.3f} (" in results._repr_html_()
