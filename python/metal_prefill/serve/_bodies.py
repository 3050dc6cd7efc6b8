"""Request bodies, read within limits on size, time and memory."""

from __future__ import annotations

import anyio
from starlette.requests import Request

from metal_prefill.serve._errors import ApiError
from metal_prefill.serve._settings import Settings

ARRIVING = 32  # bodies of the largest size that may be in flight, or more smaller ones

# The unread rest of a body must not be parsed as the next request.
_CLOSE = {"connection": "close"}


class Bodies:
    """Reader of the request bodies of a server."""

    def __init__(self, settings: Settings) -> None:
        self._limit = settings.max_body
        self._seconds = settings.body_seconds
        self._arriving = 0  # bytes of incomplete bodies

    async def read(self, request: Request) -> bytes:
        """Read a body.

        Raises
        ------
        ApiError
            The body is too large or too slow, or too many bodies are in flight.
        starlette.requests.ClientDisconnect
            The client disconnected.
        """
        limit = self._limit
        too_large = ApiError(
            413, f"the body has more than {limit} bytes", code="request_too_large", headers=_CLOSE
        )
        stated = request.headers.get("content-length", "0")
        if stated.isdigit() and int(stated) > limit:
            raise too_large
        body = bytearray()
        try:
            with anyio.move_on_after(self._seconds) as scope:
                async for piece in request.stream():
                    body += piece
                    self._arriving += len(piece)
                    if len(body) > limit:
                        raise too_large
                    if self._arriving > ARRIVING * limit:
                        raise ApiError(
                            503,
                            f"request bodies in flight exceed {ARRIVING * limit} bytes in total; retry later",
                            code="too_many_bytes",
                            headers={**_CLOSE, "Retry-After": "1"},
                        )
        finally:
            self._arriving -= len(body)
        if scope.cancelled_caught:
            raise ApiError(
                408,
                f"the body did not arrive within {self._seconds:g} s",
                code="body_timeout",
                headers=_CLOSE,
            )
        return bytes(body)
