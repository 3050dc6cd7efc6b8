"""``metal-prefill serve``: a process with a port, until a signal."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from support.running_server import LOCAL

from metal_prefill import cli


@contextmanager
def command(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run the command at a free port; return the process and its address."""
    argv = [sys.executable, "-m", "metal_prefill.cli", "serve", "--port", "0", *arguments]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            found = re.search(r"at (http://\S+)/v1$", line)
            assert found, line + process.stderr.read()
            yield process, found[1]
        finally:
            process.kill()


def test_sigterm_lets_answers_in_flight_finish(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("\ufefffirst key\n# second\nsecond-key\n", encoding="utf-8")
    with command("--api-key-file", str(keys), "--alias", "bard") as (process, url):
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
    import socket

    keys = tmp_path / "keys"
    keys.write_text("\n")
    assert cli.main(["serve", "--api-key-file", str(keys)]) == cli.EXIT_USAGE
    assert cli.main(["serve", "--api-key-file", str(tmp_path / "none")]) == cli.EXIT_FAILED
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert cli.main(["serve", "--port", str(taken.getsockname()[1])]) == cli.EXIT_FAILED
    assert cli.main(["serve", "--port", "70000"]) == cli.EXIT_USAGE
    errors = capfd.readouterr().err.splitlines()
    assert [line.removesuffix(": No such file or directory") for line in errors[:2]] == [
        f"error: {keys} contains no API key",
        f"error: {tmp_path}/none",
    ]
    assert "cannot listen on 127.0.0.1" in errors[2]
    assert "must be at most 65535, got 70000" in errors[-1]


def test_the_page_is_at_the_printed_address_unless_disabled() -> None:
    with command() as (_, url):
        assert "<title>metal_prefill</title>" in httpx.get(f"{url}/", **LOCAL).text
    with command("--no-page") as (_, url):
        assert httpx.get(f"{url}/", **LOCAL).status_code == 404


def test_a_file_of_keys_that_is_no_text_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    keys = tmp_path / "keys"
    keys.write_bytes(b"key\n\xff\n")
    assert cli.main(["serve", "--api-key-file", str(keys)]) == cli.EXIT_USAGE
    assert f"error: {keys} is not UTF-8 text: " in capfd.readouterr().err


@pytest.mark.parametrize("host", ["", " "])
def test_an_empty_address_does_not_mean_every_address(host: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--host", host, "-m", "no such model"]) == cli.EXIT_USAGE
    assert "--host: must not be empty" in capfd.readouterr().err


def test_a_stream_that_outlasts_the_shutdown_grace_ends_with_an_error() -> None:
    with command("--shutdown-grace", "1") as (process, url):
        body = {"prompt": "ROMEO:", "max_tokens": 1000, "n": 100, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, **LOCAL, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "closing"
        assert process.wait(30) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""


def test_a_second_interrupt_ends_answers_at_once() -> None:
    with command("--shutdown-grace", "300") as (process, url):
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
