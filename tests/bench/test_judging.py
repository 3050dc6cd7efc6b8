"""Documents to rank and answers to judge: inputs, results and rows."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from support.bench_fakes import RecordingEngine, compare, fakes
from support.reference import ReferenceModel

from metal_prefill import bench, synth
from metal_prefill.bench import BenchResults, _engines, _model_file, _worker
from metal_prefill.bench._cases import Case, evaluation_texts, make_tasks, ranking_ids
from metal_prefill.bench._engines import Ids, JudgingEngine, Options
from metal_prefill.bench._peers import metal_prefill
from metal_prefill.files import GGUFFile
from metal_prefill.text import Tokenizer

VOCAB = 4096  # the smallest vocabulary of a synthetic model in which "yes" is a token
RANKING = Case(0, 0, 0, n_texts=3, task="rerank")


class Recorder(RecordingEngine, JudgingEngine):
    """An engine that remembers its calls."""

    def rank(self, prompts: list[Ids], answers: tuple[int, int]) -> list[float]:
        self.calls.append(("rank", [ids.tolist() for ids in prompts], answers))
        return []

    def likelihoods(self, pairs: list[tuple[str, str]]) -> list[float]:
        self.calls.append(("likelihoods", pairs))
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


def expected_likelihoods(path: Path, pairs: list[tuple[str, str]]) -> list[float]:
    reference, tokenizer = ReferenceModel(path), Tokenizer.from_gguf(GGUFFile(path))
    sums = []
    for question, answer in pairs:
        ids = tokenizer.encode(question + answer)
        begin = len(tokenizer.encode(question))
        sums.append(float(reference.forward(ids).log_probs(ids)[begin - 1 :].sum()))
    return sums


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


def test_each_question_has_four_distinct_answers() -> None:
    pairs = evaluation_texts()
    assert pairs == evaluation_texts()
    questions = [question for question, _ in pairs]
    assert [questions.count(question) for question in dict.fromkeys(questions)] == [4] * 4
    assert len(set(pairs)) == 16
    assert max(len((question + answer).encode()) for question, answer in pairs) < 500  # bytes: fits anyhow


def test_engines_receive_prompts_with_answers_and_texts(reranker: Path) -> None:
    engine = Recorder()
    answers = _model_file.answer_ids(reranker)
    _worker.timed_run(engine, RANKING, VOCAB, answers=lambda: answers)
    _worker.timed_run(engine, Case(9, 0, 0, n_texts=16, task="evaluate"), VOCAB)
    prompts = [ids.tolist() for ids in ranking_ids(RANKING, VOCAB)]
    assert engine.calls == [("rank", prompts, answers), ("likelihoods", evaluation_texts())]
    tokenizer = Tokenizer.from_gguf(GGUFFile(reranker))
    assert [tokenizer.decode([answer]) for answer in answers] == ["yes", "no"]


def test_a_model_without_the_answers_is_rejected(demo_path: Path) -> None:
    with pytest.raises(bench.BenchError, match='no token of its own for "yes" and "no"'):
        _model_file.answer_ids(demo_path)


def test_our_results_match_the_reference(reranker: Path, demo_path: Path) -> None:
    prompts, answers = ranking_ids(RANKING, VOCAB), _model_file.answer_ids(reranker)
    found = metal_prefill.Ours(options_for(reranker)).rank(prompts, answers)
    assert found == pytest.approx(expected_scores(reranker, prompts, answers), abs=1e-5)
    assert len(set(found)) == 3
    pairs = evaluation_texts()[:6]
    likelihoods = metal_prefill.Ours(options_for(demo_path)).likelihoods(pairs)
    assert likelihoods == pytest.approx(expected_likelihoods(demo_path, pairs), abs=1e-3)


def test_llama_cpp_returns_the_same_results(reranker: Path, demo_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    from metal_prefill.bench._peers.llama_cpp import LlamaCpp

    prompts, answers = ranking_ids(RANKING, VOCAB), _model_file.answer_ids(reranker)
    engine = LlamaCpp(options_for(reranker))
    expected = expected_scores(reranker, prompts, answers)
    for _ in range(2):  # a second sample reuses nothing of the first one
        assert engine.rank(prompts, answers) == pytest.approx(expected, abs=0.02)  # its products are of int8
    pairs = evaluation_texts()[:6]
    likelihoods = LlamaCpp(options_for(demo_path)).likelihoods(pairs)
    assert likelihoods == pytest.approx(expected_likelihoods(demo_path, pairs), rel=0.02)


@pytest.mark.usefixtures("_quiet_machine")
def test_rows_of_tasks_summarize_their_samples(reranker: Path) -> None:
    workers = fakes(ours=1000, llama=25_000, hf=2000)
    results = compare(workers, reranker, embed=True, rerank=True, evaluate=True)
    assert results.tests == ["embed64", "rerank20", "evaluate16"]
    tokenizer = Tokenizer.from_gguf(GGUFFile(reranker))
    tokens = sum(len(tokenizer.encode(question + answer)) for question, answer in evaluation_texts())
    for name, of_all, texts, unit in (
        ("rerank20", 20 * 399, 20, "documents"),
        ("evaluate16", tokens, 16, "answers"),
    ):
        ours, llama, hf = (results.row(engine, name) for engine in results.engines)
        assert ours.samples_ns == [of_all * 1000] * 3
        assert ours.median_ts == pytest.approx(1e6)
        assert ours.n_texts == texts
        assert f"{texts / (of_all * 1e-6):,.1f} {unit}/s" in ours.note
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
    assert "evaluate16: log likelihoods of 4 answers to each of 4 questions" in html


def test_tasks_are_measured_in_a_real_process(reranker: Path) -> None:
    results = bench.run(reranker, rerank=True, evaluate=True, repetitions=1, threads=1, device="cpu")
    assert results.tests == ["rerank20", "evaluate16"]
    row = results.row(_engines.OURS, "rerank20")
    assert row.samples_ts == pytest.approx([20 * 399e9 / row.samples_ns[0]])
    assert make_tasks(False, False, 0) == []
