"""Classes of texts and pairs, next to transformers'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.encoder_tasks import NEAR, FileOf, opened
from support.task_folders import (
    CLASSIFIERS,
    PAIRS,
    TEXTS,
)

from metal_prefill import Model
from metal_prefill.cli import main


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
