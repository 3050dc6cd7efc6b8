"""Labels of tokens next to transformers' pipelines, and of parts by the best sequence of tags."""

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.closeness import hidden_states
from support.encoder_tasks import NEAR, FileOf, opened
from support.folders.encoder_folders import PRIVACY_TAGS, private_parts
from support.folders.entity_folders import LABELS, RECORDED
from support.folders.task_folders import STRATEGIES, TAGGERS, TEXTS, recorded
from support.kernels.float64 import softmax
from support.programs import Run

from metal_prefill.conversion import convert
from metal_prefill.files import GGUFFile
from metal_prefill.files._task_config import TransitionBiases, read_head
from metal_prefill.tasks import Entity
from metal_prefill.tasks._token_labels import best_path, stray_tag, transitions_of

Logits = npt.NDArray[np.float64]
NAMES = TransitionBiases._fields
BIASES = dict(zip(NAMES, (0.75, -0.5, 1.25, -1.0, 0.25, -0.25), strict=True))


def score_of(tags: Sequence[str], biases: Mapping[str, float]) -> float:
    """Return what the transitions of a sequence add, by the rules of the model card; ``-inf`` if invalid."""
    total = 0.0
    for before, after in itertools.pairwise(("O", *tags, "O")):
        inside = before[0] in "BI"
        if inside != (after[0] in "IE") or (inside and before[2:] != after[2:]):
            return -np.inf
    for before, after in itertools.pairwise(tags):
        if before[0] in "BI":
            name = "inside_to_continue" if after[0] == "I" else "inside_to_end"
        elif before == "O":
            name = "background_stay" if after == "O" else "background_to_start"
        else:
            name = "end_to_background" if after == "O" else "end_to_start"
        total += biases.get(name, 0.0)
    return total


def best_of_all(logits: Logits, labels: Sequence[str], biases: Mapping[str, float]) -> tuple[int, ...]:
    """Return the best of all sequences."""
    log_probs = np.log(softmax(logits))
    sequences = itertools.product(range(len(labels)), repeat=len(logits))

    def score(sequence: tuple[int, ...]) -> float:
        own = float(log_probs[np.arange(len(sequence)), sequence].sum())
        return own + score_of([labels[i] for i in sequence], biases)

    return max(sequences, key=score)


@pytest.mark.parametrize("biases", [{}, BIASES, {"background_stay": -9.0}, {"end_to_start": 5.0}])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_a_path_is_the_best_of_all_sequences(n: int, biases: dict[str, float]) -> None:
    for seed in range(3):
        logits = np.random.default_rng([n, seed]).normal(0, 2, (n, len(PRIVACY_TAGS)))
        path = best_path(logits, transitions_of(PRIVACY_TAGS, TransitionBiases(**biases)))
        assert tuple(path) == best_of_all(logits, PRIVACY_TAGS, biases)


def test_an_impossible_tag_is_not_chosen_however_probable_it_is() -> None:
    logits = np.zeros((3, len(PRIVACY_TAGS)))
    logits[:, PRIVACY_TAGS.index("I-secret")] = 1e6
    path = best_path(logits, transitions_of(PRIVACY_TAGS, TransitionBiases()))
    assert [PRIVACY_TAGS[i] for i in path] == ["B-secret", "I-secret", "E-secret"]


def tagged(path: Path, text: str) -> tuple[list[Any], Logits]:
    """Return tokens and the outputs of the head for them, computed from hidden states."""
    with opened(path) as model, GGUFFile(path) as gguf:
        spans = model.tokenizer.encode_spans(text)
        states = hidden_states(model, np.array([span.id for span in spans]))
        head = read_head(gguf, "privacy-filter", 64)
        weight, bias = (head.matrix(f"cls.output.{end}") for end in ("weight", "bias"))
        return spans, states.astype(np.float64) @ weight.T.astype(np.float64) + bias.reshape(-1)


def parts_of(
    text: str, spans: Sequence[Any], tags: Sequence[str], scores: Logits
) -> list[tuple[str, int, int, float]]:
    """Return label, position and mean score of each part, without white space at its ends."""
    found, first = [], 0
    for i, tag in enumerate(tags):
        first = i if tag[0] in "BS" else first
        if tag[0] in "ES":
            start = spans[first].start
            inside = text[start : spans[i].end]
            begin = start + len(inside) - len(inside.lstrip())
            score = float(np.mean(scores[first : i + 1]))
            found.append((tag[2:], begin, begin + len(inside.strip()), score))
    return [part for part in found if part[1] < part[2]]


@pytest.mark.parametrize("biases", [{}, BIASES, {"background_stay": -3.0}])
def test_entities_are_the_parts_of_the_best_sequence(
    device: str, file_of: FileOf, biases: dict[str, float]
) -> None:
    """Their scores are the means of the probabilities of the tags."""
    path, counts = file_of(private_parts), []
    with opened(path, device) as model:
        found = model.label_tokens(TEXTS, transitions=biases)
        assert found == model.label_tokens(TEXTS, strategy="viterbi", transitions=biases)
    for text, entities in zip(TEXTS, found, strict=True):
        if not text:
            assert entities == []
            continue
        spans, logits = tagged(path, text)
        chosen = best_path(logits, transitions_of(PRIVACY_TAGS, TransitionBiases(**biases)))
        tags = [PRIVACY_TAGS[i] for i in chosen]
        assert score_of(tags, {}) == 0.0  # valid
        parts = parts_of(text, spans, tags, softmax(logits)[np.arange(len(chosen)), chosen])
        assert places(entities) == [(label, start, end) for label, start, end, _ in parts]
        assert [e.score for e in entities] == pytest.approx([part[3] for part in parts], abs=NEAR[device])
        assert all(text[e.start : e.end] == e.text for e in entities)
        counts.append(len(parts))
    assert any(counts)


def test_the_default_strategy_follows_the_tags(file_of: FileOf) -> None:
    with opened(file_of(TAGGERS["bert"])) as model:
        assert model.label_tokens(TEXTS) == model.label_tokens(TEXTS, strategy="simple")
    assert stray_tag(("O", "S-x", "B-x", "E-x", "PER")) == "PER"
    assert stray_tag(("S-x", "B-x", "E-x")) == ""
    assert stray_tag(PRIVACY_TAGS) is None


def places(entities: Sequence[Entity]) -> list[tuple[str, int, int]]:
    return [(entity.label, entity.start, entity.end) for entity in entities]


def test_biases_are_those_of_the_folder(tmp_path: Path) -> None:
    stated = {f"transition_bias_{name}": value for name, value in BIASES.items()}
    folder = private_parts(tmp_path / "m")
    folder.json("viterbi_calibration.json", {"operating_points": {"default": {"biases": stated}}})
    path = convert(folder.write(), tmp_path / "m.gguf")
    with GGUFFile(path) as gguf:
        assert read_head(gguf, "privacy-filter", 64).transitions == TransitionBiases(**BIASES)
    with opened(path) as model:
        own = model.label_tokens(TEXTS)
        assert own == model.label_tokens(TEXTS, transitions=BIASES)
        assert own != model.label_tokens(TEXTS, transitions={"background_stay": -20.0})


def trimmed(text: str, start: int, end: int) -> tuple[int, int]:
    """Return a position without white space at its ends."""
    start += len(text[start:end]) - len(text[start:end].lstrip())
    return start, start + len(text[start:end].strip())


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", TAGGERS)
def test_entities_match_transformers(file_of: FileOf, name: str, strategy: str) -> None:
    with opened(file_of(TAGGERS[name])) as model:
        found = model.label_tokens(TEXTS, strategy=strategy)
        assert len(found) == len(TEXTS)
        for text, entities, expected in zip(TEXTS, found, recorded()["labels"][name][strategy], strict=True):
            wanted = [(label, score, *trimmed(text, *place)) for label, score, *place in expected]
            wanted = [entity for entity in wanted if entity[2] < entity[3]]
            assert places(entities) == [(label, start, end) for label, _, start, end in wanted]
            scores = [score for _, score, _, _ in wanted]
            np.testing.assert_allclose(
                [entity.score for entity in entities], scores, rtol=0, atol=NEAR["cpu"]
            )
            assert all(text[entity.start : entity.end] == entity.text for entity in entities)


def test_labels_on_metal_match_transformers(metal: None, file_of: FileOf) -> None:
    with opened(file_of(TAGGERS["bert"]), "metal") as model:
        for entities, expected in zip(
            model.label_tokens(TEXTS, strategy="none"), recorded()["labels"]["bert"]["none"], strict=True
        ):
            scores = [score for _, score, _, _ in expected]
            np.testing.assert_allclose(
                [entity.score for entity in entities], scores, rtol=0, atol=NEAR["metal"]
            )


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


@pytest.mark.parametrize(
    ("make", "options", "call"),
    [
        (TAGGERS["bert"], ("--strategy", "first"), lambda m, texts: m.label_tokens(texts, strategy="first")),
        (
            RECORDED["bert, names"],
            ("--labels", ",".join(LABELS), "--threshold", "0.7"),
            lambda m, texts: m.find_entities(texts, LABELS, threshold=0.7),
        ),
    ],
    ids=["tags", "labels of the call"],
)
def test_a_command_prints_entities(
    file_of: FileOf, output: Run, make: Any, options: tuple[str, ...], call: Callable[..., Any]
) -> None:
    path, texts = file_of(make), ["Angela met the Queen.", "The king lives in London"]
    with opened(path) as model:
        expected = call(model, texts)
    command = ("label", "-m", path, "--compute", "f32", "--kv-dtype", "f32", *options, *texts)
    assert output(*command).splitlines() == [
        f"{i}:{e.start}-{e.end}  {e.label}  {e.score:.4f}  {e.text}"
        for i, entities in enumerate(expected)
        for e in entities
    ]
    lines = [json.loads(line) for line in output(*command, "--json").splitlines()]
    assert [line["index"] for line in lines] == [0, 1]
    assert lines[0]["entities"][0]["text"] == expected[0][0].text
