"""Modules after the transformer, or a table instead of it, next to vectors of sentence-transformers."""

from pathlib import Path

import numpy as np
import pytest
from support.encoder_tasks import NEAR, opened
from support.task_folders import MODULES, TEXTS, recorded, static

from metal_prefill import Model
from metal_prefill.conversion import convert
from metal_prefill.sentence_transformers import SentenceTransformer


@pytest.mark.parametrize("name", MODULES)
def test_vectors_match_sentence_transformers(device: str, tmp_path: Path, name: str) -> None:
    path = convert(MODULES[name](tmp_path / "folder").write(), tmp_path / "m.gguf")
    model = SentenceTransformer(path, device=device, model_kwargs={"dtype": "float32"})
    expected = np.array(recorded()["modules"][name])
    found = model.encode(TEXTS)
    np.testing.assert_allclose(found, expected, atol=NEAR[device] * np.abs(expected).max())
    products = (found * expected).sum(axis=1)
    lengths = np.linalg.norm(found, axis=1) * np.linalg.norm(expected, axis=1)
    assert (products >= 0.99999 * lengths).all()


@pytest.mark.parametrize("name", MODULES)
def test_a_vector_is_the_same_alone(tmp_path: Path, name: str) -> None:
    with opened(convert(MODULES[name](tmp_path / "folder").write(), tmp_path / "m.gguf")) as model:
        together = model.embed(TEXTS, normalize=False)
        for text, vector in zip(TEXTS, together, strict=True):
            np.testing.assert_array_equal(model.embed([text], normalize=False)[0], vector)


def test_a_call_chooses_the_pooling(tmp_path: Path) -> None:
    path = convert(MODULES["mean_tokens"](tmp_path / "folder").write(), tmp_path / "m.gguf")
    with Model(path, device="cpu", compute="f32", kv_dtype="f32") as model:
        for pooling, name in (("max", "max_tokens"), ("weighted_mean", "weightedmean_tokens")):
            found = model.embed(TEXTS, pooling=pooling, normalize=False)  # type: ignore[arg-type]
            np.testing.assert_allclose(found, recorded()["modules"][name], atol=2e-5)


def test_a_table_in_a_folder_of_its_own_opens(tmp_path: Path) -> None:
    folder = static(tmp_path / "m")
    whole = folder.write()
    with Model(whole, device="cpu") as model:
        expected = model.embed(TEXTS)
    place = tmp_path / "other" / "0_StaticEmbedding"
    place.mkdir(parents=True)
    for name in ("model.safetensors", "tokenizer.json"):
        (whole / name).rename(place / name)
    kind = "sentence_transformers.models.StaticEmbedding"
    folder.path = place.parent
    folder.json("modules.json", [{"idx": 0, "name": "0", "path": place.name, "type": kind}])
    with Model(place.parent, device="cpu") as model:
        np.testing.assert_array_equal(model.embed(TEXTS), expected)
