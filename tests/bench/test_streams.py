"""Several sequences together, and tokens that engines choose: inputs, rows, and engines without support."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.bench_fakes import FakeWorker, RecordingAdapter, compare, fakes, options_for

from metal_prefill import Model, bench
from metal_prefill.bench import BenchResults, _engines, _worker
from metal_prefill.bench._cases import SAMPLING, Case, Choice, stream_ids, token_ids
from metal_prefill.bench._model_file import task_ids
from metal_prefill.bench._peers import metal_prefill

VOCAB = 1024  # of the bundled model
CHOICES: tuple[Choice, ...] = ("argmax", "sampled", "greedy", "lookup")


def calls_of(case: Case, task: Any = None) -> list[Any]:
    """Return the calls of an engine in a test."""
    engine = RecordingAdapter()
    _worker.timed_run(engine, case, VOCAB, lambda: task)
    return engine.calls


def test_contexts_before_what_is_timed() -> None:
    """Prompts of streams have empty contexts."""
    writing, reading = Case(0, 3, 5, 4), Case(6, 0, 0, 3)
    ids = stream_ids(writing, VOCAB)
    assert ids.shape == (4, 8)
    decoding = [("open", 4, 8), ("prefill", ids[:, :5].tolist()), ("decode", ids[:, 5:].tolist())]
    assert calls_of(writing) == decoding
    assert calls_of(reading) == [("open", 3, 6), ("prefill", stream_ids(reading, VOCAB).tolist())]
    task = np.array([5, 6, 7, 8], np.int32)
    for choice in CHOICES:
        ids = token_ids(4, VOCAB) if choice in ("argmax", "sampled") else task
        choosing = [("clear",), ("prefill", ids[:3].tolist()), ("choose", ids.tolist(), 9, choice)]
        assert calls_of(Case(0, 9, 3, choice=choice), task) == choosing


def test_our_streams_end_as_they_do_alone(demo_path: Path) -> None:
    ids = stream_ids(Case(0, 3, 5, 4), VOCAB)
    engine: Any = metal_prefill.load(options_for(demo_path, 64, 32))
    for _ in range(2):  # a second sample reuses nothing of the first one
        engine.open_streams(4, 9)
        engine.prefill_streams(ids[:, :5])
        engine.decode_streams(ids[:, 5:])
        with Model(demo_path, device="cpu", compute="f32") as model:
            for session, row in zip(engine._streams, ids, strict=True):
                assert session.tokens == row.tolist()
                assert session.stats()["tokens_reused"] == 0
                model.reset()
                model.forward_prompt(row)
                assert (session.forward_token(7) == model.forward_token(7)).all()


def test_llama_cpp_computes_each_stream_as_it_does_alone(demo_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    from metal_prefill.bench._peers import llama_cpp

    ids = stream_ids(Case(0, 3, 5, 4), VOCAB)
    engine: Any = llama_cpp.load(options_for(demo_path, 64, 32))
    for _ in range(2):
        engine.open_streams(4, 8)
        engine.prefill_streams(ids[:, :5])
        engine.decode_streams(ids[:, 5:])
        for i, row in enumerate(ids):
            engine.clear()
            engine.prefill(row[:5])
            engine.decode(row[5:])
            alone, together = engine._single.logits(0), engine._streams.logits(i)
            # Its products of one and of several rows round in different orders: activations have 8 bits.
            assert np.corrcoef(alone, together)[0, 1] > 0.999
    engine.open_streams(2, 16)  # another shape
    engine.prefill_streams(ids.reshape(2, 16))
    engine.clear()
    engine.prefill(ids.ravel()[16:])
    assert np.corrcoef(engine._single.logits(15), engine._streams.logits(31))[0, 1] > 0.999


@pytest.mark.usefixtures("_quiet_machine")
def test_a_row_summarizes_its_samples(demo_path: Path) -> None:
    workers = fakes(ours=1)
    milliseconds = [9, 8, 1, 2, 10, 4]  # the first of each test is the warm-up
    workers[_engines.OURS].times = iter(ms * 1_000_000 for ms in 3 * milliseconds)
    row = compare(workers, demo_path, prompts=[], n_gen=4, streams=[10], repetitions=5).row(
        _engines.OURS, "tg4x10"
    )
    assert (row.n_prompt, row.n_gen, row.n_depth, row.n_streams) == (0, 4, 32, 10)
    assert row.samples_ns == [8_000_000, 1_000_000, 2_000_000, 10_000_000, 4_000_000]
    assert row.samples_ts == pytest.approx([5000, 40_000, 20_000, 4000, 10_000])  # 40 tokens each
    assert (row.median_ns, row.avg_ns) == (4_000_000, 5_000_000)
    assert row.stddev_ns == pytest.approx(1e6 * ((9 + 16 + 9 + 25 + 1) / 4) ** 0.5)
    assert row.median_ts == pytest.approx(10_000)
    assert row.avg_ts == pytest.approx(15_800)
    assert (row.spread.low, row.spread.high) == pytest.approx((4000, 40_000))
    html = BenchResults([row])._repr_html_()
    assert "10,000 (4,000-40,000)" in html


@pytest.mark.usefixtures("_quiet_machine")
def test_engines_without_batches_or_choices_are_skipped_with_a_reason(demo_path: Path) -> None:
    workers = fakes(ours=10, llama=40, openvino=20)
    options: dict[str, Any] = {"streams": [2, 3], "sampled": True, "speculate": True}
    results = compare(workers, demo_path, prompts=[8], n_gen=4, **options)
    choices = {"greedy4": "argmax", "sampled4": "sampled", "copy4": "greedy", "lookup4": "lookup"}
    streams = ["tg4x2", "tg4x3", "pp16x64"]
    assert results.tests == ["pp8", "tg4", *choices, *streams]
    assert len(workers["openvino"].log) == 2 * (3 + 1)  # pp8 and tg4, each warmed up
    assert len(workers["llama.cpp"].log) == 9 * (3 + 1)
    for name in (*choices, *streams):
        ours, llama, openvino = (results.row(engine, name) for engine in results.engines)
        assert ours.measured
        assert llama.ratio is not None
        assert llama.ratio.median == pytest.approx(4.0)
        assert not openvino.measured
        assert (openvino.samples_ns, openvino.median_ts, openvino.ratio) == ([], 0.0, None)
        reason = "computes logits but chooses no tokens" if name in choices else "holds one sequence"
        assert openvino.note.startswith(f"not measured: its graph {reason}")
    for name, choice in choices.items():
        row = results.row(_engines.OURS, name)
        assert (row.choice, row.n_gen, row.samples_ns) == (choice, 4, [40] * 3)
        assert row.median_ts == pytest.approx(1e8)
    assert any("tg4x2, tg4x3, pp16x64: not measured" in note for note in results.notes())
    html = results._repr_html_()
    assert "x64: 64 sequences in each pass" in html
    assert "sampled4: tokens sampled by the engine, temperature 0.8, top_k 40" in html
    assert "lookup4: the same with drafts" in html


def test_streams_and_choices_are_measured_in_a_real_process(demo_path: Path) -> None:
    options: dict[str, Any] = {"repetitions": 1, "threads": 1, "device": "cpu", "patience": 0}
    results = bench.run(
        demo_path, prompts=[4], n_gen=2, depth=3, streams=[1, 3], sampled=True, speculate=True, **options
    )
    streams = ["tg2x1", "tg2x3", "pp16x64"]
    assert results.tests == ["pp4", "tg2", "greedy2", "sampled2", "copy2", "lookup2", *streams]
    assert [results.row(_engines.OURS, test).n_streams for test in streams] == [1, 3, 64]
    for test, tokens in (("tg2x3", 6), ("lookup2", 2)):
        row = results.row(_engines.OURS, test)
        assert row.samples_ts == pytest.approx([tokens * 1e9 / row.samples_ns[0]])
    assert row.n_depth == len(task_ids(demo_path)) - 1


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
