"""Vectors of texts: inputs, rows, and engines without support."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.bench_fakes import RecordingAdapter, compare, fakes, options_for
from support.comparison import SEPARATOR
from support.reference import ReferenceModel
from support.small_models import ENCODERS, write

from metal_prefill import synth
from metal_prefill.bench import _engines, _worker
from metal_prefill.bench._cases import Case, make_embeddings, text_ids, text_lengths
from metal_prefill.bench._engines import Ids, Vectors
from metal_prefill.bench._peers import metal_prefill

CASE = Case(0, 0, 0, n_texts=64)


def test_texts_vary_in_length_and_are_reproducible() -> None:
    lengths = text_lengths(64)
    assert (min(lengths), max(lengths)) == (8, 512)
    assert 40 < np.median(lengths) < 90
    assert lengths != sorted(lengths)
    texts = text_ids(CASE, 1000)
    assert [len(text) for text in texts] == lengths == text_lengths(64)
    assert CASE.timed_tokens == sum(lengths)
    assert CASE.name == "embed64"


def test_every_engine_matches_the_reference_vectors(embedder: Path) -> None:
    case = Case(0, 0, 0, n_texts=4)
    texts = text_ids(case, 512)
    engine = metal_prefill.load(options_for(embedder, 512))
    vectors = engine.embed(texts)
    reference = ReferenceModel(embedder)
    for text, vector in zip(texts, vectors, strict=True):
        expected = reference.pooled(text)
        assert vector @ expected / np.linalg.norm(expected) > 0.9999
    assert _worker.timed_run(engine, case, 512, lambda: texts[0]).ns > 0


def test_llama_cpp_returns_the_same_vectors(embedder: Path) -> None:
    pytest.importorskip("llama_cpp")
    from metal_prefill.bench._peers import llama_cpp

    texts = text_ids(Case(0, 0, 0, n_texts=9), 512)
    options = options_for(embedder, 512)
    theirs = llama_cpp.load(options)
    ours = metal_prefill.load(options)
    assert (theirs.embed(texts) * ours.embed(texts)).sum(axis=1) == pytest.approx(np.ones(9), abs=1e-3)


def test_transformers_returns_the_same_vectors(tmp_path: Path) -> None:
    for module in _engines.KINDS["transformers"].modules:
        pytest.importorskip(module)
    from metal_prefill.bench._peers import transformers

    texts = text_ids(Case(0, 0, 0, n_texts=9), 512)
    # transformers uses heads of 128 dimensions for this architecture, regardless of the file.
    path = synth.synthesize(tmp_path / "m.gguf", preset="tiny-embedding", head_dim=128)
    options = options_for(path, 512)
    theirs = transformers.load(options)
    ours = metal_prefill.load(options)
    assert "float32" in theirs.identity().settings
    assert (theirs.embed(texts) * ours.embed(texts)).sum(axis=1) == pytest.approx(np.ones(9), abs=1e-4)


@pytest.mark.parametrize("peer", ["transformers", "onnxruntime", "openvino"])
@pytest.mark.parametrize("architecture", ["bert", "nomic-bert", "modern-bert", "eurobert"])
def test_peers_return_the_same_vectors_for_encoders(tmp_path: Path, peer: str, architecture: str) -> None:
    pytest.importorskip(f"metal_prefill.bench._peers.{'openvino_encoders' if peer == 'openvino' else peer}")
    model = replace(ENCODERS[architecture], types={"*": "F32"}, embedding="F32")
    options = options_for(write(tmp_path / "m.gguf", model), 512)
    theirs, ours = _engines.load(peer, options), metal_prefill.load(options)
    texts = [ids[: model.context] for ids in text_ids(Case(0, 0, 0, n_texts=9), model.vocab)]
    for ids in texts:
        ids[ids == SEPARATOR] += 1  # peers use one type for all tokens of a text
    assert (theirs.embed(texts) * ours.embed(texts)).sum(axis=1) == pytest.approx(np.ones(9), abs=1e-5)


def test_texts_of_one_length_are_measured_in_each_number() -> None:
    cases = make_embeddings(text_tokens=[16, 256], text_counts=[1, 64])
    assert [case.name for case in cases] == ["embed16x1", "embed256x1", "embed16x64", "embed256x64"]
    assert [case.context for case in cases] == [16, 256, 16, 256]
    assert [len(ids) for ids in text_ids(cases[0], 100)] == [16]
    assert [len(ids) for ids in text_ids(cases[3], 100)] == [256] * 64
    # Samples of few tokens are many calls.
    assert [case.calls for case in cases] == [128, 8, 2, 1]
    assert [case.timed_tokens for case in cases] == [2048, 2048, 2048, 16384]
    assert [case.name for case in make_embeddings([16])] == ["embed16x64"]


@pytest.mark.parametrize(
    ("tokens", "counts", "message"),
    [
        ([16, 0], [1], "text lengths are at least 1 and differ, got 16,0"),
        ([16], [4, 4], "numbers of texts are at least 1 and differ, got 4,4"),
        ([], [4], "numbers of texts are measured for texts of some length, of which there is none"),
    ],
)
def test_lengths_and_numbers_of_texts_are_checked(tokens: list[int], counts: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make_embeddings(tokens, counts)


def test_a_sample_is_all_of_its_calls() -> None:
    calls: list[list[int]] = []

    class Recording(RecordingAdapter):
        def embed(self, texts: list[Ids]) -> Vectors:
            calls.append([len(text) for text in texts])
            return np.zeros((len(texts), 1), np.float32)

    case = Case(0, 0, 0, n_texts=4, text_tokens=128)
    _worker.timed_run(Recording(), case, 100, lambda: np.zeros(0, np.int32))
    assert calls == [[128] * 4] * 4


@pytest.mark.usefixtures("_quiet_machine")
def test_rows_count_the_texts_of_all_calls(embedder: Path) -> None:
    workers = fakes(ours=1000, llama=2000)
    results = compare(workers, embedder, "run_embeddings", text_tokens=[16], text_counts=[1, 8])
    row = results.row(_engines.OURS, "embed16x1")
    ratio = results.row("llama.cpp", "embed16x1").ratio
    assert ratio is not None
    assert ratio.median == pytest.approx(2)
    assert (row.n_texts, row.text_tokens) == (1, 16)
    assert row.median_ts == pytest.approx(1e6)
    assert row.note == f"{1e6 / 16:,.1f} texts/s"
    assert "embed16x8" in results.tests
    assert "tokens of each and number of texts in a call" in results._repr_html_()
