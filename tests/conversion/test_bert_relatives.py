"""Relatives of BERT: folders as transformers has them, next to float64 arithmetic and to transformers."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from support.bert_relatives import DISTILBERT, MPNET, distilbert, electra, gte, gte_states, mpnet, states
from support.folder_reference import Array, FolderTensors
from support.model_folders import Folder

from metal_prefill import Model
from metal_prefill.conversion import convert

NMSE = {"cpu": 1e-9, "metal": 5e-6}  # as in test_encoders.py
NTK = {"type": "ntk", "factor": 8.0}
States = Callable[[Folder, npt.NDArray[np.int64]], Array]
MADE: dict[str, tuple[Callable[[Path], Folder], States]] = {
    "mpnet": (mpnet, partial(states, prefix="mpnet.", names=MPNET)),
    "distilbert": (distilbert, partial(states, prefix="", names=DISTILBERT)),
    "electra": (electra, partial(states, prefix="electra.", names={})),
    "gte": (gte, gte_states),
    "gte, longer": (partial(gte, rope_scaling=NTK), gte_states),
}


def _found(path: Path, device: str, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    with Model(path, device=device, compute="f32", kv_dtype="f32") as model, model.session() as session:
        (found,) = model.forward_batch([session], [ids], output="hidden", rows="all")
    states_of_tokens: npt.NDArray[np.float32] = found
    return states_of_tokens


@pytest.mark.parametrize("name", MADE)
def test_states_of_a_folder_match_float64(device: str, tmp_path: Path, name: str) -> None:
    make, states_of = MADE[name]
    folder = make(tmp_path / "folder")
    path = convert(folder.write(), tmp_path / "m.gguf")
    for tokens in (1, 9, 64, 65, 300):
        ids = np.random.default_rng(tokens).integers(5, 300, tokens)
        expected = states_of(folder, ids)
        error = np.square(_found(path, device, ids) - expected).sum()
        assert error <= NMSE[device] * np.square(expected).sum(), tokens


@pytest.mark.parametrize("name", [name for name in MADE if name != "gte, longer"])  # which it does not have
def test_states_of_a_folder_match_transformers(device: str, tmp_path: Path, name: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    folder = MADE[name][0](tmp_path / "folder").write()
    ids = np.random.default_rng(0).integers(5, 300, 200)
    with torch.inference_mode():
        expected = transformers.AutoModel.from_pretrained(folder)(torch.from_numpy(ids)[None])[0][0].numpy()
    found = _found(convert(folder, tmp_path / "m.gguf"), device, ids)
    assert np.square(found - expected).sum() <= NMSE[device] * np.square(expected).sum()


def test_pairs_of_mpnet_have_two_separators(tmp_path: Path) -> None:
    with Model(mpnet(tmp_path / "folder").write()) as model:
        first, second = (model.tokenizer.encode(text, add_bos=False) for text in ("a rose", "by any name"))
        begin, end = model.tokenizer.bos_id, model.tokenizer.eos_id
        assert model.tokenizer.encode_pair("a rose", "by any name").ids == [
            *(begin, *first, end),
            *(end, *second, end),
        ]


def test_classes_of_distilbert_follow_a_rectified_layer(tmp_path: Path) -> None:
    folder = distilbert(tmp_path / "folder", "DistilBertForSequenceClassification")
    with Model(folder.write(), compute="f32", kv_dtype="f32") as model:
        words = model.tokenizer.encode("a rose by any name", add_bos=False)
        ids = np.array([model.tokenizer.bos_id, *words, model.tokenizer.eos_id])
        found = model.classify(["a rose by any name"])
    t = FolderTensors(folder.tensors)
    hidden = states(folder, ids, "distilbert.", DISTILBERT)
    logits = t.linear("classifier", np.maximum(t.linear("pre_classifier", hidden[:1]), 0))[0]
    expected = np.exp(logits) / np.exp(logits).sum()
    assert found.labels == ("NEGATIVE", "POSITIVE")
    np.testing.assert_allclose(found.probabilities[0], expected, atol=1e-5)
