"""Requests that a browser sends for a page of another site."""

import socket
from typing import Any

import httpx
import pytest
from support.running_server import LOCAL, Running, running

from metal_prefill import Model, serve

BODY = {"prompt": "ROMEO:\n", "max_tokens": 1}
APP = "https://app.example.com"


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
def test_a_host_is_an_address_or_a_name_of_the_server(cpu_model: Model, host: str, status: int) -> None:
    with running(cpu_model, allowed_hosts=["Models.example.com"]) as server:
        assert statuses(server, {"host": host}) == {status}


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
def test_an_origin_is_that_of_the_server_or_allowed(cpu_model: Model, origin: str, status: int) -> None:
    with running(cpu_model, cors_origins=[APP.upper()]) as server:
        assert statuses(server, {"origin": origin.format(host=f"127.0.0.1:{server.port}")}) == {status}


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


@pytest.mark.parametrize("origin", ["example.com", "https://example.com/", "https://a b", "", "https://"])
def test_an_invalid_origin_of_the_settings_is_named(cpu_model: Model, origin: str) -> None:
    limits: dict[str, Any] = {"cors_origins": [origin]}
    with pytest.raises(ValueError, match="an origin must be"):
        serve.app(cpu_model, **limits)
