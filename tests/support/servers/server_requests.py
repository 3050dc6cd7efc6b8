"""Requests of all kinds to a server, their expected results, and concurrent clients."""

import asyncio
import json
from typing import Any

import httpx
import numpy as np

from metal_prefill import Model
from support import scheduled_texts
from support.servers.running_server import LOCAL, Running


def request(i: int) -> tuple[str, dict[str, Any]]:
    """Return one of many kinds of request: greedy and seeded texts, conversations, vectors."""
    how: dict[str, Any] = {"temperature": 0} if i % 2 else {"temperature": 0.9, "top_p": 0.95, "seed": i}
    beginning = "a beginning that many of them have, and that is long enough for a page " if i % 3 else ""
    if i % 8 == 7:
        return "/v1/embeddings", {"input": [f"{beginning}text {i}", "b" * (i % 13 + 1)]}
    if i % 8 == 6:
        messages = [{"role": "user", "content": f"{beginning}question {i}"}]
        return "/v1/chat/completions", {"messages": messages, "max_tokens": 5 + i % 11, "stream": True, **how}
    prompt = f"{beginning}{i} " * (1 + i % 5)
    return "/v1/completions", {"prompt": prompt, "max_tokens": 5 + i % 11, "stream": True, **how}


def alone(model: Model, path: str, body: dict[str, Any]) -> Any:
    """Compute the expected result of a request in separate sessions."""
    if path == "/v1/embeddings":
        return np.concatenate([model.embed([text]) for text in body["input"]]).tolist()
    options = {name: body[name] for name in ("temperature", "top_p", "seed", "stop", "regex") if name in body}
    if "messages" in body:
        return scheduled_texts.answer_alone(model, body["messages"], body["max_tokens"], **options)
    return scheduled_texts.alone(model, body["prompt"], body["max_tokens"], **options)


async def answer(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    if not body.get("stream"):
        response = await client.post(path, json=body)
        return [item["embedding"] for item in response.raise_for_status().json()["data"]]
    text = ""
    async with client.stream("POST", path, json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                choice = json.loads(line.removeprefix("data: "))["choices"][0]
                text += choice["text"] if "text" in choice else choice["delta"].get("content", "")
    return text


def answers(server: Running, requests: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    """Send all requests at the same time."""

    async def run() -> list[Any]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, timeout=3600, limits=limits, **LOCAL) as client:
            return await asyncio.gather(*(answer(client, *r) for r in requests))

    return asyncio.run(run())
