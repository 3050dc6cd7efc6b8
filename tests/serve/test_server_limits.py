"""Limits of a server: its queue, time, memory; keys, names and origins."""

import math
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from support.servers.running_server import LOCAL, Gate, Running, events, running, wait_until
from support.small_models import EMBEDDERS, write

from metal_prefill import ChatTemplateError, DeviceError, Model, serve

BODY = {"prompt": "ROMEO:\n", "max_tokens": 4, "temperature": 0}


def test_a_full_queue_answers_429_until_there_is_room(cpu_model: Model) -> None:
    with running(cpu_model, max_streams=1, max_queue=1) as server, ThreadPoolExecutor(2) as threads:
        gate = Gate(server.service)
        waiting = [threads.submit(server.post, "/v1/completions", BODY)]
        assert gate.reached.wait(60)
        waiting.append(threads.submit(server.post, "/v1/completions", BODY))
        wait_until(lambda: server.service._texts == 2)
        refused = server.post("/v1/completions", BODY)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        error = refused.json()["error"]
        assert error["type"] == "rate_limit_error"
        assert error["message"] == "the queue is full: 1 texts wait, of 1 that may"
        gate.open()
        assert [answer.result().status_code for answer in waiting] == [200, 200]
        server.answer("/v1/completions", BODY)


def test_more_texts_than_the_queue_holds_are_rejected(cpu_model: Model) -> None:
    with running(cpu_model, max_streams=2, max_queue=1) as server:
        refused = server.refused("/v1/completions", {**BODY, "n": 4})
        assert "4 texts are wanted; this server takes 3 at a time" in refused["message"]
        server.answer("/v1/completions", {**BODY, "n": 3})


def test_the_texts_of_a_request_are_limited(cpu_model: Model) -> None:
    with running(cpu_model, max_texts=4) as server:
        for param in ("n", "best_of"):
            refused = server.refused("/v1/completions", {**BODY, param: 5})
            assert (refused["param"], refused["code"]) == (param, "too_many_texts")
            assert refused["message"] == "the request asks for 5 texts; the limit is 4"
            server.answer("/v1/completions", {**BODY, param: 4})


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_ends_at_the_time_limit(cpu_model: Model, stream: bool) -> None:
    with running(cpu_model, max_seconds=0.3) as server:
        gate = Gate(server.service)
        answer = server.post("/v1/completions", {**BODY, "stream": stream})
        if stream:  # it has begun: the first tokens were sent before the engine loop stopped
            assert answer.status_code == 200
            error = events(answer)[-1]["error"]
        else:
            assert (answer.status_code, answer.headers["x-should-retry"]) == (504, "false")
            error = answer.json()["error"]
        assert (error["code"], error["message"]) == ("timeout", "the answer took longer than 0.3 s")
        assert server.service._texts == 0
        gate.open()


def test_a_prompt_that_does_not_fit_is_rejected_before_anything_is_computed(cpu_model: Model) -> None:
    """LiteLLM looks for the first words in lower case, LangChain for the code."""
    with running(cpu_model) as server:
        assert server.refused("/v1/completions", {"prompt": [1] * 1025}) == {
            "message": "This model's maximum context length is 1024 tokens. "
            "However, the prompt is too long: a prompt of 1025 tokens exceeds the context of 1024",
            "type": "invalid_request_error",
            "param": None,
            "code": "context_length_exceeded",
        }
        assert b"metal_prefill_passes_total 0.0" in server.get("/metrics").content


def test_a_prompt_that_exceeds_the_memory_is_rejected(tmp_path: Path) -> None:
    path = write(tmp_path / "small.gguf", EMBEDDERS["qwen3, last"])
    with Model(path, device="cpu", kv_memory=1, prefix_memory=0) as model, running(model) as server:
        for way, body in (
            ("/v1/completions", {"prompt": [1] * 200, "max_tokens": 4}),
            ("/v1/embeddings", {"input": [[1], [1] * 200]}),
            ("/v1/rerank", {"query": "a" * 200, "documents": ["b"], "how": "late"}),
        ):
            error = server.refused(way, body)
            assert error["code"] == "kv_memory_exceeded"
            assert "kv_memory of" in error["message"]
        assert b"metal_prefill_passes_total 0.0" in server.get("/metrics").content
        server.answer("/v1/completions", {"prompt": [1] * 30, "max_tokens": 4})


def test_vectors_without_memory_are_a_temporary_error(tmp_path: Path) -> None:
    path = write(tmp_path / "small.gguf", EMBEDDERS["llama, mean"])
    with Model(path, device="cpu", kv_memory=1, prefix_memory=0) as model, running(model) as server:
        with model.session() as session:
            session.forward_prompt([1] * 64)  # the whole memory
            refused = server.post("/v1/embeddings", {"input": "a"})
        assert refused.status_code == 503
        assert "retry-after" in refused.headers
        assert "kv_memory of" in refused.json()["error"]["message"]
        server.answer("/v1/embeddings", {"input": "a"})


def test_a_key_is_required(cpu_model: Model) -> None:
    with running(cpu_model, api_keys=["right", "also right", "schlüssel"]) as server:
        assert server.get("/health").json() == {"status": "ok"}
        assert server.get("/metrics").status_code == 401
        client = server.client(api_key="wrong")
        with pytest.raises(openai.AuthenticationError, match="Incorrect API key provided"):
            client.models.list()
        for key in ("right", "also right"):
            assert len(list(server.client(api_key=key).models.list())) == 1
        assert server.get("/v1/models/demo/health").status_code == 401
        assert server.get("/v1/models", headers={"authorization": "bearer right"}).status_code == 200
        for wrong in ("Basic right", "right", "Bearer", "Bearer rightly", "Bearer right also right"):
            assert server.get("/v1/models", headers={"authorization": wrong}).status_code == 401
        for encoding, status in (("utf-8", 200), ("latin-1", 401)):
            encoded = {b"authorization": "Bearer schlüssel".encode(encoding)}
            assert server.get("/v1/models", headers=encoded).status_code == status
        for key, status in (("right", 200), ("wrong", 401)):  # as Anthropic's client sends it
            assert server.get("/v1/models", headers={"x-api-key": key}).status_code == status
        assert server.refused("/v1/completions", BODY, 401)["code"] == "invalid_api_key"


APP = "https://app.example.com"


@pytest.fixture(scope="module")
def guarded(cpu_model: Model) -> Iterator[Running]:
    """Serve hosts and origins of which a few are named."""
    with running(cpu_model, allowed_hosts=["Models.example.com"], cors_origins=[APP.upper()]) as server:
        yield server


def statuses(server: Running, headers: dict[str, str]) -> set[int]:
    answers = [server.get(path, headers=headers) for path in ("/", "/health", "/activity")]
    return {a.status_code for a in [*answers, server.post("/v1/completions", BODY, headers=headers)]}


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:9", 200),
        ("192.0.2.7", 200),
        ("[::1]:80", 200),
        ("LocalHost:8080", 200),
        ("localhost.", 200),
        ("demo.localhost", 200),
        (socket.gethostname(), 200),
        ("models.example.com:443", 200),
        ("example.com", 403),
        ("127.0.0.1.example.com", 403),
        ("localhost.example.com", 403),
        ("notlocalhost", 403),
        ("[::1", 403),
        ("", 403),
    ],
)
def test_a_host_is_an_address_or_a_name_of_the_server(guarded: Running, host: str, status: int) -> None:
    assert statuses(guarded, {"host": host}) == {status}


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://{host}", 200),
        ("https://{host}", 200),  # a proxy has ended TLS
        (APP, 200),
        (APP.title(), 200),
        ("http://localhost", 403),
        ("http://127.0.0.1:1", 403),
        ("null", 403),
        ("http://app.example.com", 403),
        ("", 403),
    ],
)
def test_an_origin_is_that_of_the_server_or_allowed(guarded: Running, origin: str, status: int) -> None:
    assert statuses(guarded, {"origin": origin.format(host=f"127.0.0.1:{guarded.port}")}) == {status}


def test_all_hosts_and_origins_may_be_allowed(cpu_model: Model) -> None:
    with running(cpu_model, cors_origins=["*"], allowed_hosts=["*"]) as server:
        assert statuses(server, {"host": "example.com", "origin": "null"}) == {200}


def test_pages_of_allowed_origins_may_send_requests_with_a_key(cpu_model: Model) -> None:
    asked = {
        "origin": APP,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }

    def preflight(server: Running, **headers: str) -> httpx.Response:
        url = f"{server.url}/v1/completions"
        return httpx.options(url, headers={**asked, **headers}, timeout=60, **LOCAL)

    with running(cpu_model, cors_origins=[APP], api_keys=["key"]) as server:
        answer = preflight(server)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == APP
        assert "authorization" in answer.headers["access-control-allow-headers"]
        assert preflight(server, origin="https://other.example.com").status_code == 403
        key = {"authorization": "Bearer key", "origin": APP}
        answer = server.post("/v1/completions", BODY, headers=key)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, APP)
        refused = server.post("/v1/completions", BODY, headers={"origin": APP})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, APP)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": "application/json; charset=utf-8"}, 200),
        ({"content-type": "Application/JSON"}, 200),
        ({"content-type": "application/vnd.api+json"}, 200),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({"content-type": "text/plain;application/json"}, 415),
        ({"content-type": ""}, 415),
        ({"content-encoding": "gzip"}, 415),
        ({"content-encoding": "Identity"}, 200),
    ],
)
def test_a_body_is_plain_json(server: Running, headers: dict[str, str], status: int) -> None:
    answer = server.post("/v1/completions", BODY, headers=headers)
    assert answer.status_code == status
    if status == 415:
        error = answer.json()["error"]
        (name, value), *_ = headers.items()
        assert error["message"].lower().startswith(f"the {name} ")
        assert value.partition(";")[0] in error["message"]


def test_file_names_may_be_invalid_utf_8(
    demo_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*messages: Any, **options: Any) -> None:
        raise ChatTemplateError(f"{path} has no template")

    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/a\xff.gguf"))
    path.symlink_to(demo_path)
    with Model(path, device="cpu") as model, running(model) as server:
        assert [m["id"] for m in server.get("/v1/models").json()["data"]] == ["a\ufffd"]
        answer = server.post("/v1/completions", {**BODY, "model": "a\ufffd"})
        assert answer.json()["model"] == "a\ufffd"
        monkeypatch.setattr(model.tokenizer, "chat_pieces", refuse)
        refused = server.refused("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]})
        assert refused["message"].endswith("a\\udcff.gguf has no template")


def test_metrics_count_completed_work(cpu_model: Model) -> None:
    with running(cpu_model) as server:
        for _ in range(2):
            server.post("/v1/completions", {**BODY, "prompt": [1] * 130})

        def metrics() -> dict[str, float]:
            lines = (line for line in server.get("/metrics").text.splitlines() if line[0] != "#")
            return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

        # A pass is counted after its tokens were sent.
        wait_until(lambda: metrics()["metal_prefill_batch_texts_sum"] >= 2)
        values = metrics()
        assert values["metal_prefill_prompt_tokens_total"] == 260
        assert values["metal_prefill_generated_tokens_total"] == 8
        cached = values["metal_prefill_cached_tokens_total"]
        assert 128 <= cached < 260
        assert values["metal_prefill_prefill_tokens_total"] == 260 - cached
        assert values["metal_prefill_first_token_seconds_count"] == 2
        assert values['metal_prefill_requests_total{path="/v1/completions",status="200"}'] == 2
        assert values["metal_prefill_prefix_bytes"] > 0


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_streams": 0}, "max_streams must be at least 1"),
        ({"max_queue": -1}, "max_queue must not be negative"),
        ({"max_seconds": 0}, "max_seconds must be positive"),
        ({"send_seconds": math.inf}, "send_seconds must be positive and finite"),
        ({"api_keys": [""]}, "an API key is empty"),
        ({"api_keys": ["\udcff"]}, "an API key is not UTF-8"),
        ({"names": ["\udcff"]}, r"a name of the model must be UTF-8, got '\\udcff'"),
        ({"api_keys": "key"}, "api_keys must be a collection"),
        *(
            ({"cors_origins": [origin]}, "an origin must be")
            for origin in ("example.com", "https://example.com/", "https://a b", "", "https://")
        ),
    ],
)
def test_invalid_limits_are_rejected(limits: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        serve.Settings(**limits)


@pytest.mark.parametrize(
    ("error", "message", "status"),
    [(DeviceError, "out of memory", 503), (MemoryError, "", 503), (RuntimeError, "a defect", 500)],
)
def test_a_lack_of_memory_is_a_temporary_error(
    cpu_model: Model, monkeypatch: pytest.MonkeyPatch, error: type[Exception], message: str, status: int
) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise error(message)

    monkeypatch.setattr(cpu_model.tokenizer, "encode", fail)
    with running(cpu_model) as server:
        answer = server.post("/v1/completions", BODY)
    assert answer.status_code == status
    assert ("retry-after" in answer.headers) == (status == 503)
