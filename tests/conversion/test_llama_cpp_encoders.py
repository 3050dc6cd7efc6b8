"""Encoders in files with the keys of llama.cpp's converter, next to llama.cpp's recorded vectors."""

from pathlib import Path

import numpy as np
import pytest
from support.closeness import hidden_states, states_of_texts
from support.comparison import random_texts
from support.encoder_tasks import opened
from support.files.gguf_mutator import take_apart
from support.folders.llama_cpp_folders import FOLDERS, RECORD, written
from support.small_models import with_tensor

# Of the largest value: llama.cpp looks up GELU in half precision, and the Metal engine multiplies in it.
NEAR = {"cpu": 1e-3, "metal": 5e-3}


@pytest.mark.parametrize("name", FOLDERS)
def test_vectors_are_those_of_llama_cpp(device: str, tmp_path: Path, name: str) -> None:
    path, ids = written(tmp_path, name), list(random_texts(300, first=5))
    with np.load(RECORD) as record:
        expected = record[name]
    with opened(path, device) as model:
        assert model.config.architecture == name.partition(",")[0]
        assert not model.engine.config.causal
        states = states_of_texts(model, ids)
    for found, wanted in zip(states, expected, strict=True):
        assert np.abs(found.mean(axis=0) - wanted).max() <= NEAR[device] * np.abs(wanted).max()


def test_a_bias_of_relative_positions_may_have_16_bits(device: str, tmp_path: Path) -> None:
    whole, name = written(tmp_path, "t5encoder"), "enc.blk.0.attn_rel_b.weight"
    rounded = with_tensor(
        tmp_path / "rounded.gguf", whole, name, lambda v: np.copyto(v, v.astype(np.float16))
    )
    parts = take_apart(rounded)
    _, dims, _, offset = next(tensor for tensor in parts.tensors if tensor[0] == name)
    end = offset + 4 * int(np.prod(dims))
    half = np.frombuffer(parts.data[offset:end], np.float32).astype(np.float16).tobytes()
    parts.data = parts.data[:offset] + half.ljust(end - offset, b"\0") + parts.data[end:]
    parts.replace_tensor(name, kind=1)
    ids, found = np.arange(5, 105), []
    for path in (rounded, parts.write(tmp_path / "half.gguf")):
        with opened(path, device) as model:
            found.append(hidden_states(model, ids))
    np.testing.assert_array_equal(found[0], found[1])
