"""Folders of classes that Jina defines: XLM-R with adapters within the weights, and BERT for code."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.folders import encoder_folders, model_folders
from support.folders.model_folders import LAYERS, Folder, assert_same_tensors, linear, read, values
from support.folders.other_encoders import jina_code
from support.folders.task_folders import TEXTS

from metal_prefill import GGUFError, Model, UnsupportedModelError
from metal_prefill.conversion import convert
from metal_prefill.hub import _local_file

ADAPTERS = ["retrieval.query", "separation", "text-matching"]
RANK, ALPHA = 4, 2.0
# Names of XLM-R's modules of a layer in Jina's class.
MODULES = {
    "attention.output.dense": "mixer.out_proj",
    "attention.output.LayerNorm": "norm1",
    "intermediate.dense": "mlp.fc1",
    "output.dense": "mlp.fc2",
    "output.LayerNorm": "norm2",
}
EXACT: dict[str, Any] = {"device": "cpu", "compute": "f32", "kv_dtype": "f32"}


def plain(path: Path) -> Folder:
    """Make a folder whose weights contain no adapters."""
    folder = encoder_folders.RECORDED["jina v3"](path)
    folder.config |= {
        "architectures": ["XLMRobertaModel"],
        "model_type": "xlm-roberta",
        "position_embedding_type": "rotary",
        "rotary_emb_base": folder.config.pop("rope_parameters")["rope_theta"],
    }
    folder.tensors = {f"roberta.{name}": tensor for name, tensor in folder.tensors.items()}
    modules = folder.pool().loaded("modules.json")
    modules[0] |= {"type": "custom_st.Transformer", "kwargs": ["task"]}
    folder.json("modules.json", modules)
    return folder


def with_adapters(path: Path, chosen: str | None = None) -> tuple[Folder, Folder]:
    """Make a folder with adapters, and one that contains the sums with the chosen one."""
    whole, summed = plain(path / "whole"), plain(path / "summed")
    whole.config |= {"lora_adaptations": ADAPTERS, "lora_rank": RANK, "lora_alpha": ALPHA}
    for i, (name, weight) in enumerate(summed.tensors.copy().items()):
        if weight.ndim == 1:
            continue
        stem, (rows, columns) = f"{name.removesuffix('.weight')}.parametrizations.weight", weight.shape
        of_embedding = "_embeddings" in name
        first = (rows, RANK) if of_embedding else (RANK, columns)
        second = (RANK, columns) if of_embedding else (rows, RANK)
        a, b = (5 * values((len(ADAPTERS), *shape), i) for shape in (first, second))
        whole.tensors |= {f"{stem}.original": whole.tensors.pop(name)}
        whole.tensors |= {f"{stem}.0.lora_A": a, f"{stem}.0.lora_B": b}
        if chosen is not None:
            left, right = (x[ADAPTERS.index(chosen)].astype(np.float64) for x in (a, b))
            product = left @ right if of_embedding else right @ left
            summed.tensors[name] = (weight + ALPHA / RANK * product).astype(np.float32)
    return whole, summed


def test_a_folder_under_the_name_of_xlm_r_is_that_of_transformers(tmp_path: Path) -> None:
    native = encoder_folders.RECORDED["jina v3"](tmp_path / "native").write()
    (first, expected), (second, found) = (
        read(convert(folder, tmp_path / "m.gguf")) for folder in (native, plain(tmp_path / "own").write())
    )
    assert {key: second[key] for key in first if key.startswith("jina-bert-v3.")} == {
        key: value for key, value in first.items() if key.startswith("jina-bert-v3.")
    }
    assert_same_tensors(found, expected)


@pytest.mark.parametrize("chosen", [None, "retrieval.query", "text-matching"])
def test_an_adapter_within_the_weights_is_added(tmp_path: Path, chosen: str | None) -> None:
    whole, summed = with_adapters(tmp_path, chosen)
    _, found = read(convert(whole.write(), tmp_path / "a.gguf", adapter=chosen))
    _, expected = read(convert(summed.write(), tmp_path / "b.gguf"))
    assert_same_tensors(found, expected, near=1e-5)


def test_each_adapter_has_its_own_conversion(tmp_path: Path) -> None:
    folder = with_adapters(tmp_path)[0].write()
    found = []
    for name in (None, ADAPTERS[0]):
        with Model(folder, adapter=name, **EXACT) as model:
            found.append(model.embed(TEXTS))
    assert np.abs(found[0] - found[1]).max() > 0.01
    keys = {_local_file._key(folder, Path(name) if name else None, {}) for name in (None, *ADAPTERS)}
    assert len(keys) == 4


def test_a_module_of_its_own_code_that_does_more_is_refused(tmp_path: Path) -> None:
    folder = plain(tmp_path / "m")
    modules = folder.loaded("modules.json")
    modules[0]["kwargs"] = ["task", "truncate_dim"]
    folder.json("modules.json", modules)
    with pytest.raises(UnsupportedModelError, match=r"custom_st\.Transformer is not supported"):
        convert(folder.write(), tmp_path / "m.gguf")


def test_an_unknown_adapter_is_refused(tmp_path: Path) -> None:
    folder = with_adapters(tmp_path)[0].write()
    with pytest.raises(GGUFError, match=r"query is neither a folder nor one of retrieval\.query, sep"):
        Model(folder, adapter="query")


@pytest.mark.parametrize(
    ("end", "shape", "message"),
    [
        ("lora_A", (2, RANK, 32), r"has shape \(2, 4, 32\), expected 3 matrices"),
        ("lora_A", (3, RANK, 31), r"of .* do not fit its shape"),
        ("lora_B", None, "lacks one of its weight and the two matrices"),
    ],
)
def test_damaged_adapters_are_refused(
    tmp_path: Path, end: str, shape: tuple[int, ...] | None, message: str
) -> None:
    folder, _ = with_adapters(tmp_path)
    name = f"roberta.encoder.layers.0.mlp.fc1.parametrizations.weight.0.{end}"
    del folder.tensors[name]
    if shape is not None:
        folder.tensors[name] = values(shape)
    with pytest.raises(GGUFError, match=message):
        convert(folder.write(), tmp_path / "m.gguf", adapter="separation")


def test_a_reranker_may_have_the_names_of_jinas_class(tmp_path: Path) -> None:
    scores = []
    for name in ("known", "own"):
        folder = model_folders.bert(tmp_path / name, "XLMRobertaForSequenceClassification", "unigram")
        folder.config["id2label"] = {"0": "LABEL_0"}
        folder.add(linear("classifier.dense") | linear("classifier.out_proj", 1), 1000)
        if name == "own":
            _rename(folder.tensors)
        with Model(convert(folder.write(), tmp_path / "m.gguf"), **EXACT) as model:
            assert model.config.architecture == "bert"
            scores.append([r.score for r in model.rerank("the king", TEXTS)])
    assert scores[0] == scores[1]


def _rename(tensors: dict[str, Any]) -> None:
    for layer in range(LAYERS):
        known, own = f"roberta.encoder.layer.{layer}.", f"roberta.encoder.layers.{layer}."
        for end in ("weight", "bias"):
            parts = [tensors.pop(f"{known}attention.self.{x}.{end}") for x in ("query", "key", "value")]
            tensors[f"{own}mixer.Wqkv.{end}"] = np.concatenate(parts)
            for module, other in MODULES.items():
                tensors[f"{own}{other}.{end}"] = tensors.pop(f"{known}{module}.{end}")
    for end in ("weight", "bias"):
        tensors[f"roberta.emb_ln.{end}"] = tensors.pop(f"roberta.embeddings.LayerNorm.{end}")


def test_a_colbert_model_has_that_body_and_a_projection(tmp_path: Path) -> None:
    _, body = read(convert(plain(tmp_path / "body").write(), tmp_path / "body.gguf"))
    folder = plain(tmp_path / "colbert")
    (folder.path / "modules.json").unlink()
    folder.config["architectures"] = ["HF_ColBERT"]
    folder.tensors["linear.weight"] = values((16, 32), 5)
    folder.json("artifact.metadata", {"query_token_id": "[MASK]", "doc_token_id": "[SEP]", "dim": 16})
    metadata, found = read(convert(folder.write(), tmp_path / "m.gguf"))
    assert metadata["general.architecture"] == "jina-bert-v3"
    np.testing.assert_array_equal(found.pop("dense_2.weight"), folder.tensors["linear.weight"])
    assert_same_tensors(found, body)


def test_a_head_is_that_of_bert(tmp_path: Path) -> None:
    folder, names = jina_code(tmp_path / "folder"), ["a", "b", "c"]
    folder.config |= {
        "architectures": ["JinaBertForSequenceClassification"],
        "id2label": dict(enumerate(names)),
    }
    heads = {"bert.pooler.dense": "cls", "classifier": "cls.output"}
    folder.add(linear("bert.pooler.dense") | linear("classifier", len(names)), 50)
    fields, tensors = read(convert(folder.write(), tmp_path / "m.gguf"))
    assert fields["jina-bert-v2.classifier.output_labels"] == names
    for theirs, ours in heads.items():
        for end in ("weight", "bias"):
            np.testing.assert_array_equal(tensors[f"{ours}.{end}"], folder.tensors[f"{theirs}.{end}"])
