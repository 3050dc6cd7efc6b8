"""Entities of labels that a call names, next to the library gliner."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.encoder_tasks import NEAR, FileOf, opened
from support.folders.entity_folders import LABELS, RECORD, RECORDED, TEXTS, calls_of, pickled
from support.programs import Run

from metal_prefill import ClosedError, ContextOverflowError, Model
from metal_prefill.conversion import convert
from metal_prefill.tasks import Entity, _embedding, _entities, _text_passes
from metal_prefill.tasks._text_passes import TextPasses

EXPECTED: dict[str, Any] = json.loads(RECORD.read_bytes())  # entities that gliner finds
CALLS = [(name, call) for name in RECORDED for call in calls_of(name)]


@pytest.mark.parametrize(("name", "call"), CALLS)
def test_entities_match_gliner(file_of: FileOf, name: str, call: str) -> None:
    with opened(file_of(RECORDED[name])) as model:
        found = model.find_entities(TEXTS, LABELS, **calls_of(name)[call])
    for text, entities, wanted in zip(TEXTS, found, EXPECTED[f"{name}/{call}"], strict=True):
        places = [[label, start, end] for label, _, start, end in wanted]
        assert [[e.label, e.start, e.end] for e in entities] == places
        scores = [score for _, score, _, _ in wanted]
        np.testing.assert_allclose([e.score for e in entities], scores, rtol=0, atol=NEAR["cpu"])
        assert all(text[e.start : e.end] == e.text for e in entities)


@pytest.mark.parametrize("name", ["bert, names", "modernbert and bert"])
def test_scores_on_metal_match_gliner(metal: None, file_of: FileOf, name: str) -> None:
    call = "nested, several labels"
    options = calls_of(name)[call] | {"threshold": 0.0}
    with opened(file_of(RECORDED[name]), "metal") as model:
        (found,) = model.find_entities(TEXTS[:1], LABELS, **options)
    scores = {(e.label, e.start, e.end): e.score for e in found}
    for label, score, start, end in EXPECTED[f"{name}/{call}"][0]:
        assert abs(scores[label, start, end] - score) <= NEAR["metal"]


def test_labels_of_an_encoder_of_their_own_are_independent_of_others(file_of: FileOf) -> None:
    path = file_of(RECORDED["modernbert and bert"])

    def scores(model: Model, *labels: str) -> dict[str, float]:
        (found,) = model.find_entities(["king"], labels, threshold=0.0, multi_label=True)
        return {e.label: e.score for e in found}

    with opened(path) as model, opened(path) as other:
        first = scores(model, "person", "place of birth")
        assert scores(model, "place of birth", "city", "person") == pytest.approx(
            first | scores(other, "city"), abs=1e-6
        )
        assert first["person"] != pytest.approx(first["place of birth"], abs=1e-3)
        with pytest.raises(ContextOverflowError, match=r"label 1: .* tokens exceed the context"):
            model.find_entities(["a"], ["b", "king " * 4000])
        labels = model.engine.label_encoder
    assert labels is not None
    with pytest.raises(ClosedError):
        _ = labels.core


def test_vectors_of_labels_are_kept_up_to_a_limit(file_of: FileOf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_entities, "_KEPT_LABELS", 3)
    path, computed = file_of(RECORDED["modernbert and bert"]), []

    def embed_encoded(passes: TextPasses, encoded: _embedding.EncodedTexts, **options: Any) -> Any:
        computed.append(len(encoded.prompts))
        return _embedding.embed_encoded(passes, encoded, **options)

    def found(model: Model, labels: list[str]) -> list[Entity]:
        return model.find_entities(["The king lives in London"], labels, threshold=0.0)[0]

    calls = [["person", "city"], ["city", "Year"], ["a", "b", "c", "d"], ["city"]]
    modes: list[dict[str, Any]] = [{"compute": "f32"}, {"compute": "int8"}]
    expected = []
    for labels in calls:
        for options in modes:
            with Model(path, device="cpu", **options) as alone:
                expected.append(found(alone, labels))
    monkeypatch.setattr(_entities, "embed_encoded", embed_encoded)
    with Model(path, device="cpu", **modes[0]) as one, Model(path, device="cpu", **modes[1]) as other:
        for i, labels in enumerate(calls):
            assert [found(model, labels) for model in (one, other)] == expected[2 * i : 2 * i + 2]
            assert max(len(model.engine.label_vectors) for model in (one, other)) <= 3
    assert computed == [2, 2, 1, 1, 4, 4, 1, 1]


def test_sizes_of_an_encoder_of_labels_have_names_of_their_own(file_of: FileOf) -> None:
    with opened(file_of(RECORDED["bert"])) as model:
        single = model.stats()
    with opened(file_of(RECORDED["modernbert and bert"])) as model:
        both = model.stats()
        labels = model.engine.label_encoder
        assert labels is not None
        page = labels.core.stats()["kv_page_bytes"]
    assert both.keys() == single.keys() | {f"label_encoder_{name}" for name in single}
    assert both["label_encoder_kv_page_bytes"] == page > 0


def test_weights_of_torch_save_are_those_of_safetensors(tmp_path: Path, own_cache: None) -> None:
    name, found = "bert, names", []
    for folder in (RECORDED[name](tmp_path / "a"), pickled(tmp_path / "b", name)):
        with Model(folder.write(), device="cpu") as model:
            found.append(model.find_entities(TEXTS, LABELS, threshold=0.7))
    assert found[0] == found[1]
    assert any(found[0])


def test_words_that_the_tokenizer_removes_do_not_move_others(file_of: FileOf) -> None:
    with opened(file_of(RECORDED["bert, names"])) as model:
        plain, marked = model.find_entities(["a king b", "a \u200b king b"], LABELS, threshold=0.0)
    assert [(e.label, e.text, e.score) for e in plain[:1]] == [(e.label, e.text, e.score) for e in marked[:1]]
    assert [e.text.split()[-1] for e in plain] == [e.text.split()[-1] for e in marked]


@pytest.mark.parametrize("name", ["bert, names", "modernbert and bert"])
def test_texts_without_words_have_no_entities_and_no_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Texts of a model with an encoder of labels may then have no tokens."""
    folder = RECORDED[name](tmp_path / "m")
    folder.merge("tokenizer.json", post_processor=None)
    computed: list[int] = []

    def pooled_states(passes: TextPasses, pooling: Any, prompts: Any, **options: Any) -> Any:
        computed.append(len(prompts))
        return _text_passes.pooled_states(passes, pooling, prompts, **options)

    monkeypatch.setattr(_entities, "pooled_states", pooled_states)
    with opened(convert(folder.write(), tmp_path / "m.gguf")) as model:
        assert not model.tokenizer.encode("")
        none, found, blank = model.find_entities(["", "a king", " \n"], LABELS, threshold=0.0)
        assert none == blank == []
        assert found
        assert model.find_entities([""], LABELS) == [[]]
    assert computed == [1, 0]


def test_texts_and_labels_that_do_not_fit_are_named(file_of: FileOf) -> None:
    long = "the king " * 16  # of at most 30 words
    with opened(file_of(RECORDED["bert"])) as model:
        with pytest.raises(ContextOverflowError, match="text 1: 32 words exceed the 30 that the model reads"):
            model.find_entities(["a", long], LABELS)
        cut = "1 of 2 texts exceeded 30 words, or with the labels the context .* lost their ends: text 1"
        with pytest.warns(UserWarning, match=cut):
            found = model.find_entities(["a", long], LABELS, truncate="end", threshold=0.0)
        assert found == model.find_entities(["a", long[: 9 * 15 - 1]], LABELS, threshold=0.0)
        with pytest.raises(
            ContextOverflowError, match=r"the 200 labels and a word: .* tokens exceed the cont"
        ):
            model.find_entities(["a"], [f"label {i}" for i in range(200)])
    with opened(file_of(RECORDED["bert"]), max_context=40) as model:
        with pytest.raises(ContextOverflowError, match=r"text 0 with the labels: .* exceed the context"):
            model.find_entities(["king " * 29], LABELS)
        with pytest.warns(UserWarning, match="context of 40 tokens"):
            assert model.find_entities(["king " * 29], LABELS, truncate="end", threshold=0.0)[0]


def test_a_command_requires_labels(file_of: FileOf, errors: Run) -> None:
    path = file_of(RECORDED["bert, names"])
    assert "requires --labels" in errors("label", "-m", path, "a")
    assert "--strategy requires" in errors("label", "-m", path, "--labels", "x", "--strategy", "max", "a")
