"""Classes of texts and pairs, next to transformers'."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.encoder_tasks import NEAR, FileOf, opened
from support.model_folders import read
from support.task_folders import CLASSIFIERS, PAIRS, RANKERS, TEXTS

from metal_prefill import Model, UnsupportedModelError
from metal_prefill.cli import main
from metal_prefill.conversion import convert


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_classes_match_transformers(device: str, file_of: FileOf, record: dict[str, Any], name: str) -> None:
    expected = record["classes"][name]
    with opened(file_of(CLASSIFIERS[name]), device) as model:
        for inputs, key in ((TEXTS, "texts"), (PAIRS, "pairs")):
            found = model.classify(inputs)
            np.testing.assert_allclose(
                found.probabilities, expected[key]["probabilities"], rtol=0, atol=NEAR[device]
            )
            np.testing.assert_allclose(
                found.log_likelihoods, expected[key]["logits"], rtol=0, atol=10 * NEAR[device]
            )
            best = np.argmax(expected[key]["probabilities"], axis=1)
            assert found.best == [found.labels[i] for i in best]


def test_the_probability_of_a_single_class_is_a_sigmoid(file_of: FileOf) -> None:
    """Also in a file whose scores of pairs are the output itself."""
    with opened(file_of(RANKERS["bert, output as it is"]), "cpu") as model:
        found = model.classify(TEXTS)
    np.testing.assert_allclose(found.probabilities, 1 / (1 + np.exp(-found.log_likelihoods)), rtol=1e-6)
    assert np.ptp(found.probabilities) > 0


def test_pooling_for_classes_is_a_setting_of_modernbert_alone(tmp_path: Path) -> None:
    folder = CLASSIFIERS["bert"](tmp_path / "m")
    folder.config["classifier_pooling"] = "mean"
    fields, _ = read(convert(folder.write(), tmp_path / "m.gguf"))
    assert "bert.classifier.pooling_type" not in fields


def test_several_outputs_of_a_regression_are_refused(tmp_path: Path) -> None:
    folder = CLASSIFIERS["bert"](tmp_path / "m")
    folder.config["problem_type"] = "regression"
    with pytest.raises(UnsupportedModelError, match="problem_type is 'regression', and its 3 outputs"):
        convert(folder.write(), tmp_path / "m.gguf")


def test_pairs_require_an_encoder(demo: Model) -> None:
    with pytest.raises(ValueError, match="has no classification head"):
        demo.classify([("a", "b")])


def test_a_command_prints_classes(
    file_of: FileOf, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = file_of(CLASSIFIERS["bert"])
    file = tmp_path / "texts"
    file.write_text("good\nbad\n")
    with Model(path, device="cpu") as model:
        found = model.classify(["good", "bad"])
    assert main(["label", "-m", str(path), "-f", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        f"{i}  {label}  {values.max():.4f}  {text}"
        for i, (label, values, text) in enumerate(
            zip(found.best, found.probabilities, ["good", "bad"], strict=True)
        )
    ]
    assert main(["label", "-m", str(path), "-f", str(file), "--json"]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[0])
    assert line["label"] == found.best[0]
    assert sum(line["probabilities"].values()) == pytest.approx(1)
