"""Classification heads: their settings, classes of texts and pairs, and scores of cross-encoders."""

import json
from pathlib import Path

import numpy as np
import pytest
from support.encoder_tasks import INT8, NEAR, FileOf, opened, scores_of
from support.files.gguf_bytes import Value, integer, string
from support.files.gguf_mutator import with_entries
from support.folders.model_folders import read
from support.folders.task_folders import CLASSIFIERS, DOCUMENTS, PAIRS, QUERY, RANKERS, TEXTS, recorded
from support.kernels.float64 import gelu, sigmoid, softmax
from support.programs import Run

from metal_prefill import GGUFError, Model, UnsupportedModelError
from metal_prefill.conversion import convert
from metal_prefill.tasks._pooled_head import _gelu


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("activation", string("relu"), "activation 'relu' is not supported; supported are softmax"),
        ("activation", integer(3), "activation has type uint32, expected string"),
        ("pooling_type", integer(0), "pooling_type is none, must be the pooling whose result the head reads"),
        ("pooling_type", integer(4), "pooling_type is rank"),
        ("pooling_type", integer(9), "pooling_type 9 is not supported"),
    ],
)
def test_unknown_metadata_of_a_head_is_rejected(
    file_of: FileOf, tmp_path: Path, key: str, value: Value, message: str
) -> None:
    name = f"bert.classifier.{key}"
    path = with_entries(tmp_path / "m.gguf", file_of(CLASSIFIERS["bert"]), {name: value})
    with pytest.raises((GGUFError, UnsupportedModelError), match=rf"classifier\.{message}"):
        Model(path, device="cpu")


def test_gelu_uses_the_error_function() -> None:
    x = np.linspace(-8, 8, 4001).astype(np.float32)
    np.testing.assert_allclose(_gelu(x), gelu(x.astype(np.float64)), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_classes_match_transformers(device: str, file_of: FileOf, name: str) -> None:
    expected = recorded()["classes"][name]
    with opened(file_of(CLASSIFIERS[name]), device) as model:
        for inputs, key in ((TEXTS, "texts"), (PAIRS, "pairs")):
            found = model.classify(inputs)
            logits = np.array(expected[key])
            np.testing.assert_allclose(found.log_likelihoods, logits, rtol=0, atol=10 * NEAR[device])
            shares = sigmoid(logits) if name == "bert, independent labels" else softmax(logits)
            np.testing.assert_allclose(found.probabilities, shares, rtol=0, atol=NEAR[device])
            assert found.best == [found.labels[i] for i in logits.argmax(axis=1)]


def test_the_probability_of_a_single_class_is_a_sigmoid(file_of: FileOf) -> None:
    """The scores of pairs in this file are the output itself."""
    with opened(file_of(RANKERS["bert, output as it is"]), "cpu") as model:
        found = model.classify(TEXTS)
    np.testing.assert_allclose(found.probabilities, sigmoid(found.log_likelihoods), rtol=1e-6)
    assert np.ptp(found.probabilities) > 0


def test_pooling_for_classes_is_a_setting_of_modernbert_alone(tmp_path: Path) -> None:
    folder = CLASSIFIERS["bert"](tmp_path / "m")
    folder.config["classifier_pooling"] = "mean"
    fields, _ = read(convert(folder.write(), tmp_path / "m.gguf"))
    assert "bert.classifier.pooling_type" not in fields


def test_a_command_prints_classes(file_of: FileOf, output: Run, errors: Run) -> None:
    path, texts = file_of(CLASSIFIERS["bert"]), ["good", "bad"]
    with Model(path, device="cpu") as model:
        found = model.classify(texts)
    assert output("label", "-m", path, *texts).splitlines() == [
        f"{i}  {label}  {values.max():.4f}  {text}"
        for i, (label, values, text) in enumerate(zip(found.best, found.probabilities, texts, strict=True))
    ]
    line = json.loads(output("label", "-m", path, "--json", *texts).splitlines()[0])
    assert line["label"] == found.best[0]
    assert sum(line["probabilities"].values()) == pytest.approx(1)
    message = "--strategy requires a model with labels for tokens"
    assert message in errors("label", "-m", path, "--strategy", "simple", *texts)


@pytest.mark.parametrize("name", RANKERS)
def test_scores_of_pairs_match_sentence_transformers(device: str, file_of: FileOf, name: str) -> None:
    with opened(file_of(RANKERS[name]), device) as model:
        ranked = model.rerank(QUERY, DOCUMENTS)
        assert [item.score for item in ranked] == sorted((item.score for item in ranked), reverse=True)
        np.testing.assert_allclose(scores_of(model), recorded()["ranks"][name], rtol=0, atol=NEAR[device] * 4)


def test_8_bit_products_stay_near_the_scores(file_of: FileOf) -> None:
    with Model(file_of(RANKERS["xlm-roberta"], "Q8_0"), device="cpu") as model:
        np.testing.assert_allclose(scores_of(model), recorded()["ranks"]["xlm-roberta"], rtol=0, atol=INT8)


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
        with pytest.raises(ValueError, match=rf"{len(labels)} classes .*{labels[-1]}.*set `label`"):
            model.rerank(QUERY, DOCUMENTS)
        with pytest.raises(ValueError, match=rf"label is 'Gut', but .*{labels[0]}"):
            model.rerank(QUERY, DOCUMENTS, label="Gut")
        with pytest.raises(TypeError, match="label must be a string, got int"):
            model.rerank(QUERY, DOCUMENTS, label=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("bias", [12, 112], ids=["scores near 1", "scores of 1"])
def test_documents_with_scores_near_1_are_ordered_and_printed_apart(
    tmp_path: Path, output: Run, bias: float
) -> None:
    """The scores differ in digits that are not printed, or not at all."""
    folder = RANKERS["bert"](tmp_path / "m")
    folder.tensors["classifier.bias"] = np.array([bias], np.float32)
    certain = convert(folder.write(), tmp_path / "m.gguf")
    file = tmp_path / "documents.jsonl"
    file.write_text("\n".join(json.dumps(d or "nothing") for d in DOCUMENTS))
    with opened(certain) as model:
        logits = model.classify([(QUERY, document) for document in DOCUMENTS]).log_likelihoods[:, 0]
        ranked = model.rerank(QUERY, DOCUMENTS)
    assert [item.index for item in ranked] == np.argsort(-logits, kind="stable").tolist()
    lines = output("rerank", "-m", certain, "-q", QUERY, "-f", file, "--compute", "f32").splitlines()
    printed = [line.split("  ")[0] for line in lines]
    assert len(set(printed)) == len({item.score for item in ranked})
