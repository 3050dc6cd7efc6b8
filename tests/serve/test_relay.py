"""Requests that another process answers: whole, in pieces, and given up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from metal_prefill import Model, serve
from metal_prefill.serve._relay import ResponseStart, answers, prefix_hash

HEADERS = [("host", "localhost"), ("content-type", "application/json")]
REQUEST = {"method": "POST", "path": "/v1/completions", "query": "", "headers": HEADERS}


async def collected(pieces: AsyncIterator[Any]) -> tuple[ResponseStart, bytes]:
    first, rest = None, b""
    async for piece in pieces:
        if first is None:
            first, rest = piece, piece.body
        else:
            rest += piece
    assert first is not None
    return first, rest


def test_whole_and_streamed_answers_are_relayed(cpu_model: Model) -> None:
    app = serve.app(cpu_model)
    body: dict[str, Any] = {"prompt": "ROMEO:\n", "max_tokens": 8, "temperature": 0}

    async def ask(**more: Any) -> tuple[ResponseStart, bytes]:
        return await collected(answers(app, REQUEST, json.dumps({**body, **more}).encode()))

    first, content = asyncio.run(ask())
    assert (first.status, first.whole) == (200, True)
    text = json.loads(content)["choices"][0]["text"]
    with cpu_model.session() as session:
        assert text == "".join(session.generate("ROMEO:\n", 8))
    first, content = asyncio.run(ask(stream=True))
    assert (first.status, first.whole) == (200, False)
    assert ("content-type", "text/event-stream") in first.headers
    lines = [json.loads(x[6:]) for x in content.decode().split("\n\n") if x.startswith("data: {")]
    assert "".join(line["choices"][0]["text"] for line in lines) == text
    first, content = asyncio.run(ask(prompt=None))
    assert (first.status, first.whole) == (400, True)


def test_an_abandoned_answer_ends(cpu_model: Model) -> None:
    app = serve.app(cpu_model)
    body = json.dumps({"prompt": "ROMEO:\n", "max_tokens": 900, "stream": True}).encode()

    async def ask() -> None:
        pieces = answers(app, REQUEST, body)
        await anext(pieces)
        assert app.state.service._texts == 1
        await pieces.aclose()
        assert app.state.service._texts == 0

    asyncio.run(ask())


def test_requests_with_a_common_prefix_have_the_same_routing_key() -> None:
    def word(**form: Any) -> str:
        return prefix_hash(json.dumps(form).encode())

    system = {"role": "system", "content": "Be brief. " * 200}
    one = word(messages=[system, {"role": "user", "content": "a"}])
    assert one == word(messages=[system, {"role": "user", "content": "b"}], temperature=1)
    assert one != word(messages=[{"role": "system", "content": "Be long."}])
    assert word(prompt="a" * 2000) == word(prompt="a" * 3000) != word(prompt="b" * 2000)
    assert word(prompt=[1, 2, 3]) != word(prompt=[1, 2, 4])
    assert (
        word(prompt="a", prompt_cache_key="x") != word(prompt="a") != word(prompt="b", prompt_cache_key="x")
    )
    body = json.dumps({"prompt": "a"}).encode()
    assert len({prefix_hash(body), prefix_hash(body, b"one key"), prefix_hash(body, b"another")}) == 3
    assert len({prefix_hash(b""), prefix_hash(b"[" * 100_000), prefix_hash(b"3")}) == 1
