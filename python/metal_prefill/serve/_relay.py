"""Requests and answers as plain values, which one process can relay to another."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.types import ASGIApp, Message

from metal_prefill.serve._errors import ApiError
from metal_prefill.serve._keys import prefix_namespace

PREFIX_CHARACTERS = 256  # characters of a prompt that identify its prefix
MOST_MESSAGES = 16  # messages of an answer that may be queued before the application waits


class ResponseStart(NamedTuple):
    """The first piece of an answer.

    Attributes
    ----------
    status : int
        HTTP status code.
    headers : list of (str, str)
        HTTP headers of the answer.
    body : bytes
        First part of the body.
    whole : bool
        Whether the body is complete.
    """

    status: int
    headers: list[tuple[str, str]]
    body: bytes
    whole: bool


def described(request: Request) -> dict[str, Any]:
    """Return the method, path, query and headers of a request as plain values."""
    headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in request.headers.raw]
    query = request.scope.get("query_string", b"").decode("latin-1")
    return {"method": request.method, "path": request.url.path, "query": query, "headers": headers}


def _scope(request: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "scheme": "http",
        "method": request["method"],
        "path": request["path"],
        "raw_path": request["path"].encode(),
        "root_path": "",
        "query_string": request["query"].encode("latin-1"),
        "headers": [(n.encode("latin-1"), v.encode("latin-1")) for n, v in request["headers"]],
    }


async def answers(
    app: ASGIApp, request: Mapping[str, Any], body: bytes
) -> AsyncGenerator[ResponseStart | bytes, None]:
    """Run an application on a request; yield the start of its answer, then the further pieces.

    Closing the generator signals a disconnect to the application.
    """
    messages: asyncio.Queue[Message | None] = asyncio.Queue(MOST_MESSAGES)
    left = asyncio.Event()
    read = False

    async def receive() -> Message:
        nonlocal read
        if not read:
            read = True
            return {"type": "http.request", "body": body, "more_body": False}
        await left.wait()
        return {"type": "http.disconnect"}

    async def run() -> None:
        try:
            await app(_scope(request), receive, messages.put)
        finally:
            with suppress(asyncio.QueueFull):
                messages.put_nowait(None)

    task = asyncio.create_task(run())
    start: Message | None = None
    begun = False
    try:
        while (message := await messages.get()) is not None:
            if message["type"] == "http.response.start":
                start = message
                continue
            more = bool(message.get("more_body"))
            if not begun and start is not None:
                headers = [(n.decode("latin-1"), v.decode("latin-1")) for n, v in start.get("headers", [])]
                begun = True
                yield ResponseStart(start["status"], headers, message.get("body", b""), not more)
            elif message.get("body"):
                yield message["body"]
            if not more:
                return
    finally:
        left.set()
        while not task.done():  # it may be blocked on the full queue
            with suppress(asyncio.QueueEmpty):
                messages.get_nowait()
            await asyncio.sleep(0)
            await asyncio.wait([task], timeout=0.01)
        with suppress(Exception, asyncio.CancelledError):
            task.result()


def prefix_hash(body: bytes, key: bytes = b"") -> str:
    """Hash the start of a request's prompt; requests that may share a prefix have equal hashes.

    Parameters
    ----------
    body
        Body of the request.
    key
        The request's :func:`metal_prefill.serve._keys.prefix_key`.
    """
    cache_key = None
    try:
        form = json.loads(body)
        cache_key = form.get("prompt_cache_key")
        messages = form.get("messages") or []
        text = form.get("prompt") or form.get("query") or [m["content"] for m in messages[:1]]
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        text = ""
    if isinstance(text, list):
        text = text[:PREFIX_CHARACTERS]
    shown = text if isinstance(text, str) else json.dumps(text)
    namespace = prefix_namespace(key, cache_key if isinstance(cache_key, str) else None)
    shown = namespace + shown[:PREFIX_CHARACTERS]
    return hashlib.blake2b(shown.encode("utf-8", "replace"), digest_size=12).hexdigest()


def broken_answer(error: Exception) -> ApiError:
    """Return the error for a request whose replica died; the client may retry it."""
    return ApiError(
        503,
        f"the server of this request has died: {type(error).__name__}",
        code="replica_died",
        headers={"Retry-After": "1"},
    )
