"""The list of models that open follows the tables of conversion."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest
from support.places import ROOT


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
    rows = coverage.rows()
    assert len({row["model"].lower() for row in rows}) == len(rows)
    for row in rows:
        assert None not in row
        assert row["lists"].split()
        assert set(row["lists"].split()) <= set(coverage.LISTS)


def test_the_page_has_each_model(coverage: ModuleType) -> None:
    page = coverage.page()
    for row in coverage.rows():
        assert f"| {row['model']} | {row['class']} |" in page
