"""An answer on its way to a client: one JSON body, or server-sent events as they are made."""

from __future__ import annotations

from typing import Any

import anyio
import msgspec
from starlette.types import Send

from metal_prefill.serve._errors import NO_RETRY, ApiError, api_error


class StalledClientError(Exception):
    """A client did not take a piece of an answer for too long."""


class Reply:
    """Sends an answer.

    Parameters
    ----------
    send
        Of ASGI.
    send_seconds
        That the client may take to receive a piece.

    Attributes
    ----------
    status : int
        Of HTTP, once it is sent; before, that of clients that leave, as nginx logs it.
    """

    def __init__(self, send: Send, send_seconds: float) -> None:
        self._send = send
        self._seconds = send_seconds
        self._begun = self._events = self._complete = False
        self.status = 499

    async def json(self, content: Any) -> None:
        """Send the whole answer."""
        await self._whole(200, msgspec.json.encode(content), {})

    async def event(self, content: Any) -> None:
        """Send a piece; the first one begins a stream of events."""
        if not self._events:
            await self._begin(200, {"content-type": "text/event-stream", "cache-control": "no-cache"})
            self._events = True
        await self._body(b"data: " + msgspec.json.encode(content) + b"\n\n", more=True)

    async def end_of_events(self) -> None:
        """End a stream of events in the way that clients look for."""
        await self._body(b"data: [DONE]\n\n", more=False)

    async def error(self, error: Exception) -> None:
        """Send an error: as the answer, or before the end of the events that have begun.

        Part of an answer that is not a stream cannot be taken back: the connection is then closed.
        """
        answer = api_error(error)
        if not self._begun:
            await self._whole(answer.status, msgspec.json.encode(answer.body()), answer.headers)
        elif self._events and not self._complete:
            await self.event(answer.body())
            await self.end_of_events()

    async def _whole(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        await self._begin(
            status, {"content-type": "application/json", "content-length": str(len(body)), **headers}
        )
        await self._body(body, more=False)

    async def _begin(self, status: int, headers: dict[str, str]) -> None:
        self.status = status
        raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})
        self._begun = True

    async def _body(self, body: bytes, more: bool) -> None:
        self._complete = not more
        with anyio.move_on_after(self._seconds) as scope:
            await self._send({"type": "http.response.body", "body": body, "more_body": more})
        if scope.cancelled_caught:
            raise StalledClientError


def timeout_error(seconds: float) -> ApiError:
    """Return the answer to a request that took too long; repeating it would take as long."""
    return ApiError(504, f"the answer took longer than {seconds:g} s", code="timeout", headers=NO_RETRY)
