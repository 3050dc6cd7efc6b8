"""Clients that disconnect, stall or send invalid requests get an error, and do not affect others."""

from collections.abc import Iterator

import openai
import pytest
from support.servers.running_server import POST, Gate, Running, read_all, request_bytes, running, wait_until

from metal_prefill import Model

BODY = {"prompt": "ROMEO:\n", "max_tokens": 6, "temperature": 0}
LONG = {"prompt": "JULIET:\n", "max_tokens": 1000, "temperature": 1, "seed": 1, "stream": True}


@pytest.fixture(scope="module")
def strict(cpu_model: Model) -> Iterator[Running]:
    """Serve with small limits."""
    with running(cpu_model, max_body=20_000, body_seconds=0.3, max_texts=4) as server:
        yield server


@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnected_client_releases_its_pages_within_a_pass(cpu_model: Model, stream: bool) -> None:
    with running(cpu_model) as server:
        gate = Gate(server.service)
        client = server.connect()
        client.sendall(request_bytes({**LONG, "stream": stream}))
        assert gate.reached.wait(60)
        assert gate.scheduler.streams == 1
        client.close()
        wait_until(lambda: server.service._texts == 0)  # the server has noticed; the pass is not over
        passes = gate.scheduler.passes
        gate.open()
        wait_until(lambda: not server.service.loop._running)
        assert gate.scheduler.streams == 0
        assert gate.scheduler.passes <= passes + 1
        stats = cpu_model.stats()
        assert stats["kv_pool_bytes"] == stats["prefix_bytes"]


def test_half_a_body_ends_with_408(strict: Running) -> None:
    assert strict.exchange(request_bytes(BODY, length=5000)).startswith(b"HTTP/1.1 408 ")


def test_an_oversized_body_is_rejected_before_it_is_read(strict: Running) -> None:
    answer = strict.exchange(request_bytes(BODY, length=1 << 30))
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"more than 20000 bytes" in answer
    with strict.connect() as connection:  # one without a declared length
        connection.sendall(POST + b"transfer-encoding: chunked\r\n\r\n")
        for _ in range(3):
            connection.sendall(b"2000\r\n" + b" " * 0x2000 + b"\r\n")
        assert read_all(connection).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b'{"prompt": "\xff"}', "not JSON"),
        (b'{"prompt": "a", "metadata": {"a": ' + b"[" * 15_000, "not JSON"),
        (b"[]", "expected `object`, got `array`"),
        (b'{"max_tokens": 3}', "you must provide prompt"),
        (b'{"prompt": "a", "max_tokens": "3"}', "max_tokens: expected `int"),
        (b'{"prompt": "a", "max_tokens": -1}', "max_tokens: expected `int` >= 0"),
        (b'{"prompt": "a", "temperature": NaN}', "not JSON"),
        (b'{"prompt": "a", "temprature": 1}', "Unrecognized request argument supplied: temprature"),
        (b'{"prompt": "a", "seed": 1' + b"0" * 5000 + b"}", "seed"),
        (b'{"prompt": "a", "logit_bias": {"5": 101}}', "logit_bias"),
        (b'{"prompt": "a", "logit_bias": {"5000": 1}}', "token id 5000"),
        (b'{"prompt": "a", "stop": ""}', "a stop string is empty"),
        (
            b'{"prompt": "a", "stop": "' + b"#" * 1001 + b'"}',
            "stop: a stop string of 1001 characters; the limit is 1000",
        ),
        (
            b'{"prompt": "a", "stop": ["b", "' + b"#" * 1001 + b'"]}',
            "stop[1]: a stop string of 1001 characters; the limit is 1000",
        ),
        (b'{"prompt": "a", "stop": [' + b'"b", ' * 16 + b'"b"]}', "stop: 17 stop strings; the limit is 16"),
        (b'{"prompt": [], "max_tokens": 1}', "prompt must be a text"),
        (b'{"prompt": "a", "n": 3, "best_of": 2}', "best_of must be at least n, which is 3; got 2"),
        (
            b'{"prompt": "a", "best_of": 3, "stream": true}',
            "best_of must be n, which is 1, in a stream; got 3",
        ),
        (b'{"prompt": "a", "best_of": 5}', "5 texts; the limit is 4"),
        (b'{"prompt": "a", "regex": "("}', "regex"),
        (b'{"prompt": "a", "regex": "a", "grammar": "b"}', "one constraint"),
        (b'{"prompt": "a", "n": 5}', "5 texts; the limit is 4"),
        (b'{"prompt": "\\ud800"}', ""),
    ],
)
def test_invalid_requests_are_reported(strict: Running, body: bytes, message: str) -> None:
    error = strict.refused("/v1/completions", body)
    assert message in error["message"]
    assert error["type"] == "invalid_request_error"


def test_the_openai_client_raises_its_own_errors(server: Running) -> None:
    client = server.client()
    with pytest.raises(
        openai.NotFoundError, match="The model 'gpt-4' does not exist; this server has 'demo'"
    ):
        client.completions.create(model="gpt-4", prompt="a")
    with pytest.raises(openai.NotFoundError, match="there is no path /v1/nothing"):
        client.get("/nothing", cast_to=object)
    with pytest.raises(openai.APIStatusError, match="/v1/completions takes POST, not GET") as wrong_method:
        client.get("/completions", cast_to=object)
    assert wrong_method.value.response.headers["allow"] == "POST"
