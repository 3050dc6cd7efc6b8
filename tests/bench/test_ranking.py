"""Documents to rank: inputs, results and rows."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from support.bench_fakes import RecordingEngine, compare, fakes
from support.reference import ReferenceModel

from metal_prefill import bench, synth
from metal_prefill.bench import BenchResults, _engines, _model_file, _worker
from metal_prefill.bench._cases import Case, make_tasks, ranking_ids
from metal_prefill.bench._engines import Ids, Options, RankingEngine
from metal_prefill.bench._peers import metal_prefill
from metal_prefill.files import GGUFFile
from metal_prefill.text import Tokenizer

VOCAB = 4096  # the smallest vocabulary of a synthetic model in which "yes" is a token
RANKING = Case(0, 0, 0, n_texts=3, task="rerank")


class Recorder(RecordingEngine, RankingEngine):
    """An engine that remembers its calls."""

    def rank(self, prompts: list[Ids], answers: tuple[int, int]) -> list[float]:
        self.calls.append(("rank", [ids.tolist() for ids in prompts], answers))
        return []


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("m") / "reranker.gguf"
    return synth.synthesize(path, preset="tiny-embedding", vocab=VOCAB)


def options_for(path: Path) -> Options:
    return Options(
        path=str(path), max_context=512, max_prompt=1, threads=1, device="cpu", compute="f32", kv_dtype="f32"
    )


def expected_scores(path: Path, prompts: list[Ids], answers: tuple[int, int]) -> list[float]:
    """Compute the softmax over the logits of the two answers, in float64."""
    reference = ReferenceModel(path)
    logits = [reference.forward(ids.tolist()).logits[-1] for ids in prompts]
    return [float(1 / (1 + np.exp(row[answers[1]] - row[answers[0]]))) for row in logits]


def test_ranked_prompts_share_only_the_query() -> None:
    prompts = ranking_ids(RANKING, 50_000)
    assert [len(ids) for ids in prompts] == [90 + 300 + 9] * 3
    assert RANKING.timed_tokens == 3 * 399
    assert RANKING.context >= 399
    for ids in prompts[1:]:
        assert (ids[:90] == prompts[0][:90]).all()
        assert ids[90] != prompts[0][90]
        assert (ids[390:] == prompts[0][390:]).all()
    assert len({ids[90:390].tobytes() for ids in prompts}) == 3


def test_engines_receive_prompts_with_answers(reranker: Path) -> None:
    engine = Recorder()
    answers = _model_file.answer_ids(reranker)
    _worker.timed_run(engine, RANKING, VOCAB, answers=lambda: answers)
    prompts = [ids.tolist() for ids in ranking_ids(RANKING, VOCAB)]
    assert engine.calls == [("rank", prompts, answers)]
    tokenizer = Tokenizer.from_gguf(GGUFFile(reranker))
    assert [tokenizer.decode([answer]) for answer in answers] == ["yes", "no"]


def test_a_model_without_the_answers_is_rejected(demo_path: Path) -> None:
    with pytest.raises(bench.BenchError, match='no token of its own for "yes" and "no"'):
        _model_file.answer_ids(demo_path)


def test_our_results_match_the_reference(reranker: Path) -> None:
    prompts, answers = ranking_ids(RANKING, VOCAB), _model_file.answer_ids(reranker)
    found = metal_prefill.Ours(options_for(reranker)).rank(prompts, answers)
    assert found == pytest.approx(expected_scores(reranker, prompts, answers), abs=1e-5)
    assert len(set(found)) == 3


def test_llama_cpp_returns_the_same_results(reranker: Path) -> None:
    pytest.importorskip("llama_cpp")
    from metal_prefill.bench._peers.llama_cpp import LlamaCpp

    prompts, answers = ranking_ids(RANKING, VOCAB), _model_file.answer_ids(reranker)
    engine = LlamaCpp(options_for(reranker))
    expected = expected_scores(reranker, prompts, answers)
    for _ in range(2):  # a second sample reuses nothing of the first one
        assert engine.rank(prompts, answers) == pytest.approx(expected, abs=0.02)  # its products are of int8


@pytest.mark.usefixtures("_quiet_machine")
def test_rows_of_tasks_summarize_their_samples(reranker: Path) -> None:
    workers = fakes(ours=1000, llama=25_000, hf=2000)
    results = compare(workers, reranker, embed=True, rerank=True)
    assert results.tests == ["embed64", "rerank20"]
    ours, llama, hf = (results.row(engine, "rerank20") for engine in results.engines)
    assert ours.samples_ns == [20 * 399 * 1000] * 3
    assert ours.median_ts == pytest.approx(1e6)
    assert ours.n_texts == 20
    assert f"{20 / (20 * 399e-6):,.1f} documents/s" in ours.note
    assert llama.ratio is not None
    assert llama.ratio.median == pytest.approx(25)
    assert not hf.measured
    assert hf.note == "not measured: its vectors alone are"
    assert ours.limit_ts is None
    hf_row = results.row("transformers", "embed64")
    assert hf_row.ratio is not None
    assert hf_row.ratio.median == pytest.approx(2)
    assert BenchResults.from_dicts(json.loads(results.to_json())) == results
    html = results._repr_html_()
    assert "rerank20: prompts of 399 tokens, of which the first 90 are the same" in html


def test_tasks_are_measured_in_a_real_process(reranker: Path) -> None:
    results = bench.run(reranker, rerank=True, repetitions=1, threads=1, device="cpu", patience=0)
    assert results.tests == ["rerank20"]
    row = results.row(_engines.OURS, "rerank20")
    assert row.samples_ts == pytest.approx([20 * 399e9 / row.samples_ns[0]])
    assert make_tasks(False, False) == []
