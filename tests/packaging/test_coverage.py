"""The list of models that open follows the tables of conversion, and folders of their classes open."""

import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from support import bert_relatives, bidirectional_folders, encoder_folders, entity_folders, model_folders
from support.decoder_folders import gemma2, qwen, with_head_norms
from support.model_folders import Folder
from support.places import ROOT
from support.task_folders import CLASSIFIERS, LATE, RANKERS, stanford, static

from metal_prefill import Model


@pytest.fixture(scope="module")
def coverage() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "docs_coverage", ROOT / "tools" / "build" / "docs_coverage.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def row(kind: str, modules: str = "", other: str = "") -> dict[str, str]:
    return {"model": "owner/name", "class": kind, "modules": modules, "lists": "s", "other": other}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (row("BertModel", "Transformer Pooling Normalize"), ""),
        (row("", "StaticEmbedding Normalize"), ""),
        (row("HF_ColBERT"), ""),
        (row("Qwen3BidirectionalModel", "Transformer Pooling"), ""),
        (row("GLiNER"), ""),
        (row("GLiNER", other="relations"), "relations"),
        (row("ElectraForSequenceClassification"), ""),
        (row("DistilBertForMaskedLM", "Router Transformer SpladePooling SparseStaticEmbedding"), ""),
        (row("NewForMaskedLM", "Transformer SpladePooling"), ""),
        (row("ElectraForMaskedLM", "Transformer SpladePooling"), ""),
        (row("NomicBertForSequenceClassification"), "the head of NomicBertForSequenceClassification"),
        (row("CLIPModel", "Transformer"), "class CLIPModel"),
        (row("BertModel", "Transformer LSTM"), "module LSTM"),
        (row("BertModel", "Transformer", "images"), "images"),
    ],
)
def test_the_verdict_names_what_is_missing(
    coverage: ModuleType, given: dict[str, str], expected: str
) -> None:
    assert coverage.missing(given) == expected


def test_each_model_is_listed_once_with_known_lists(coverage: ModuleType) -> None:
    rows = coverage.rows(coverage.DATA)
    assert len({row["model"].lower() for row in rows}) == len(rows)
    for row in rows:
        assert None not in row
        assert row["lists"].split()
        assert set(row["lists"].split()) <= set(coverage.LISTS)


def test_the_page_has_each_model(coverage: ModuleType) -> None:
    page = coverage.page()
    for row in coverage.rows(coverage.DATA):
        assert f"| {row['model']} | {row['class']} |" in page


def test_downloads_are_of_listed_models(coverage: ModuleType) -> None:
    published = coverage.rows(coverage.DOWNLOADS)
    assert {row["model"] for row in published} <= {row["model"] for row in coverage.rows(coverage.DATA)}
    assert {row["page"] for row in published} == set(coverage.PAGES)


def test_models_are_weighted_by_their_downloads(
    coverage: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = {
        "DATA": (
            "class,modules,lists,other",
            "a,BertModel,,s,",
            "b,BertModel,,s,",
            "c,CLIPModel,,s,",
            "d,,,s,x",
        ),
        "DOWNLOADS": ("millions,page", "a,200,q4km", "b,40,gigarouter", "c,10,gigarouter"),
    }
    for name, lines in tables.items():
        path = tmp_path / name
        path.write_text("model," + "\n".join(lines) + "\n", encoding="utf-8")
        monkeypatch.setattr(coverage, name, path)
    assert coverage.weights() == (240, 10, ["d"], 47)
    page = coverage.page()
    assert "**96.0%**" in page  # 240 of 250
    assert "would be 80.8%" in page  # of 297


def nomic(path: Path) -> Folder:
    """Make a folder of the class with a layer that has a gate."""
    folder = encoder_folders.nomic_moe(path, 4, dim=32, heads=4, ffn=64, layers=1, experts=2, used=1)
    folder.config |= {"activation_function": "swiglu", "moe_every_n_layers": 0}
    folder.config |= dict.fromkeys(("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"), False)
    folder.tensors = {n: t for n, t in folder.tensors.items() if t.ndim == 2 or "norm" in n or "_ln" in n}
    up = folder.tensors.pop("encoder.layers.0.mlp.fc1.weight")
    folder.tensors |= {f"encoder.layers.0.mlp.{name}.weight": up for name in ("fc11", "fc12")}
    return folder


def gemma3(path: Path) -> Folder:
    """Make a folder of the class from one of Gemma 2, which lacks norms of heads."""
    folder = gemma2(path)
    width = folder.config["head_dim"]
    folder = with_head_norms(folder, ("q_norm", width), ("k_norm", width))
    for name in ("attn_logit_softcapping", "final_logit_softcapping", "layer_types"):
        folder.config.pop(name, None)
    folder.tensors.pop("lm_head.weight", None)
    return folder


def jina(path: Path) -> Folder:
    """Make a folder of the class, whose gate and up are rows of one matrix."""
    folder = model_folders.bert(path)
    folder.config |= {"position_embedding_type": "alibi", "feed_forward_type": "geglu"}
    del folder.tensors["embeddings.position_embeddings.weight"]
    for name in list(folder.tensors):
        if ".intermediate.dense." in name:
            tensor = folder.tensors.pop(name)
            if name.endswith("weight"):
                at = name.replace("intermediate.dense", "mlp.gated_layers")
                folder.tensors[at] = np.concatenate([tensor, tensor])
        elif ".output." in name and ".attention." not in name:
            at = name.replace("output.dense", "mlp.wo").replace("output.LayerNorm", "mlp.layernorm")
            folder.tensors[at] = folder.tensors.pop(name)
    return folder


# A folder of each class that the page says opens; of classes with one set of tensors, another name.
MADE: dict[str, Callable[[Path], Folder]] = {
    "": static,
    "AlbertModel": encoder_folders.RECORDED["albert"],
    "BertForMaskedLM": partial(model_folders.bert, architecture="BertForMaskedLM"),
    "BertForSequenceClassification": CLASSIFIERS["bert"],
    "BertModel": model_folders.bert,
    "DebertaV2ForSequenceClassification": RANKERS["deberta"],
    "DistilBertForMaskedLM": bert_relatives.routed,
    "DistilBertModel": bert_relatives.distilbert,
    "ElectraForSequenceClassification": RANKERS["electra"],
    "GLiNER": next(iter(entity_folders.RECORDED.values())),
    "Gemma3TextModel": gemma3,
    "GteModel": bert_relatives.gte,
    "HF_ColBERT": stanford,
    "JinaBertForSequenceClassification": jina,
    "JinaBertModel": jina,
    "MPNetForMaskedLM": bert_relatives.mpnet,
    "MPNetModel": bert_relatives.mpnet,
    "ModernBertForSequenceClassification": RANKERS["modernbert"],
    "ModernBertModel": LATE["modernbert"],
    "NewForMaskedLM": bert_relatives.gte_masked,
    "NewModel": bert_relatives.gte,
    "NomicBertModel": nomic,
    "PPLXQwen3Model": bidirectional_folders.pplx,
    "Qwen3ForCausalLM": partial(qwen, name="Qwen3"),
    "RobertaForMaskedLM": partial(model_folders.bert, architecture="RobertaForMaskedLM"),
    "RobertaForSequenceClassification": RANKERS["xlm-roberta"],
    "T5EncoderModel": encoder_folders.RECORDED["t5"],
    "XLMRobertaForSequenceClassification": RANKERS["xlm-roberta"],
    "XLMRobertaModel": partial(model_folders.bert, architecture="XLMRobertaModel", variant="unigram"),
}


def test_a_folder_of_each_class_is_tried(coverage: ModuleType) -> None:
    assert {row["class"] for row in coverage.rows(coverage.DATA) if not coverage.missing(row)} == set(MADE)


@pytest.mark.parametrize("name", MADE)
def test_a_folder_of_a_class_that_is_listed_opens(tmp_path: Path, name: str) -> None:
    folder = MADE[name](tmp_path / "m")
    if name in ("", "GLiNER", "HF_ColBERT", "DistilBertForMaskedLM"):
        path = folder.write()
    else:
        folder.config["architectures"] = [name]
        if name == "JinaBertForSequenceClassification":
            folder.config["id2label"] = {"0": "x"}
            model_folders.with_head(folder, {"classifier.weight": (1, 32), "classifier.bias": (1,)})
        path = folder.write()
    with Model(path, device="cpu") as model, model.session() as session:
        (states,) = model.forward_batch([session], [range(5, 25)], output="hidden", rows="all")
    assert np.isfinite(states).all()
    assert np.abs(states).max() > 0
