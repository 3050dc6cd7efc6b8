"""Answers to clients: one JSON body, or a stream of server-sent events."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
from starlette.types import Send

from metal_prefill.serve._errors import NO_RETRY, ApiError, api_error

_PIECE = 1 << 18  # bytes of an answer that are sent at a time


class StalledClientError(Exception):
    """Client that takes too long to receive a piece of an answer."""


class Reply:
    """Sender of one answer.

    Parameters
    ----------
    send
        ASGI's send function.
    send_seconds
        Time limit in seconds for the client to receive a piece.
    sending
        Returns a context in which so many bytes of an answer count as not received.

    Attributes
    ----------
    status : int
        HTTP status of the answer; until one is sent, 499, which nginx logs for clients that disconnect.
    """

    def __init__(
        self, send: Send, send_seconds: float, sending: Callable[[int], AbstractContextManager[None]]
    ) -> None:
        self._send = send
        self._sending = sending
        self._seconds = send_seconds
        self._begun = self._events = self._complete = False
        self.status = 499

    async def json(self, content: Any) -> None:
        """Send a complete JSON answer."""
        await self.encoded(msgspec.json.encode(content))

    async def encoded(self, body: bytes) -> None:
        """Send a complete answer that is JSON already."""
        await self._whole(200, body, {})

    async def events(self, *contents: Any) -> None:
        """Send events in one piece; the first ones start the stream."""
        if not self._events:
            await self._begin(200, {"content-type": "text/event-stream", "cache-control": "no-cache"})
            self._events = True
        pieces = [b"data: " + msgspec.json.encode(content) + b"\n\n" for content in contents]
        await self._body(b"".join(pieces), more=True)

    async def end_of_events(self) -> None:
        """End the stream with the event ``[DONE]``, as clients expect."""
        await self._body(b"data: [DONE]\n\n", more=False)

    async def error(self, error: Exception) -> None:
        """Send an error as the answer, or as the last event of a stream that has started.

        If part of a JSON answer was sent, nothing more is sent and the connection is closed.
        """
        answer = api_error(error)
        if not self._begun:
            await self._whole(answer.status, msgspec.json.encode(answer.body()), answer.headers)
        elif self._events and not self._complete:
            await self.events(answer.body())
            await self.end_of_events()

    async def _whole(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        await self._begin(
            status, {"content-type": "application/json", "content-length": str(len(body)), **headers}
        )
        with self._sending(len(body)):
            # A server keeps what its client has not received: it gets the next piece once it has sent most.
            for end in range(_PIECE, len(body) + _PIECE, _PIECE):
                await self._body(body[end - _PIECE : end], more=end < len(body))

    async def _begin(self, status: int, headers: dict[str, str]) -> None:
        self.status = status
        raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})
        self._begun = True

    async def _body(self, body: bytes, more: bool) -> None:
        self._complete = not more
        with anyio.move_on_after(self._seconds) as scope:
            await self._send({"type": "http.response.body", "body": body, "more_body": more})
            await anyio.lowlevel.checkpoint()  # uvicorn learns that the client has gone before the next piece
        if scope.cancelled_caught:
            raise StalledClientError


def timeout_error(seconds: float) -> ApiError:
    """Return the error for an answer that took too long, marked as not worth retrying."""
    return ApiError(504, f"the answer took longer than {seconds:g} s", code="timeout", headers=NO_RETRY)
