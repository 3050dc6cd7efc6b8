"""Bodies of requests, read within limits of size, time and memory."""

from __future__ import annotations

import anyio
from starlette.requests import Request

from metal_prefill.serve._errors import ApiError
from metal_prefill.serve._settings import Settings

ARRIVING = 32  # bodies of the largest size that may arrive at the same time, or more smaller ones

# The rest of a body that nobody reads must not be taken for the next request.
_CLOSE = {"connection": "close"}


class Bodies:
    """Reads the bodies of a server's requests."""

    def __init__(self, settings: Settings) -> None:
        self._limit = settings.max_body
        self._seconds = settings.body_seconds
        self._arriving = 0  # bytes of bodies that are not complete

    async def read(self, request: Request) -> bytes:
        """Read a body.

        Raises
        ------
        ApiError
            It is too large, or too slow, or too many arrive at the same time.
        starlette.requests.ClientDisconnect
            The client left.
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
                            f"requests that arrive now have more than {ARRIVING * limit} bytes together",
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
