"""Encoders in files with the keys of llama.cpp's converter, next to llama.cpp's recorded vectors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.llama_cpp_folders import FOLDERS, RECORD, texts, written

from metal_prefill import Model

# Of the largest value: llama.cpp looks up GELU in half precision, and the Metal engine multiplies in it.
NEAR = {"cpu": 1e-3, "metal": 5e-3}


@pytest.mark.parametrize("name", FOLDERS)
def test_vectors_are_those_of_llama_cpp(device: str, tmp_path: Path, name: str) -> None:
    path, ids = written(tmp_path, name), list(texts())
    with np.load(RECORD) as record:
        expected = record[name]
    with Model(path, device=device, compute="f32", kv_dtype="f32") as model:
        assert model.config.architecture == name.partition(",")[0]
        assert not model.engine.config.causal
        sessions = [model.session() for _ in ids]
        states = model.forward_batch(sessions, ids, output="hidden", rows="all")
        for session in sessions:
            session.close()
    for found, wanted in zip(states, expected, strict=True):
        assert np.abs(found.mean(axis=0) - wanted).max() <= NEAR[device] * np.abs(wanted).max()
