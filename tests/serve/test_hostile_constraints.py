"""Constraints that try to stall a server, next to other requests, whose answers stay the same."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from support.hostile_constraints import PLAIN, hostile_requests
from support.servers.running_server import Running, running

from metal_prefill import Model
from metal_prefill.generation import _constraint
from metal_prefill.generation._constraint import _Compiled
from metal_prefill.serve import _service

pytest.importorskip("llguidance", reason="needs the extra guide")

CONSTRAINED = {**PLAIN, "regex": "[A-Z]{4} [a-z]{6}"}


def text(server: Running, body: dict[str, Any]) -> str:
    return str(server.answer("/v1/completions", body)["choices"][0]["text"])


def test_answers_next_to_hostile_constraints_are_the_same_as_alone(cpu_model: Model) -> None:
    hostile = hostile_requests(cpu_model)
    with running(cpu_model, max_streams=16) as server, ThreadPoolExecutor(len(hostile)) as threads:

        def post(body: dict[str, Any]) -> httpx.Response:
            answer = server.post("/v1/completions", body)
            while answer.status_code == 503:  # on a busy machine, a worker may answer too late
                assert answer.json()["error"]["code"] == "no_constraint_worker"
                answer = server.post("/v1/completions", body)
            return answer

        expected = [text(server, body) for body in (PLAIN, CONSTRAINED)]
        answers = threads.map(post, hostile)
        found = [[text(server, body) for body in (PLAIN, CONSTRAINED)] for _ in range(4)]
        assert found == [expected] * 4
        refused = list(answers)
        assert {answer.status_code for answer in refused} <= {200, 400}
        messages = [answer.json()["error"]["message"] for answer in refused if answer.status_code == 400]
        assert sum("matching it takes more than 0.25 s" in message for message in messages) == 2
        assert sum("MiB of stack" in message for message in messages) == 1
        assert [text(server, body) for body in (PLAIN, CONSTRAINED)] == expected


def chat(**options: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, **options}


SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "null"}}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a", "max_tokens": 2, "regex": "ab"}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 2, "grammar": 'start: "ab"'}),
        ("/v1/chat/completions", chat(regex="ab")),
        ("/v1/chat/completions", chat(grammar='start: "ab"')),
        ("/v1/chat/completions", chat(response_format=SCHEMA)),
    ],
)
def test_only_unknown_constraints_wait_for_those_that_compile(
    cpu_model: Model, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    monkeypatch.setattr(_service, "PREPARERS", 1)
    monkeypatch.setattr(_service, "MOST_COMPILING", 1)
    _constraint._vocabulary(cpu_model.tokenizer)._known.clear()
    compiling, go_on = threading.Event(), threading.Event()

    def compile_slowly(*arguments: Any, **named: Any) -> Any:
        compiling.set()
        assert go_on.wait(60)
        return real(*arguments, **named)

    real = _Compiled._start
    with running(cpu_model) as server, ThreadPoolExecutor(3) as threads:
        known = text(server, CONSTRAINED)
        monkeypatch.setattr(_Compiled, "_start", compile_slowly)
        answers = [threads.submit(server.post, path, body) for _ in range(3)]
        assert compiling.wait(60)
        assert text(server, PLAIN)
        assert text(server, CONSTRAINED) == known
        server.answer("/v1/chat/completions", chat(response_format={"type": "text"}))
        assert not any(answer.done() for answer in answers)
        go_on.set()
    assert [answer.result().status_code for answer in answers] == [200] * 3
