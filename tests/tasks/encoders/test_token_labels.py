"""Labels of tokens, next to transformers' pipelines."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.encoder_tasks import NEAR, FileOf, opened
from support.model_folders import DIM
from support.task_folders import STRATEGIES, TAGGERS, TAGS, TEXTS

from metal_prefill import Model
from metal_prefill.cli import main
from metal_prefill.files import GGUFFile
from metal_prefill.files._task_config import read_head


def trimmed(text: str, entity: dict[str, Any]) -> tuple[str, int, int]:
    """Return label and position of a recorded entity without white space at its ends."""
    inside = text[entity["start"] : entity["end"]]
    start = entity["start"] + len(inside) - len(inside.lstrip())
    return entity["label"], start, start + len(inside.strip())


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", TAGGERS)
def test_entities_match_transformers(
    file_of: FileOf, record: dict[str, Any], name: str, strategy: str
) -> None:
    with opened(file_of(TAGGERS[name])) as model:
        found = model.label_tokens(TEXTS, strategy=strategy)
        assert len(found) == len(TEXTS)
        for text, entities, expected in zip(TEXTS, found, record["labels"][name][strategy], strict=True):
            places = [(entity.label, entity.start, entity.end) for entity in entities]
            wanted = [trimmed(text, entity) for entity in expected]
            assert places == [place for place in wanted if place[1] < place[2]]
            scores = [e["score"] for e, place in zip(expected, wanted, strict=True) if place[1] < place[2]]
            np.testing.assert_allclose(
                [entity.score for entity in entities], scores, rtol=0, atol=NEAR["cpu"]
            )
            assert all(text[entity.start : entity.end] == entity.text for entity in entities)


def test_labels_on_metal_match_transformers(metal: None, file_of: FileOf, record: dict[str, Any]) -> None:
    with opened(file_of(TAGGERS["bert"]), "metal") as model:
        for entities, expected in zip(
            model.label_tokens(TEXTS, strategy="none"), record["labels"]["bert"]["none"], strict=True
        ):
            scores = [entity["score"] for entity in expected]
            np.testing.assert_allclose(
                [entity.score for entity in entities], scores, rtol=0, atol=NEAR["metal"]
            )


def test_labels_are_the_same_alone_and_in_any_batch(file_of: FileOf) -> None:
    path = file_of(TAGGERS["bert"], "Q8_0")
    counts: list[tuple[int, int]] = []
    with Model(path, device="cpu") as model, Model(path, device="cpu", threads=1) as one:
        together = model.label_tokens(TEXTS, progress=lambda done, total: counts.append((done, total)))
        assert together == [one.label_tokens([text])[0] for text in TEXTS]
        assert model.label_tokens(["", *TEXTS]) == [[], *together]
    assert counts == [(i, len(TEXTS)) for i in range(1, len(TEXTS) + 1)]


def test_words_end_at_white_space(file_of: FileOf) -> None:
    with opened(file_of(TAGGERS["modernbert"])) as model:
        text = "ab c\td\ne"
        words = []
        for span in model.tokenizer.encode_spans(text):
            if not model.tokenizer.continues_word(span, text):
                words.append("")
            words[-1] += text[span.start : span.end]
        assert [word.strip() for word in words if word.strip()] == ["ab", "c", "d", "e"]


def test_ignored_labels_are_omitted(file_of: FileOf) -> None:
    with opened(file_of(TAGGERS["bert"])) as model:
        everything = [e for entities in model.label_tokens(TEXTS, ignore=()) for e in entities]
        assert {entity.label for entity in everything} == {"O", "PER", "LOC"}
        kept = [e for entities in model.label_tokens(TEXTS, ignore=("O", "PER")) for e in entities]
        assert kept == [entity for entity in everything if entity.label == "LOC"]


def test_labels_are_the_tags_of_the_folder(file_of: FileOf) -> None:
    with GGUFFile(file_of(TAGGERS["bert"])) as gguf:
        head = read_head(gguf, "bert", DIM)
        assert (head.labels, head.pooling, head.steps) == (TAGS, "none", ())


def test_a_command_prints_labels(file_of: FileOf, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = file_of(TAGGERS["bert"])
    file = tmp_path / "texts"
    file.write_text("\n".join(["Angela met the Queen.", "nothing"]))
    with opened(path) as model:
        expected = model.label_tokens(["Angela met the Queen.", "nothing"], strategy="first")
    arguments = ["label", "-m", str(path), "-f", str(file), "--compute", "f32", "--kv-dtype", "f32"]
    assert main([*arguments, "--strategy", "first"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{i}:{e.start}-{e.end}  {e.label}  {e.score:.4f}  {e.text}"
        for i, entities in enumerate(expected)
        for e in entities
    ]
    assert main([*arguments, "--strategy", "first", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["index"] for line in lines] == [0, 1]
    assert lines[0]["entities"][0]["text"] == expected[0][0].text
