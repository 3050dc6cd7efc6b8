"""The server on a local Ray cluster: as one server, and with a replica killed under load.

Not part of ``make test``, since Ray is large and slow to start: ``make test-ray`` installs and runs it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from metal_prefill import Model

# Ray's workers have a low priority, and on a busy machine need more than the 5 s that a proxy allows for its
# start.
os.environ.setdefault("RAY_worker_niceness", "0")
for name in ("READY_CHECK", "HEALTH_CHECK"):
    os.environ.setdefault(f"RAY_SERVE_PROXY_{name}_TIMEOUT_S", "120")

ray = pytest.importorskip("ray", reason="needs the extra ray")
ray_serve = pytest.importorskip("ray.serve", reason="needs the extra ray")

from ray.exceptions import RayError  # noqa: E402

from metal_prefill.integrations._ray import serve_app  # noqa: E402
from metal_prefill.integrations._ray_serve import _stream  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]  # warnings: Ray's own

SYSTEMS = [
    f"{name} speaks to the people, who are not of one mind. " * 12 for name in ("KING", "FOOL", "DUKE")
]


@pytest.fixture(scope="module")
def url(demo_path: Path) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
    ray_serve.start(http_options={"host": "127.0.0.1", "port": port})
    ray_serve.run(
        serve_app(demo_path, replicas=2, limits={"names": ["demo"], "max_body": 100_000}, device="cpu")
    )
    yield f"http://127.0.0.1:{port}"
    ray_serve.shutdown()
    ray.shutdown()


def body(i: int, tokens: int = 24) -> dict[str, Any]:
    prompt = f"{SYSTEMS[i % 3]}\n{i}:"
    return {"prompt": prompt, "max_tokens": tokens, "temperature": 0.9, "seed": i, "stream": i % 2 == 0}


def text_of(response: httpx.Response) -> str:
    if not response.headers["content-type"].startswith("text/event-stream"):
        return str(response.json()["choices"][0]["text"])
    chunks = [json.loads(x[6:]) for x in response.text.split("\n\n") if x.startswith("data: {")]
    if any("error" in chunk for chunk in chunks):
        raise httpx.RemoteProtocolError("the stream ended with an error")
    assert response.text.endswith("data: [DONE]\n\n")
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


def expected(model: Model, i: int, tokens: int = 24) -> str:
    with model.session() as session:
        return "".join(session.generate(body(i)["prompt"], tokens, temperature=0.9, seed=i))


def post(url: str, content: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json=content, timeout=120, trust_env=False)


def test_replicas_behave_as_one_server(url: str, demo_path: Path) -> None:
    with Model(demo_path, device="cpu", threads=1) as model:
        for i in range(2):
            assert text_of(post(url, body(i))) == expected(model, i)
    wrong = post(url, {"prompt": 3})
    assert (wrong.status_code, wrong.json()["error"]["type"]) == (400, "invalid_request_error")
    assert post(url, {"prompt": "a" * 200_000}).status_code == 413
    assert httpx.get(f"{url}/v1/models", trust_env=False).json()["data"][0]["id"] == "demo"


def test_prompts_with_a_common_prefix_go_to_the_same_replica(url: str) -> None:
    served = {i: [post(url, body(i + 3 * n)).headers["x-replica"] for n in range(6)] for i in range(3)}
    for replicas in served.values():
        assert len(set(replicas)) == 1


def test_an_interrupted_stream_ends_with_an_error_and_done() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"data: {}\n\n"
        raise RayError("the replica is dead")

    async def sent() -> list[bytes]:
        return [piece async for piece in _stream(b"data: {}\n\n", pieces())]

    *begun, end = asyncio.run(sent())
    assert begun == [b"data: {}\n\n"] * 2
    error, done, rest = end.split(b"\n\n")
    assert "error" in json.loads(error.removeprefix(b"data: "))
    assert (done, rest) == (b"data: [DONE]", b"")


def test_a_killed_replica_causes_retries_or_clean_errors(url: str, demo_path: Path) -> None:
    answers: dict[int, str] = {}
    failures: dict[int, str] = {}
    tokens = 300

    def run(i: int) -> None:
        try:
            response = post(url, body(i, tokens))
            if response.status_code == 200:
                answers[i] = text_of(response)
            else:
                failures[i] = response.json()["error"]["type"]
        except httpx.HTTPError as error:
            failures[i] = type(error).__name__

    victim = int(post(url, body(0)).headers["x-replica"].rpartition("-")[2])
    threads = [threading.Thread(target=run, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    os.kill(victim, signal.SIGKILL)
    for thread in threads:
        thread.join()
    with Model(demo_path, device="cpu", threads=1) as model:
        for i, text in answers.items():
            assert text == expected(model, i, tokens), i
    assert len(answers) + len(failures) == 16
    assert set(failures.values()) <= {"server_error", "RemoteProtocolError"}
    # Whole answers are made again by the other replica; only streams that had begun may fail.
    assert all(i % 2 == 0 for i in failures)
    assert text_of(post(url, body(1))) != ""
