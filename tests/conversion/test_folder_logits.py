"""Logits of model folders with random weights next to those of transformers."""

from pathlib import Path

import numpy as np
import pytest
from support.folder_logits import RECORDED, check_logits
from support.recurrent_folders import RECORD


@pytest.mark.parametrize("name", RECORDED)
def test_logits_of_a_folder_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    check_logits(RECORDED[name](tmp_path / "m").write(), np.load(RECORD)[name])
