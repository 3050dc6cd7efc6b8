"""Limits on log probabilities: those of one request, and the memory of all."""

from typing import Any

import pytest
from support.running_server import Running, events, running

from metal_prefill import Model
from metal_prefill.serve import _limits
from metal_prefill.serve._chat import ChatChoice
from metal_prefill.serve._completions import CompletionChoice
from metal_prefill.serve._generation import Choice
from metal_prefill.serve._limits import MOST_SCORED

BODY = {"prompt": "ROMEO:\n", "max_tokens": 4, "temperature": 0}
SCORED = {"max_tokens": 0, "echo": True}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}


def test_those_of_prompts_are_limited_in_one_request(cpu_model: Model) -> None:
    most = _limits.MOST_SCORES // 21
    prompts = [[1] * (most // 100 + 1)] * 100  # the first token of each has none
    count = 21 * (100 * (most // 100) + 99)
    with running(cpu_model) as server:
        refused = server.post("/v1/completions", {**SCORED, "prompt": [*prompts, [1] * 100], "logprobs": 20})
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["param"]) == (400, "too_many_logprobs", "logprobs")
        assert error["message"] == (
            f"logprobs: up to {count} log probabilities of prompts and answers; the limit is {1 << 20}"
        )
        assert b"metal_prefill_passes_total 0.0" in server.get("/metrics").content


def test_a_request_may_have_as_many_as_the_limit(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_limits, "MOST_SCORES", 3 * 2 * 4)
    body = {**SCORED, "logprobs": 3}
    assert server.post("/v1/completions", {**body, "prompt": [[1, 2, 3, 4]] * 2}).status_code == 200
    assert server.post("/v1/completions", {**body, "prompt": [[1, 2, 3, 4]] * 3}).status_code == 400


@pytest.mark.parametrize("stream", [False, True])
def test_those_of_answers_are_limited_in_one_request(server: Running, stream: bool) -> None:
    n = (1 << 20) // (21 * 1000)
    asked = {"max_tokens": 1000, "n": n + 1, "stream": stream}
    count = 21 * 1000 * (n + 1)
    for path, body in (
        ("/v1/completions", {**BODY, **asked, "logprobs": 20}),
        ("/v1/chat/completions", {**CHAT, **asked, "logprobs": True, "top_logprobs": 20}),
    ):
        refused = server.post(path, body)
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["param"]) == (400, "too_many_logprobs", "logprobs")
        assert f"logprobs: up to {count} log probabilities" in error["message"]


def test_the_context_limits_the_number_of_an_answer(
    server: Running, monkeypatch: pytest.MonkeyPatch, cpu_model: Model
) -> None:
    length = cpu_model.max_context - 4
    body = {"prompt": [1] * length, "max_tokens": 1 << 20, "logprobs": 1, "temperature": 0}
    monkeypatch.setattr(_limits, "MOST_SCORES", 2 * 5)  # four fit the context, and one needs no room
    (choice,) = server.post("/v1/completions", body).json()["choices"]
    assert len(choice["logprobs"]["tokens"]) == 5
    monkeypatch.setattr(_limits, "MOST_SCORES", 2 * 5 - 1)
    assert server.post("/v1/completions", body).status_code == 400
    scored = {**body, "echo": True, "max_tokens": 1}
    monkeypatch.setattr(_limits, "MOST_SCORES", 2 * length)  # all but the first of the prompt, and one more
    assert server.post("/v1/completions", scored).status_code == 200
    monkeypatch.setattr(_limits, "MOST_SCORES", 2 * length - 1)
    assert server.post("/v1/completions", scored).status_code == 400


def test_an_answer_without_max_tokens_ends_at_the_limit(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_limits, "MOST_SCORES", 3 * 4 * 2 + 7)
    body = {**CHAT, "n": 2, "logprobs": True, "top_logprobs": 3, "min_tokens": 100}
    for choice in server.post("/v1/chat/completions", body).json()["choices"]:
        assert len(choice["logprobs"]["content"]) == 3
        assert choice["finish_reason"] == "length"
    assert server.post("/v1/chat/completions", {**body, "max_tokens": 4}).status_code == 400


def test_an_answer_ends_if_it_has_most_of_too_many_bytes(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = server.service.bodies.scores
    monkeypatch.setattr(held, "_most", 20_000)
    body = {**BODY, "logprobs": 5, "max_tokens": 400, "seed": 1, "temperature": 1}
    ended = server.post("/v1/completions", body)
    assert (ended.status_code, ended.headers["retry-after"]) == (503, "1")
    assert "log probabilities of requests in flight exceed 20000 bytes" in ended.text
    assert held.size == 0
    with held.holding(19_900):  # another request has more
        answer = server.post("/v1/completions", {**body, "max_tokens": 20})
        assert answer.status_code == 200
    assert held.size == 0


@pytest.mark.parametrize("stream", [False, True])
def test_requests_that_want_some_are_refused_while_others_hold_many(
    server: Running, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    held = server.service.bodies.scores
    chat = {**CHAT, "max_tokens": 2, "stream": stream}
    with held.holding(MOST_SCORED + 1):
        for path, body in (
            ("/v1/completions", {**BODY, "logprobs": 0, "stream": stream}),
            ("/v1/chat/completions", {**chat, "logprobs": True}),
        ):
            refused = server.post(path, body)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert f"log probabilities of requests in flight exceed {MOST_SCORED} bytes" in refused.text
        assert server.post("/v1/completions", BODY).status_code == 200
        assert server.post("/v1/chat/completions", chat).status_code == 200
    assert server.post("/v1/completions", {**BODY, "logprobs": 0}).status_code == 200
    assert held.size == 0


def test_they_are_kept_as_json_until_the_answer(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    held = server.service.bodies.scores
    sizes: list[int] = []

    def noted(kind: type[Any]) -> None:
        whole = kind.whole

        def counted(choice: Choice) -> dict[str, Any]:
            assert not any(piece.top_logprobs for piece in choice.pieces)
            sizes.append(held.size)
            return whole(choice)  # type: ignore[no-any-return]

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
    assert held.size == 0


def test_streams_keep_none(server: Running) -> None:
    body = {**BODY, "logprobs": 2, "stream": True}
    pieces = events(server.post("/v1/completions", body))
    assert [len(best) for piece in pieces for best in piece["choices"][0]["logprobs"]["top_logprobs"]]
    assert server.service.bodies.scores.size == 0
