"""The variant of jina-bert-v2 for code, from a folder as transformers has it, next to float64 arithmetic."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from support import model_folders
from support.folder_reference import Array, FolderTensors, attended, gelu
from support.model_folders import DIM, FFN, HEADS, LAYERS, Folder, values

from metal_prefill import Model
from metal_prefill.conversion import convert

NMSE = {"cpu": 1e-9, "metal": 5e-6}  # as in test_encoders.py


def jina_code(path: Path) -> Folder:
    """Make a folder of the class of jina-embeddings-v2-base-code."""
    folder = model_folders.bert(path)
    folder.config |= {
        "architectures": ["JinaBertForMaskedLM"],
        "position_embedding_type": "alibi",
        "feed_forward_type": "geglu",
    }
    kept = {name: tensor for name, tensor in folder.tensors.items() if name.startswith("embeddings.")}
    del kept["embeddings.position_embeddings.weight"]
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(LAYERS):
        at = f"encoder.layer.{layer}."
        for name in ("self.query", "self.key", "self.value", "output.dense"):
            shapes |= {f"{at}attention.{name}.weight": (DIM, DIM), f"{at}attention.{name}.bias": (DIM,)}
        for name in ("self.layer_norm_q", "self.layer_norm_k", "output.LayerNorm"):
            shapes |= {f"{at}attention.{name}.{end}": (DIM,) for end in ("weight", "bias")}
        shapes |= {f"{at}layer_norm_{i}.{end}": (DIM,) for i in (1, 2) for end in ("weight", "bias")}
        shapes |= {
            f"{at}mlp.up_gated_layer.weight": (2 * FFN, DIM),
            f"{at}mlp.down_layer.weight": (DIM, FFN),
            f"{at}mlp.down_layer.bias": (DIM,),
        }
    made = {name: values(shape, i) * 4 for i, (name, shape) in enumerate(shapes.items())}
    norms = {name: tensor + 1 for name, tensor in made.items() if "norm" in name.lower() and "weight" in name}
    folder.tensors = {f"bert.{name}": tensor for name, tensor in (kept | made | norms).items()}
    return folder


def states(folder: Folder, ids: npt.NDArray[np.int64]) -> Array:
    """Return the states after the last layer."""
    t = FolderTensors(folder.tensors, "bert.")
    slopes = [2.0 ** (-8 * (head + 1) / HEADS) for head in range(HEADS)]
    x = t["embeddings.word_embeddings.weight"][ids]
    x = t.normed("embeddings.LayerNorm", x + t["embeddings.token_type_embeddings.weight"][0])
    for layer in range(LAYERS):
        at = f"encoder.layer.{layer}."
        q, k, v = (t.linear(f"{at}attention.self.{name}", x) for name in ("query", "key", "value"))
        q, k = (t.normed(f"{at}attention.self.layer_norm_{name}", y) for name, y in (("q", q), ("k", k)))
        read = t.linear(f"{at}attention.output.dense", attended(q, k, v, HEADS, slopes=slopes))
        block = t.normed(f"{at}attention.output.LayerNorm", x + read)
        x = t.normed(f"{at}layer_norm_1", x + block)
        up, gate = np.split(t.linear(f"{at}mlp.up_gated_layer", x), 2, axis=1)
        x = t.normed(f"{at}layer_norm_2", x + t.linear(f"{at}mlp.down_layer", up * gelu(gate)))
    return x


@pytest.mark.parametrize("tokens", [1, 2, 9, 40])
def test_states_of_a_converted_folder_match_float64(device: str, tmp_path: Path, tokens: int) -> None:
    folder = jina_code(tmp_path / "folder")
    path = convert(folder.write(), tmp_path / "m.gguf")
    ids = np.random.default_rng(tokens).integers(5, 300, tokens)
    with Model(path, device=device, compute="f32", kv_dtype="f32") as model, model.session() as session:
        assert model.config.architecture == "jina-bert-v2"
        (found,) = model.forward_batch([session], [ids], output="hidden", rows="all")
    expected = states(folder, ids)
    assert np.square(found - expected).sum() <= NMSE[device] * np.square(expected).sum()


def test_a_head_is_that_of_bert(tmp_path: Path) -> None:
    folder = jina_code(tmp_path / "folder")
    names = ("a", "b", "c")
    folder.config |= {
        "architectures": ["JinaBertForSequenceClassification"],
        "id2label": {str(i): name for i, name in enumerate(names)},
    }
    shapes = {"bert.pooler.dense.weight": (DIM, DIM), "bert.pooler.dense.bias": (DIM,)}
    shapes |= {"classifier.weight": (len(names), DIM), "classifier.bias": (len(names),)}
    folder.tensors |= {name: values(shape, 50 + i) * 5 for i, (name, shape) in enumerate(shapes.items())}
    path = convert(folder.write(), tmp_path / "m.gguf")
    with Model(path, device="cpu", compute="f32", kv_dtype="f32") as model:
        found = model.classify(["the king is dead"])
        ids = np.array(model.tokenizer.frame.text(model.tokenizer.encode("the king is dead", add_bos=False)))
    t = FolderTensors(folder.tensors)
    logits = t.linear("classifier", np.tanh(t.linear("bert.pooler.dense", states(folder, ids)[0])))
    expected = np.exp(logits) / np.exp(logits).sum()
    assert tuple(found.labels) == names
    np.testing.assert_allclose(found.probabilities[0], expected, rtol=0, atol=1e-5)
