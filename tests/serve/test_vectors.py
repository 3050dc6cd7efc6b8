"""Embeddings and reranking over HTTP: the vectors and scores of the library."""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.folders import model_folders, task_folders
from support.servers.running_server import Running, running, serving

from metal_prefill import Model
from metal_prefill.conversion import convert
from metal_prefill.tasks import prompt_names

TEXTS = ["a text", "another one, which is longer", "a text"]


def vectors(server: Running, **body: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
    data = server.answer("/v1/embeddings", body)["data"]
    return np.array([item["embedding"] for item in data], np.float32)


def ranks(server: Running, path: str = "/v1/rerank", **body: Any) -> list[tuple[int, float]]:
    """Return index and score of each document, best first."""
    return [(r["index"], r["relevance_score"]) for r in server.answer(path, body)["results"]]


def of(ranked: Any) -> list[tuple[int, float]]:
    return [(item.index, item.score) for item in ranked]


def test_vectors_match_the_library(vector_server: Running, vector_model: Model) -> None:
    client, expected = vector_server.client(), vector_model.embed(TEXTS)
    answer = client.embeddings.create(model="vectors", input=TEXTS, encoding_format="float")
    np.testing.assert_array_equal([np.array(d.embedding, np.float32) for d in answer.data], expected)
    ids = [[*vector_model.tokenizer.encode(text), vector_model.tokenizer.eos_id] for text in TEXTS]
    assert answer.usage.prompt_tokens == sum(map(len, ids))
    answer = client.embeddings.create(model="vectors", input=TEXTS, encoding_format="base64")
    np.testing.assert_array_equal(
        [np.frombuffer(base64.b64decode(d.embedding), "<f4") for d in answer.data], expected
    )
    found = vectors(vector_server, input=ids, dimensions=8)
    np.testing.assert_array_equal(found, vector_model.embed(TEXTS, dimensions=8))
    found = vectors(vector_server, input="cafe\u0301", unicode="NFC")
    np.testing.assert_array_equal(found, vector_model.embed(["caf\u00e9"]))


@pytest.mark.parametrize("normalize", [True, False])
def test_text_embeddings_inference_returns_a_list_of_vectors(
    vector_server: Running, vector_model: Model, normalize: bool
) -> None:
    body = {"inputs": TEXTS, "normalize": normalize, "truncate": True, "truncation_direction": "Right"}
    expected = vector_model.embed(TEXTS, normalize=normalize)
    np.testing.assert_array_equal(np.array(vector_server.answer("/embed", body), np.float32), expected)
    one = vector_server.answer("/embed", {"inputs": TEXTS[0], "normalize": normalize, "dimensions": 4})
    np.testing.assert_array_equal(
        np.array(one, np.float32), vector_model.embed(TEXTS[:1], normalize=normalize, dimensions=4)
    )
    np.testing.assert_array_equal(vectors(vector_server, input=TEXTS, normalize=normalize), expected)
    assert vector_server.post("/embed", {"inputs": "x " * 5000}).status_code == 400


def test_an_invalid_input_is_reported(vector_server: Running) -> None:
    for input_, message in (
        ([[1, 2], [1 << 40]], "text 1"),
        ([[1], [10**20]], "text 1: token id 100000000000000000000 at index 0"),
        ([[-(10**20)]], "text 0"),
        ([[]], "text 0"),
        (["fine", "x" * 5000], "text 1"),
        ([], "input must be a text"),
        (["fine", 3], "input must be a text"),
    ):
        assert message in vector_server.refused("/v1/embeddings", {"input": input_})["message"]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embed"])
def test_too_many_dimensions_are_the_parameter_at_fault(
    vector_server: Running, vector_model: Model, path: str
) -> None:
    width = vector_model.engine.head.width
    body = {"input" if path.startswith("/v1") else "inputs": "a", "dimensions": width + 1}
    error = vector_server.refused(path, body)
    assert error["param"] == "dimensions"
    assert error["message"] == f"dimensions must be between 1 and {width}, got {width + 1}"


def test_truncated_texts_are_counted(vector_server: Running, vector_model: Model) -> None:
    long, ids = "a b " * 2000, [1, 2] * 2000
    body = {"input": [long, "a"], "truncate": "end"}
    answer = vector_server.answer("/v1/embeddings", body)
    with pytest.warns(UserWarning, match="1 of 2 texts"):
        expected = vector_model.embed([long, "a"], truncate="end")
    np.testing.assert_array_equal(np.array([d["embedding"] for d in answer["data"]], np.float32), expected)
    assert answer["usage"]["truncated_texts"] == 1
    answer = vector_server.answer("/v1/embeddings", {"input": [ids, [1, 2]], "truncate": "end"})
    assert answer["usage"]["prompt_tokens"] == vector_model.max_context + 2
    assert answer["usage"]["truncated_texts"] == 1
    answer = vector_server.answer("/v1/embeddings", {**body, "input": "a"})
    assert answer["usage"]["truncated_texts"] == 0
    assert vector_server.refused("/v1/embeddings", {**body, "truncate": "start"})["param"] == "truncate"


def test_texts_without_tokens_have_zero_vectors_and_are_counted(
    vector_server: Running, vector_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame = vector_model.tokenizer.frame._replace(end=())  # which would be the only token
    monkeypatch.setattr(vector_model.tokenizer, "frame", frame)
    answer = vector_server.answer("/v1/embeddings", {"input": ["a", "", "b"]})
    found = np.array([d["embedding"] for d in answer["data"]], np.float32)
    assert not found[1].any()
    np.testing.assert_array_equal(found[[0, 2]], vector_model.embed(["a", "b"]))
    assert answer["usage"]["empty_texts"] == 1


QUERY = "what is a page?"
DOCUMENTS = ["a leaf of a book", "64 positions of K and V", "a young attendant"]


def test_vectors_of_a_ranker_are_an_error_that_names_no_option(ranker: Running) -> None:
    error = ranker.refused("/v1/embeddings", {"model": "ranks", "input": "a"})
    assert error["message"].endswith("use `rerank`, or `classify`")


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_requests_of_jina_and_cohere_are_supported(ranker: Running, version: str) -> None:
    # As https://api.jina.ai/v1/rerank takes it: documents are texts or objects with one. Cohere's ClientV2
    # reads `id`, `results` and `meta`.
    documents = [DOCUMENTS[0], {"text": DOCUMENTS[1]}, DOCUMENTS[2]]
    body = {"model": "ranks", "query": QUERY, "documents": documents, "top_n": 2, "return_documents": True}
    answer = ranker.answer(f"/{version}/rerank", body)
    expected = ranker.model.rerank(QUERY, DOCUMENTS, top_n=2)
    assert [(r["index"], r["relevance_score"]) for r in answer["results"]] == of(expected)
    assert [r["document"]["text"] for r in answer["results"]] == [item.document for item in expected]
    assert answer["usage"]["total_tokens"] > 0
    assert {"id", "meta"} <= answer.keys()
    error = ranker.refused(f"/{version}/rerank", {**body, "documents": ["a", {"title": "b"}]})
    assert error["param"] == "documents[1]"


def test_fields_of_cohere_requests_have_their_effect(ranker: Running) -> None:
    model = ranker.model
    long = [f"{document}, {'and so on ' * 20}" for document in DOCUMENTS]
    # As langchain-cohere and Cohere's first client send them.
    unset = {"max_tokens_per_doc": None, "max_chunks_per_doc": None, "rank_fields": None, "priority": 0}

    def ranked(documents: Any, **fields: Any) -> list[tuple[int, float]]:
        return ranks(ranker, "/rerank", query=QUERY, documents=documents, **{**unset, **fields})

    def expected(documents: list[str]) -> list[tuple[int, float]]:
        return of(model.rerank(QUERY, documents))

    assert ranked(long) == expected(long)
    first = [model.tokenizer.decode(model.tokenizer.encode(text, add_bos=False)[:5]) for text in long]
    assert ranked(long, max_tokens_per_doc=5) == expected(first)
    assert ranked(long, max_tokens_per_doc=4000) == expected(long)
    rows = [{"title": text, "body": text[::-1], "year": 3} for text in DOCUMENTS]
    assert ranked(rows, rank_fields=["title"]) == expected(DOCUMENTS)
    lines = [f"body: {text[::-1]}\ntitle: {text}" for text in DOCUMENTS]
    assert ranked(rows, rank_fields=["body", "title", "other"]) == expected(lines)
    for fields in ({"rank_fields": ["year"]}, {"rank_fields": ["other"]}, {}):
        error = ranker.refused("/rerank", {"query": QUERY, "documents": rows, **fields})
        assert error["param"] == "documents[0]"
    error = ranker.refused("/rerank", {"query": QUERY, "documents": DOCUMENTS, "max_chunks_per_doc": 3})
    assert error["param"] == "max_chunks_per_doc"


def test_truncated_documents_are_counted(ranker: Running) -> None:
    documents = ["a", "a b " * 2000]
    body: dict[str, Any] = {"query": QUERY, "documents": documents, "truncate": "end", "unicode": "NFC"}
    with pytest.warns(UserWarning, match="1 of 2 documents"):
        assert ranks(ranker, **body) == of(ranker.model.rerank(QUERY, documents, truncate="end"))
    assert ranker.answer("/v1/rerank", body)["usage"]["truncated_texts"] == 1
    assert ranker.post("/v1/rerank", {**body, "truncate": None}).status_code == 400


def test_a_model_that_cannot_rerank_is_an_error(server: Running) -> None:
    error = server.refused("/v1/rerank", {"query": "a", "documents": ["b"]})
    assert "demo does not support reranking" in error["message"]


@pytest.fixture(scope="module")
def pair_ranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Serve a cross-encoder."""
    folder = tmp_path_factory.mktemp("pairs")
    path = convert(task_folders.RANKERS["bert"](folder / "folder").write(), folder / "pairs.gguf")
    with serving(path) as server:
        yield server


def test_a_server_has_the_name_of_its_folder(tmp_path: Path) -> None:
    """The folder of a repository in the Hub's cache is a commit; the server has its name and prompts."""
    snapshot = tmp_path / "models--intfloat--e5-small" / "snapshots" / "0123abcd"
    for folder, name in ((tmp_path / "my-e5-tuned", "my-e5-tuned"), (snapshot, "e5-small")):
        made = model_folders.bert(folder).pool().write()
        with Model(made, device="cpu") as model, running(model) as server:
            assert server.get("/v1/models").json()["data"][0]["id"] == name
            assert prompt_names(model) == ["document", "query"]
            body = {"input": "a", "model": name}
            before = server.answer("/v1/embeddings", body)["data"]
        (folder / "README.md").write_text("touched")
        (folder / "config.json").write_text((folder / "config.json").read_text() + " ")
        with serving(folder) as server:
            assert server.answer("/v1/embeddings", body)["data"] == before


def test_a_cross_encoder_ranks(pair_ranker: Running) -> None:
    assert ranks(pair_ranker, query=QUERY, documents=DOCUMENTS) == of(
        pair_ranker.model.rerank(QUERY, DOCUMENTS)
    )
    for extra, message in (
        ({"how": "late"}, "has a classification head"),
        ({"instruction": "a"}, "instruction is not supported"),
    ):
        error = pair_ranker.refused("/v1/rerank", {"query": QUERY, "documents": DOCUMENTS, **extra})
        assert message in error["message"]


def test_ids_of_another_tokenizer_are_noted_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = model_folders.bert(tmp_path / "m").pool().write()
    with Model(path, device="cpu") as model, running(model) as server:
        whole = model.tokenizer.frame.text(model.tokenizer.encode("a b", add_bos=False))
        for ids, count in ((whole, 0), (whole[1:], 1), (whole[:-1], 1), ([9], 1)):
            server.answer("/v1/embeddings", {"input": ids})
            assert caplog.text.count("token ids to embed lack the tokens around texts of m") == count


def test_tokens_of_an_encoder_are_those_of_its_vectors(tmp_path: Path) -> None:
    path = model_folders.bert(tmp_path / "m").pool().write()
    with Model(path, device="cpu") as model, running(model) as server:
        found = server.post("/tokenize", {"prompt": TEXTS[1]}).json()
        usage = server.post("/v1/embeddings", {"input": TEXTS[1]}).json()["usage"]
        assert found["count"] == len(found["tokens"]) == usage["prompt_tokens"]
        np.testing.assert_array_equal(vectors(server, input=found["tokens"]), model.embed(TEXTS[1:2]))
        plain = server.post("/tokenize", {"content": TEXTS[1], "add_special": False}).json()["tokens"]
        assert plain == model.tokenizer.encode(TEXTS[1], add_bos=False)


@pytest.mark.parametrize("raw", [True, False])
def test_text_embeddings_inference_ranks_texts(pair_ranker: Running, raw: bool) -> None:
    logits = pair_ranker.model.classify([(QUERY, document) for document in DOCUMENTS]).log_likelihoods[:, 0]
    expected = logits if raw else 1 / (1 + np.exp(-logits))
    body = {"query": QUERY, "texts": DOCUMENTS, "raw_scores": raw, "return_text": raw, "truncate": True}
    found = pair_ranker.answer("/rerank", body)
    assert [item["index"] for item in found] == np.argsort(-logits).tolist()
    np.testing.assert_allclose([item["score"] for item in found], np.sort(expected)[::-1], rtol=1e-6)
    assert [item.get("text") for item in found] == [DOCUMENTS[i["index"]] if raw else None for i in found]
    error = pair_ranker.refused("/rerank", {"query": QUERY})
    assert (error["param"], error["message"]) == ("documents", "you must provide documents")


def test_text_embeddings_inference_predicts_classes(tmp_path: Path) -> None:
    path = convert(task_folders.CLASSIFIERS["bert"](tmp_path / "folder").write(), tmp_path / "m.gguf")
    with Model(path, device="cpu") as model, running(model) as server:
        assert server.get("/v1/models").json()["data"][0]["tasks"] == ["classification"]
        for inputs, texts in (
            ("a b", ["a b"]),
            (["a", "b c"], [("a", "b c")]),
            ([["a"], ["b", "c"]], ["a", ("b", "c")]),
        ):
            expected = model.classify(texts)  # type: ignore[arg-type]
            for raw, values in ((True, expected.log_likelihoods), (False, expected.probabilities)):
                answer = server.answer("/predict", {"inputs": inputs, "raw_scores": raw})
                rows = [answer] if len(texts) == 1 else answer
                for row, scores in zip(rows, values, strict=True):
                    assert [item["label"] for item in row] == [
                        expected.labels[i] for i in np.argsort(-scores)
                    ]
                    found = [item["score"] for item in row]
                    np.testing.assert_allclose(found, np.sort(scores)[::-1], rtol=1e-5)
        error = server.refused("/predict", {"inputs": [["a", "b", "c"]]})
        assert error["message"] == "inputs[0] has 3 texts, must have one or two"
        error = server.refused("/predict", {"inputs": []})
        assert error["message"] == "inputs: expected `array` of length >= 1"


def test_text_requests_to_an_encoder_name_its_endpoints(pair_ranker: Running) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/completions", {"prompt": [5, 6], "echo": True, "logprobs": 1, "max_tokens": 0}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "stream": True}),
    ):
        error = pair_ranker.refused(path, body)
        assert error["code"] == "unsupported"
        assert "pairs does not generate text" in error["message"]
        assert "use `rerank` or `classify`" in error["message"]
    assert pair_ranker.get("/v1/models").json()["data"][0]["id"] == "pairs"


def test_late_interaction_is_served(tmp_path: Path) -> None:
    folder = task_folders.late_interaction(tmp_path / "folder").write()
    with Model(convert(folder, tmp_path / "late.gguf"), device="cpu") as model, running(model) as server:
        documents = ["a", "b c"]
        found = ranks(server, query="who?", documents=documents, how="late")
        assert found == of(model.rerank("who?", documents))
        body: dict[str, Any] = {"input": ["a b"], "instruction": "document", "dimensions": 4}
        expected = model.embed(["a b"], instruction="document", dimensions=4)[0]
        np.testing.assert_array_equal(vectors(server, **body)[0], expected)
        error = server.refused("/v1/embeddings", {**body, "encoding_format": "base64"})
        assert "a vector for each token" in error["message"]
