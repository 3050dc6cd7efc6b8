"""``metal-prefill serve``: a process with a port, until a signal."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient
from support.programs import serving
from support.servers.running_server import LOCAL

from metal_prefill import cli
from metal_prefill.serve._connections import Server
from metal_prefill.serve._endpoint import CLOSING_SECONDS

SERVE = [sys.executable, "-m", "metal_prefill", "serve", "--port", "0"]


def test_sigterm_lets_answers_in_flight_finish(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("\ufefffirst key\n# second\nsecond-key\n", encoding="utf-8")
    with serving([*SERVE, "--api-key-file", keys, "--alias", "bard"]) as (process, url):
        assert "<title>metal_prefill</title>" in httpx.get(f"{url}/", **LOCAL).text
        for key, status in (("first key", 200), ("# second", 401)):
            headers = {"authorization": f"Bearer {key}"}
            assert httpx.get(f"{url}/v1/models", headers=headers, **LOCAL).status_code == status
        body = json.dumps({"model": "bard", "prompt": "ROMEO:", "max_tokens": 300, "stream": True})
        # A client that is not Python's, for once.
        argv: list[str] = [
            *("curl", "-sSN", f"{url}/v1/completions", "-H", "authorization: Bearer second-key", "-H"),
            *("content-type: application/json", "-d"),
            body,
        ]
        environment = {**os.environ, "NO_PROXY": "127.0.0.1"}
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=environment) as curl:
            assert curl.stdout is not None
            assert curl.stdout.readline().startswith('data: {"id":"cmpl-')
            process.send_signal(signal.SIGTERM)
            rest = curl.stdout.read()
        assert curl.returncode == 0
        assert rest.endswith("data: [DONE]\n\n")
        assert process.wait(30) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health", **LOCAL)


def test_invalid_usage_is_reported(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    keys = tmp_path / "keys"
    for content, message in ((b"\n", "contains no API key"), (b"key\n\xff\n", "is not UTF-8 text: ")):
        keys.write_bytes(content)
        assert cli.main(["serve", "--api-key-file", str(keys)]) == cli.EXIT_USAGE
        assert f"error: {keys} {message}" in capfd.readouterr().err
    for options, code, message in (
        (["--api-key-file", f"{tmp_path}/none"], cli.EXIT_FAILED, f"{tmp_path}/none: No such file"),
        (["--port", "70000"], cli.EXIT_USAGE, "must be at most 65535, got 70000"),
        # An empty address does not mean every address.
        (["--host", "", "-m", "no such model"], cli.EXIT_USAGE, "--host: must not be empty"),
        (["--host", " ", "-m", "no such model"], cli.EXIT_USAGE, "--host: must not be empty"),
    ):
        assert cli.main(["serve", *options]) == code
        assert message in capfd.readouterr().err


def test_options_reach_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    def run(server: Any, sockets: Any) -> None:
        with TestClient(server.config.app, "http://localhost") as client:
            grace = server.config.timeout_graceful_shutdown - 2 * CLOSING_SECONDS
            found.append((client.get("/").status_code, grace))

    monkeypatch.setattr(Server, "run", run)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    for options in ([], ["--no-page", "--shutdown-grace", "7"]):
        assert cli.main(["serve", "--port", "0", *options]) == 0
    assert found == [(200, 30), (404, 7)]


def test_a_second_interrupt_ends_answers_at_once() -> None:
    with serving([*SERVE, "--shutdown-grace", "300"]) as (process, url):
        body = {"prompt": "ROMEO:", "max_tokens": 1000, "n": 100, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, **LOCAL, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGINT)
            with suppress(httpx.HTTPError):
                while True:  # until no connection is accepted
                    httpx.get(f"{url}/health", **LOCAL)
            process.send_signal(signal.SIGINT)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert process.wait(30) == cli.EXIT_INTERRUPTED
        assert process.stderr is not None
        assert process.stderr.read() == "interrupted\n"
