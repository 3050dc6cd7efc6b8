"""Decoders whose tokens see those after them, as embedding models next to transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFValueType
from support.bidirectional_folders import RECORD, RECORDED, TEXTS
from support.decoder_folders import qwen
from support.gguf_mutator import with_key
from support.model_folders import Folder, llama

from metal_prefill import Model, UnsupportedModelError
from metal_prefill.conversion import convert
from metal_prefill.conversion._fields import Fields
from metal_prefill.conversion._sources import find_source
from metal_prefill.sentence_transformers import SentenceTransformer

INTEGERS = "qwen3, integers"


def vectors(path: Path, device: str = "cpu", **options: Any) -> Any:
    with Model(path, device=device, compute="f32", kv_dtype="f32") as model:
        assert not model.engine.config.causal
        return model.embed(TEXTS, **options)


@pytest.mark.parametrize("name", [name for name in RECORDED if name != INTEGERS])
def test_vectors_are_those_of_transformers(device: str, tmp_path: Path, name: str) -> None:
    path = convert(RECORDED[name](tmp_path / "m").write(), tmp_path / "m.gguf")
    with np.load(RECORD) as record:
        expected = record[name]
    found = vectors(path, device)
    assert found.shape == expected.shape
    assert (found * expected).sum(axis=1).min() >= {"cpu": 0.999999, "metal": 0.9999}[device]


def test_vectors_of_pplx_embed_are_rounded_tangents(device: str, tmp_path: Path) -> None:
    path = convert(RECORDED[INTEGERS](tmp_path / "m").write(), tmp_path / "m.gguf")
    with np.load(RECORD) as record:
        means = record[INTEGERS].astype(np.float64)
    found = vectors(path, device, normalize=False)
    exact = 127 * np.tanh(means)
    # Half a step from rounding, and the engine's error.
    assert np.abs(found - exact).max() <= 0.5 + {"cpu": 1e-3, "metal": 0.5}[device]
    np.testing.assert_array_equal(found, np.rint(found))
    assert np.abs(found).max() > 50
    if device == "cpu":
        clear = np.abs(exact - np.rint(exact)) < 0.49  # of those next to a half, either neighbour is right
        np.testing.assert_array_equal(found[clear], np.rint(exact)[clear])
        model = SentenceTransformer(str(tmp_path / "m"), model_kwargs={"dtype": "float32"})
        np.testing.assert_array_equal(model.encode(TEXTS), found)


@pytest.mark.parametrize("name", ["llama", "qwen3, projected", INTEGERS])
def test_a_text_has_the_same_bits_in_any_batch(tmp_path: Path, name: str) -> None:
    path = convert(RECORDED[name](tmp_path / "m").write(), tmp_path / "m.gguf", tensor_type="Q8_0")
    with Model(path, device="cpu") as model:
        together = model.embed(TEXTS)
        for text, vector in zip(TEXTS, together, strict=True):
            np.testing.assert_array_equal(model.embed([text])[0], vector)


def test_the_pooling_may_be_that_of_the_configuration(tmp_path: Path) -> None:
    folder = RECORDED["llama"](tmp_path / "m")
    whole = vectors(convert(folder.write(), tmp_path / "m.gguf"))
    (folder.path / "modules.json").unlink()
    np.testing.assert_array_equal(vectors(convert(folder.path, tmp_path / "n.gguf"), normalize=True), whole)


def test_a_file_of_a_decoder_may_state_that_its_attention_is_not_causal(tmp_path: Path) -> None:
    path = convert(RECORDED["llama"](tmp_path / "m").write(), tmp_path / "m.gguf")
    causal = with_key(tmp_path / "causal.gguf", path, "attention.causal", GGUFValueType.BOOL, b"\1")
    with Model(causal, device="cpu") as model:
        assert model.engine.config.causal
        assert np.abs(model.embed(TEXTS) - vectors(path)).max() > 0.01


def test_a_head_reads_the_state_that_the_configuration_names(tmp_path: Path) -> None:
    folder = llama(tmp_path / "m", "LlamaBidirectionalForSequenceClassification", pooling="avg")
    folder.config |= {"id2label": {"0": "x"}, "max_position_embeddings": 200}
    folder.tensors["score.weight"] = np.ones((1, 32), np.float32)
    with Model(convert(folder.write(), tmp_path / "m.gguf"), device="cpu") as model:
        assert (model.engine.head.state, model.engine.config.causal) == ("mean", False)


@pytest.mark.parametrize(
    ("name", "fields", "architecture"),
    [
        ("Gemma3TextModel", {}, "gemma3"),
        ("Gemma3TextModel", {"use_bidirectional_attention": True}, "gemma-embedding"),
        ("BertModel", {"is_causal": False}, "bert"),
    ],
)
def test_a_folder_states_whether_its_attention_is_causal(
    tmp_path: Path, name: str, fields: dict[str, Any], architecture: str
) -> None:
    source, _ = find_source(Fields(tmp_path, {"architectures": [name], **fields}))
    assert source.architecture == architecture


def test_windows_are_refused(tmp_path: Path) -> None:
    folder: Folder = qwen(tmp_path / "m", "Qwen3", is_causal=False)
    with pytest.raises(
        UnsupportedModelError, match=r"causal is false, .* not supported with attention windows"
    ):
        convert(folder.write(), tmp_path / "m.gguf")
