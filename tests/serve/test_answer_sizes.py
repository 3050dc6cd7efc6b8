"""Limits on the size of answers: on numbers, repeated texts, labels and log probabilities."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from support.servers.running_server import Running, events, running, serving
from support.small_models import CLASSIFIERS, EMBEDDERS, write

from metal_prefill import Model, serve
from metal_prefill.serve import _endpoint, _generation, _vectors
from metal_prefill.serve._chat import ChatChoice
from metal_prefill.serve._completions import CompletionChoice
from metal_prefill.serve._generation import MOST_ANSWER, MOST_ESCAPED, Choice
from metal_prefill.serve._service import MOST_SCORED, Service

PATHS = {  # a new one needs a limit on its answers
    *("/v1/completions", "/v1/chat/completions", "/v1/responses"),
    *("/v1/messages", "/v1/messages/count_tokens", "/tokenize", "/detokenize"),
    *("/v1/embeddings", "/embed", "/predict", "/rerank", "/v1/rerank", "/v2/rerank"),
}


def test_the_largest_answers_of_a_default_server_are_bounded(cpu_model: Model) -> None:
    app = serve.app(cpu_model)
    assert {route.path for route in app.routes if "POST" in route.methods} == PATHS  # type: ignore[attr-defined]
    service, settings = app.state.service, app.state.service.settings
    # Besides texts and tokens, an answer has fields: 256 bytes for each text, and 1 MiB in all.
    ranked = MOST_ESCAPED * settings.max_body + 256 * settings.max_inputs
    for largest in (ranked, len("1234567,") * service.most_text, 2 * MOST_ESCAPED * service.most_text):
        assert largest <= MOST_ANSWER + (1 << 20)


def test_a_number_and_a_byte_of_text_have_a_longest_form_in_json() -> None:
    numbers = np.random.default_rng(0).integers(0, 1 << 32, 100_000, np.uint32).view(np.float32)
    assert max(len(msgspec.json.encode(float(x))) for x in numbers[np.isfinite(numbers)]) < _vectors._NUMBER
    characters = [chr(i) for i in range(0x3000)]
    sizes = [(len(msgspec.json.encode(c)) - 2) / len(c.encode()) for c in characters]
    assert max(sizes) == MOST_ESCAPED


@pytest.fixture(scope="module")
def token_vectors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    path: Path = tmp_path_factory.mktemp("tokens") / "tokens.gguf"
    write(path, replace(EMBEDDERS["qwen3, last"], pooling="none"))
    with serving(path) as server:
        yield server


def test_too_many_numbers_are_refused_before_anything_is_computed(
    token_vectors: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["a text", "a longer text"]
    whole = token_vectors.model.embed(texts)
    count = sum(map(len, whole))
    for dimensions, width in ((None, whole[0].shape[1]), (8, 8)):
        body: dict[str, Any] = {"input": texts, "dimensions": dimensions}
        monkeypatch.setattr(_vectors, "MOST_NUMBERS", count * width)
        token_vectors.answer("/v1/embeddings", body)
        monkeypatch.setattr(_vectors, "MOST_NUMBERS", count * width - 1)
        with monkeypatch.context() as patched:
            patched.setattr(_vectors, "_compute", None)
            refused = token_vectors.refused("/v1/embeddings", body)
        message = f"input: {count} vectors of {width} numbers; an answer may have {count * width - 1} numbers"
        assert refused["message"] == message


@pytest.mark.parametrize("piece", [1, 3000, 1 << 30])
def test_vectors_are_sent_in_pieces(
    token_vectors: Running, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr(_endpoint, "_PIECE", piece)
    texts = ["a text", "a longer text"]
    answer = token_vectors.post("/v1/embeddings", {"input": texts})
    assert ("content-length" in answer.headers) == (piece == 1 << 30)
    found = answer.json()
    assert [item["index"] for item in found["data"]] == [0, 1]
    assert found["usage"]["prompt_tokens"] == sum(map(len, token_vectors.model.embed(texts)))
    for item, expected in zip(found["data"], token_vectors.model.embed(texts), strict=True):
        np.testing.assert_array_equal(np.array(item["embedding"], np.float32), expected)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [200] * 100, "n": 2, "echo": True, "max_tokens": 1}),
        ("/detokenize", {"tokens": [300] * 60}),  # of two characters
        ("/tokenize", {"messages": [{"role": "user", "content": "a" * 60}] * 2}),
    ],
)
def test_repeated_texts_are_bounded(
    server: Running, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    server.answer(path, body)
    monkeypatch.setattr("metal_prefill.serve._completions.MOST_ECHOED", 199)
    monkeypatch.setattr(Service, "most_text", 99)
    assert server.refused(path, body)["code"] in ("text_too_long", "answer_too_large")


def test_too_many_labels_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "classes.gguf", CLASSIFIERS["qwen3, three classes"])
    body = {"inputs": [["a"], ["b"]]}
    with serving(path) as server:
        answer = server.post("/predict", body)
        assert answer.status_code == 200
        monkeypatch.setattr(_vectors, "MOST_ANSWER", len(answer.content))
        assert server.refused("/predict", body)["message"].startswith("inputs: 2 texts with 3 labels each")


BODY = {"prompt": "ROMEO:\n", "max_tokens": 4, "temperature": 0}
SCORED = {"max_tokens": 0, "echo": True}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}


def test_those_of_prompts_and_answers_are_limited_in_one_request(
    cpu_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = _generation.MOST_SCORES // 21
    prompts = [[1] * (most // 100 + 1)] * 100  # the first token of each has none
    n = most // 1000 + 1
    answers = {"max_tokens": 1000, "n": n}
    with running(cpu_model) as server:
        for path, body, count in (
            (
                "/v1/completions",
                {**SCORED, "prompt": [*prompts, [1] * 100], "logprobs": 20},
                100 * (most // 100) + 99,
            ),
            ("/v1/completions", {**BODY, **answers, "logprobs": 20}, 1000 * n),
            ("/v1/chat/completions", {**CHAT, **answers, "logprobs": True, "top_logprobs": 20}, 1000 * n),
        ):
            for stream in (False, True):
                assert server.refused(path, {**body, "stream": stream}) == {
                    "message": f"logprobs: up to {21 * count} log probabilities of prompts and answers; "
                    f"the limit is {1 << 20}",
                    "type": "invalid_request_error",
                    "param": "logprobs",
                    "code": "too_many_logprobs",
                }
        assert b"metal_prefill_passes_total 0.0" in server.get("/metrics").content
        monkeypatch.setattr(_generation, "MOST_SCORES", 3 * 2 * 4)
        for count, status in ((2, 200), (3, 400)):
            body = {**SCORED, "logprobs": 3, "prompt": [[1, 2, 3, 4]] * count}
            assert server.post("/v1/completions", body).status_code == status


def test_the_context_limits_the_number_of_an_answer(
    server: Running, monkeypatch: pytest.MonkeyPatch, cpu_model: Model
) -> None:
    length = cpu_model.max_context - 4
    body = {"prompt": [1] * length, "max_tokens": 1 << 20, "logprobs": 1, "temperature": 0}
    monkeypatch.setattr(_generation, "MOST_SCORES", 2 * 5)  # four fit the context, and one needs no room
    (choice,) = server.answer("/v1/completions", body)["choices"]
    assert len(choice["logprobs"]["tokens"]) == 5
    monkeypatch.setattr(_generation, "MOST_SCORES", 2 * 5 - 1)
    assert server.post("/v1/completions", body).status_code == 400
    scored = {**body, "echo": True, "max_tokens": 1}
    # All but the first of the prompt, and one more.
    monkeypatch.setattr(_generation, "MOST_SCORES", 2 * length)
    server.answer("/v1/completions", scored)
    monkeypatch.setattr(_generation, "MOST_SCORES", 2 * length - 1)
    assert server.post("/v1/completions", scored).status_code == 400


def test_an_answer_without_max_tokens_ends_at_the_limit(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_generation, "MOST_SCORES", 3 * 4 * 2 + 7)
    body = {**CHAT, "n": 2, "logprobs": True, "top_logprobs": 3, "min_tokens": 100}
    for choice in server.answer("/v1/chat/completions", body)["choices"]:
        assert len(choice["logprobs"]["content"]) == 3
        assert choice["finish_reason"] == "length"
    assert server.post("/v1/chat/completions", {**body, "max_tokens": 4}).status_code == 400


def test_an_answer_ends_if_it_has_most_of_too_many_bytes(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = server.service.scores
    monkeypatch.setattr(held, "_most", 20_000)
    body = {**BODY, "logprobs": 5, "max_tokens": 400, "seed": 1, "temperature": 1}
    ended = server.post("/v1/completions", body)
    assert (ended.status_code, ended.headers["retry-after"]) == (503, "1")
    assert "log probabilities of requests in flight exceed 20000 bytes" in ended.text
    assert held.size == 0
    with held.holding(19_900):  # another request has more
        server.answer("/v1/completions", {**body, "max_tokens": 20})
    assert held.size == 0


@pytest.mark.parametrize("stream", [False, True])
def test_requests_that_want_some_are_refused_while_others_hold_many(
    server: Running, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    held = server.service.scores
    chat = {**CHAT, "max_tokens": 2, "stream": stream}
    with held.holding(MOST_SCORED + 1):
        for path, body in (
            ("/v1/completions", {**BODY, "logprobs": 0, "stream": stream}),
            ("/v1/chat/completions", {**chat, "logprobs": True}),
        ):
            refused = server.post(path, body)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert f"log probabilities of requests in flight exceed {MOST_SCORED} bytes" in refused.text
        server.answer("/v1/completions", BODY)
        assert server.post("/v1/chat/completions", chat).status_code == 200
    server.answer("/v1/completions", {**BODY, "logprobs": 0})
    assert held.size == 0


def test_they_are_kept_as_json_until_the_answer(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    held = server.service.scores
    sizes: list[int] = []

    def noted(kind: type[Any]) -> None:
        whole = kind.whole

        def counted(choice: Choice) -> dict[str, Any]:
            assert not any(piece.top_logprobs for piece in choice.pieces)
            sizes.append(held.size)
            return whole(choice)

        monkeypatch.setattr(kind, "whole", counted)

    noted(CompletionChoice)
    noted(ChatChoice)
    answer = server.post("/v1/completions", {**BODY, **SCORED, "prompt": [[1, 2, 3]], "logprobs": 4})
    (choice,) = answer.json()["choices"]
    assert len(choice["logprobs"]["top_logprobs"][2]) == 4
    chat = {**CHAT, "max_tokens": 3, "logprobs": True}
    answer = server.post("/v1/chat/completions", {**chat, "top_logprobs": 5})
    (choice,) = answer.json()["choices"]
    assert len(choice["logprobs"]["content"][0]["top_logprobs"]) == 5
    assert all(size > 100 for size in sizes)
    assert len(sizes) == 2
    pieces = events(server.post("/v1/completions", {**BODY, "logprobs": 2, "stream": True}))
    assert [len(best) for piece in pieces for best in piece["choices"][0]["logprobs"]["top_logprobs"]]
    assert held.size == 0
