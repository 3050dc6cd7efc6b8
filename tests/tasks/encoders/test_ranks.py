"""Scores of pairs by cross-encoders, next to sentence-transformers'."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.encoder_tasks import INT8, NEAR, FileOf, opened, scores_of
from support.task_folders import CLASSIFIERS, DOCUMENTS, QUERY, RANKERS

from metal_prefill import Model
from metal_prefill.cli import main
from metal_prefill.conversion import convert


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


def classes(path: Path, *labels: str) -> Path:
    """Convert a cross-encoder with these classes, of which some have the same names in transformers."""
    folder = CLASSIFIERS["bert"](path / "m")
    folder.config["id2label"] = {str(i): label for i, label in enumerate(labels)}
    for end in ("weight", "bias"):
        folder.tensors[f"classifier.{end}"] = folder.tensors[f"classifier.{end}"][: len(labels)]
    return convert(folder.write(), path / "m.gguf")


@pytest.mark.parametrize(
    ("labels", "best"),
    [
        (("No", "Yes"), 1),
        (("YES", "NO"), 0),
        (("FALSE", "True"), 1),
        (("negative", "positive"), 1),
        (("not_relevant", "relevant"), 1),
        (("Relevant", "irrelevant"), 0),
        (("entailment", "not_entailment"), 0),
        (("不相关", "相关"), 1),
        (("LABEL_0", "LABEL_1"), 1),
        (("0", "1"), 1),
    ],
)
def test_two_classes_rank_by_the_one_that_affirms(tmp_path: Path, labels: tuple[str, str], best: int) -> None:
    with opened(classes(tmp_path, *labels)) as model:
        found = model.classify([(QUERY, document) for document in DOCUMENTS]).probabilities
        np.testing.assert_allclose(scores_of(model), found[:, best], rtol=1e-6)
        for i, label in enumerate(model.engine.head.labels):
            np.testing.assert_allclose(scores_of(model, label=label), found[:, i], rtol=1e-6)


@pytest.mark.parametrize(
    "labels", [("schlecht", "gut"), ("1", "0"), ("contradiction", "entailment", "neutral")]
)
def test_classes_without_an_affirmative_one_need_a_label(tmp_path: Path, labels: tuple[str, ...]) -> None:
    with opened(classes(tmp_path, *labels)) as model:
        found = model.classify([(QUERY, document) for document in DOCUMENTS]).probabilities
        np.testing.assert_allclose(scores_of(model, label=labels[1]), found[:, 1], rtol=1e-6)
        with pytest.raises(ValueError, match=rf"{len(labels)} classes .*{labels[-1]}.*set label to the one"):
            model.rerank(QUERY, DOCUMENTS)
        with pytest.raises(ValueError, match=rf"label is 'Gut', but .*{labels[0]}"):
            model.rerank(QUERY, DOCUMENTS, label="Gut")
        with pytest.raises(TypeError, match="label must be a string, got int"):
            model.rerank(QUERY, DOCUMENTS, label=1)  # type: ignore[arg-type]


def test_a_single_output_has_no_label_to_choose(file_of: FileOf) -> None:
    with (
        opened(file_of(RANKERS["bert"])) as model,
        pytest.raises(ValueError, match=r"label is 'x', but .* a head of 1 classes"),
    ):
        model.rerank(QUERY, DOCUMENTS, label="x")


@pytest.fixture(params=[0, 100], ids=["scores near 1", "scores of 1"])
def certain(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Convert a cross-encoder whose scores differ in digits that are not printed, or not at all."""
    folder = RANKERS["bert"](tmp_path / "m")
    folder.tensors["classifier.bias"] = np.array([12 + request.param], np.float32)
    return convert(folder.write(), tmp_path / "m.gguf")


def test_documents_with_scores_near_1_are_ordered_and_printed_apart(
    certain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with opened(certain) as model:
        logits = model.classify([(QUERY, document) for document in DOCUMENTS]).log_likelihoods[:, 0]
    (tmp_path / "documents.jsonl").write_text("\n".join(json.dumps(d or "nothing") for d in DOCUMENTS))
    with opened(certain) as model:
        ranked = model.rerank(QUERY, DOCUMENTS)
        assert [item.index for item in ranked] == np.argsort(-logits, kind="stable").tolist()
    file = str(tmp_path / "documents.jsonl")
    assert main(["rerank", "-m", str(certain), "-q", QUERY, "-f", file, "--compute", "f32"]) == 0
    printed = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()]
    assert len(set(printed)) == len({item.score for item in ranked})
