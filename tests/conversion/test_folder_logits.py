"""Logits of model folders with random weights next to those of transformers, recorded and live."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.folder_logits import RECORDED, check_logits
from support.recurrent_folders import RECORD, logits_of_transformers


@pytest.mark.parametrize("name", RECORDED)
def test_logits_of_a_folder_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    check_logits(RECORDED[name](tmp_path / "m").write(), np.load(RECORD)[name])


@pytest.mark.parametrize("name", RECORDED)
def test_logits_of_a_folder_are_those_of_the_installed_transformers(tmp_path: Path, name: str) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    folder = RECORDED[name](tmp_path / "m").write()
    check_logits(folder, logits_of_transformers(folder))
