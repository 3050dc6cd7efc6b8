"""Classes of ``integrations`` within other projects' packages, each in an environment of its own.

``make test-clients`` creates the environments; without one, its test is skipped. The oracle is `Model`.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import model_folders
from support.client_environments import within
from support.entity_folders import RECORDED
from support.task_folders import DOCUMENTS, TAGGERS, TEXTS

from metal_prefill import Model
from metal_prefill.conversion import convert

PROGRAMS = Path(__file__).parent / "programs"
PROMPTS = [DOCUMENTS[0], DOCUMENTS[1], DOCUMENTS[3]]
MESSAGES = [
    {"role": "system", "content": "Speak thou briefly."},
    {"role": "user", "content": "Who art thou?"},
]


def found_by(client: str, *arguments: str | Path) -> Any:
    """Return what a program prints as JSON."""
    program = str(PROGRAMS / f"{client.replace('-', '_')}.py")
    printed = within(client, f"import runpy; runpy.run_path({program!r}, run_name='__main__')", *arguments)
    return json.loads(printed.splitlines()[-1])


def test_langchain_classes_return_what_the_model_does(
    demo_path: Path, embedding: Path, reranker: Path
) -> None:
    found = found_by("langchain-core", demo_path, embedding, reranker, *PROMPTS)
    later = found.pop("asynchronous")
    assert {name: found[name] for name in later} == later
    with Model(demo_path, device="cpu") as model:
        answer = answer_of(model, MESSAGES)
        assert found["answer"] == found["streamed"] == answer
        assert found["stopped"] == answer.partition(" ")[0]
        assert found["batch"] == [answer_of(model, [{"role": "user", "content": p}]) for p in PROMPTS]
    assert found["typed"] in ("aye", "nay")
    assert found["schema"] == {"word": found["typed"]}
    check_vectors(found, embedding)
    with Model(reranker, device="cpu") as model:
        ranked = model.rerank(PROMPTS[0], PROMPTS, 2)
        assert [found["place"] for found in found["ranked"]] == [one.index for one in ranked]
        assert [found["relevance_score"] for found in found["ranked"]] == [one.score for one in ranked]


def test_llama_index_classes_return_what_the_model_does(
    demo_path: Path, embedding: Path, reranker: Path
) -> None:
    found = found_by("llama-index-core", demo_path, embedding, reranker, *PROMPTS)
    later = found.pop("asynchronous")
    assert {name: found[name] for name in later} == later
    with Model(demo_path, device="cpu") as model:
        assert found["window"] == model.max_context
        assert [found["answer"]] * 2 == found["streamed"] == [answer_of(model, MESSAGES)] * 2
        text = "".join(model.generate("ROMEO:", 12))
        assert [found["text"]] * 2 == found["completed"] == [text] * 2
        assert found["batch"] == ["".join(model.session().generate(prompt, 12)) for prompt in PROMPTS]
    check_vectors(found, embedding)
    with Model(reranker, device="cpu") as model:
        ranked = model.rerank(PROMPTS[0], PROMPTS, 2)
        assert found["ranked"] == [[str(one.index), one.score] for one in ranked]


def answer_of(model: Model, messages: list[dict[str, str]]) -> str:
    ids = model.tokenizer.apply_chat_template(messages)
    return "".join(model.session().generate(ids, 12, stop=model.tokenizer.chat_stop))


def check_vectors(found: dict[str, Any], path: Path) -> None:
    with Model(path, device="cpu") as model:
        np.testing.assert_array_equal(found["documents"], model.embed(PROMPTS, dimensions=8))
        (query,) = model.embed(PROMPTS[:1], dimensions=8, instruction="query")
        np.testing.assert_array_equal(found["query"], query)
        assert not np.array_equal(found["query"], found["documents"][0])


@pytest.mark.parametrize("labels", [None, ["person", "place of birth"]])
def test_spacy_pipe_sets_entities_of_whole_tokens(tmp_path: Path, labels: list[str] | None) -> None:
    make = TAGGERS["bert"] if labels is None else RECORDED["bert, names"]
    path = convert(make(tmp_path / "folder").write(), tmp_path / "model.gguf")
    code = """
import json, spacy
nlp = spacy.blank("en")
given = json.loads(sys.argv.pop())
nlp.add_pipe("metal_prefill", config={"model": sys.argv[1], "model_options": {"device": "cpu"}, **given})
def places(doc):
    return [[e.label_, e.start_char, e.end_char] for e in doc.ents]
texts = sys.argv[2:]
docs = [nlp(text) for text in texts]
nlp.to_disk(sys.argv[1] + ".pipeline")
print(json.dumps({
    "alone": [places(doc) for doc in docs],
    "together": [places(doc) for doc in nlp.pipe(texts, batch_size=3)],
    "again": [places(doc) for doc in spacy.load(sys.argv[1] + ".pipeline").pipe(texts)],
    "tokens": [[[token.idx, token.idx + len(token)] for token in doc] for doc in docs],
}))
"""
    given = {} if labels is None else {"labels": labels, "threshold": 0.83}
    found = json.loads(within("spacy", code, path, *TEXTS, json.dumps(given)))
    assert found["alone"] == found["together"] == found["again"]
    assert sum(map(len, found["alone"])) > 1
    with Model(path, device="cpu") as model:
        labelled = (
            model.label_tokens(TEXTS, strategy="first")
            if labels is None
            else model.find_entities(TEXTS, labels, threshold=0.83)
        )
    for entities, places, tokens in zip(labelled, found["alone"], found["tokens"], strict=True):
        for label, start, end in places:
            assert start in [first for first, _ in tokens]
            assert end in [last for _, last in tokens]
            assert label in [e.label for e in entities if start <= e.start and e.end <= end]
        covered = [range(start, end) for _, start, end in places]
        assert all(any(e.start in r for r in covered) for e in entities)


def test_mteb_scores_the_vectors_of_the_model(tmp_path: Path) -> None:
    folder = model_folders.bert(tmp_path / "folder", model_type="bert")
    folder.pool("mean_tokens")
    path = folder.write()
    texts = [*PROMPTS, *TEXTS[:2]]
    found = found_by("mteb", path, *texts)
    with Model(path, device="cpu") as model:
        vectors = model.embed(texts)
    places = np.argsort(np.argsort((vectors * np.roll(vectors, -1, axis=0)).sum(axis=1)))  # ranks
    assert found["name"] == str(path)
    assert abs(found["score"] - np.corrcoef(places, np.arange(len(texts)))[0, 1]) < 1e-6
