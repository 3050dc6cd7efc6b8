"""Bodies of requests and answers: limits on their size, time and memory."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import NamedTuple

import anyio
from starlette.datastructures import Headers
from starlette.requests import Request

from metal_prefill.serve._errors import ApiError
from metal_prefill.serve._settings import Settings

HELD = 32  # requests of the largest size that may be in flight, or more smaller ones
MOST_UNSENT = 1 << 28  # bytes of answers, other than streams, that clients have not received
MOST_ANSWER = 1 << 27  # bytes of an answer, besides the text that a model generates
MOST_ESCAPED = 6  # bytes in JSON of a byte of text
MOST_SCORED = 1 << 28  # bytes of log probabilities whose texts have not ended
LARGE = 1 << 18  # bytes; preparing a body takes up to 200 times its size, so large ones take turns

# The unread rest of a body must not be parsed as the next request.
_CLOSE = {"connection": "close"}


class Turn:
    """Turn of a request with a large body to be decoded and prepared; empty for other requests."""

    def __init__(self, turns: anyio.Semaphore | None) -> None:
        self._turns = turns

    def end(self) -> None:
        """Let the next one be prepared."""
        turns, self._turns = self._turns, None
        if turns is not None:
            turns.release()


class Sender(NamedTuple):
    """Facts about a request in addition to its form."""

    namespace: str  # prefix namespace
    turn: Turn  # to be ended once the request is prepared


class InFlight:
    """Count of bytes in flight, with a limit."""

    def __init__(self, what: str, most: int) -> None:
        self._what, self._most = what, most
        self.size = 0
        self._holders = 0

    @contextmanager
    def holding(self, size: int) -> Iterator[None]:
        """Count bytes until the end of the context."""
        self._holders += 1
        self.add(size)
        try:
            yield
        finally:
            self.add(-size)
            self._holders -= 1

    @property
    def fair_share(self) -> float:
        """Mean number of bytes of the contexts in which some are held."""
        return self.size / max(self._holders, 1)

    def add(self, size: int) -> None:
        """Count further bytes, or with a negative number fewer."""
        self.size += size

    def check(self) -> None:
        """Raise `ApiError` if the bytes exceed the limit."""
        if self.size > self._most:
            raise ApiError(
                f"{self._what} exceed {self._most} bytes in total; retry later",
                status=503,
                code="too_many_bytes",
                headers={**_CLOSE, "Retry-After": "1"},
            )


class Bodies:
    """Reader of the request bodies of a server."""

    def __init__(self, settings: Settings) -> None:
        self._limit = settings.max_body
        self._seconds = settings.body_seconds
        # Requests that arrive or are answered.
        self.requests = InFlight("requests in flight", HELD * self._limit)
        # Answers that are being sent.
        self.answers = InFlight("answers that clients have not received", MOST_UNSENT)
        # Log probabilities of answers that are computed.
        self.scores = InFlight("log probabilities of requests in flight", MOST_SCORED)
        self._turns = anyio.Semaphore(1)

    async def read(self, request: Request) -> bytes:
        """Read a body.

        Raises
        ------
        ApiError
            The body is not JSON, too large or too slow, or too many bodies are in flight.
        starlette.requests.ClientDisconnect
            The client disconnected.
        """
        _check_type(request.headers)
        limit = self._limit
        too_large = ApiError(
            f"the body has more than {limit} bytes", status=413, code="request_too_large", headers=_CLOSE
        )
        stated = request.headers.get("content-length", "0")
        if stated.isdigit() and int(stated) > limit:
            raise too_large
        body = bytearray()
        try:
            with anyio.move_on_after(self._seconds) as scope:
                async for piece in request.stream():
                    body += piece
                    self.requests.add(len(piece))
                    if len(body) > limit:
                        raise too_large
                    self.requests.check()
                    self.answers.check()
        finally:
            self.requests.add(-len(body))
        if scope.cancelled_caught:
            raise ApiError(
                f"the body did not arrive within {self._seconds:g} s",
                status=408,
                code="body_timeout",
                headers=_CLOSE,
            )
        return bytes(body)

    @asynccontextmanager
    async def turn(self, size: int) -> AsyncIterator[Turn]:
        """Wait for the turn of a body of `size` bytes."""
        if size > LARGE:
            await self._turns.acquire()
        turn = Turn(self._turns if size > LARGE else None)
        try:
            yield turn
        finally:
            turn.end()


def _check_type(headers: Headers) -> None:
    """Raise `ApiError` unless a body is plain JSON, which pages of other sites may not send unasked."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(
            f"the Content-Type must be application/json, got {kind or 'none'}",
            status=415,
            code="unsupported_content_type",
            headers=_CLOSE,
        )
    coding = headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("", "identity"):
        raise ApiError(
            f"the Content-Encoding {coding} is not supported: send the body without compression",
            status=415,
            code="unsupported_content_encoding",
            headers=_CLOSE,
        )
