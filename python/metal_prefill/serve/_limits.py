"""Limits on the size, time and memory of requests and answers, and on the memory of log probabilities."""

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, NamedTuple

import anyio
import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request

from metal_prefill.generation._stream import Stream
from metal_prefill.serve._errors import ApiError
from metal_prefill.serve._settings import Settings

HELD = 32  # requests of the largest size that may be in flight, or more smaller ones
MOST_UNSENT = 1 << 28  # bytes of answers, other than streams, that clients have not received
MOST_ANSWER = 1 << 27  # bytes of an answer, besides the text that a model generates
MOST_ESCAPED = 6  # bytes in JSON of a byte of text
MOST_SCORED = 1 << 28  # bytes of log probabilities whose texts have not ended
LARGE = 1 << 18  # bytes; preparing a body takes up to 200 times its size, so large ones take turns
# Of a request: 1 + `logprobs` for each token of its prompts, if they are scored, and of its answers.
# 8,192 tokens with the 20 best have a sixth.
MOST_SCORES = 1 << 20
_SCORE_BYTES = 32  # of one in JSON, at most, if its token is a word

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
        """Read a body; raise `ApiError` if it is not JSON, too large or slow, or too many are in flight."""
        _check_type(request.headers)
        limit = self._limit
        stated = request.headers.get("content-length", "0")
        if stated.isdigit() and int(stated) > limit:
            raise _too_large(limit)
        body = bytearray()
        try:
            with anyio.move_on_after(self._seconds) as scope:
                async for piece in request.stream():
                    body += piece
                    self.requests.add(len(piece))
                    if len(body) > limit:
                        raise _too_large(limit)
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


def _too_large(limit: int) -> ApiError:
    return ApiError(
        f"the body has more than {limit} bytes", status=413, code="request_too_large", headers=_CLOSE
    )


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


def most_tokens(texts: int, logprobs: int) -> int:
    """Return how many tokens each text may have if the prompts are not scored."""
    return max(MOST_SCORES // (texts * (1 + logprobs)), 1)


class _Account:
    """Bytes of the log probabilities of one request."""

    def __init__(self, held: InFlight, size: int) -> None:
        self._held = held
        self._size = size

    def add(self, size: int) -> None:
        """Count further bytes; raise `ApiError` if too many are held, of which this request has its share."""
        self._size += size
        self._held.add(size)
        if self._size >= self._held.fair_share:
            self._held.check()

    def remove(self, size: int) -> None:
        """Count fewer bytes."""
        self._size -= size
        self._held.add(-size)


class Scores:
    """JSON lists of the log probabilities of a text, encoded as they grow.

    The objects that they are encoded from take ten times as much memory.
    """

    def __init__(self, account: _Account) -> None:
        self._account = account
        self._chunks: dict[str, list[bytes]] = {}
        self._size = 0

    def extend(self, lists: Mapping[str, Sequence[Any]]) -> None:
        """Append items to the list of each name."""
        for name, items in lists.items():
            chunks = self._chunks.setdefault(name, [])
            if items:
                chunks.append(msgspec.json.encode(items)[1:-1])
                self._size += len(chunks[-1])
                self._account.add(len(chunks[-1]))

    def whole(self) -> dict[str, msgspec.Raw]:
        """Return the list of each name, and release the chunks."""
        chunks, self._chunks = self._chunks, {}
        return {name: msgspec.Raw(b"[%b]" % b",".join(chunks.pop(name))) for name in list(chunks)}

    def drop(self) -> None:
        self._account.remove(self._size)
        self._chunks, self._size = {}, 0


@contextmanager
def scores_of(held: InFlight, streams: Sequence[Stream], logprobs: int | None) -> Iterator[list[Scores]]:
    """Return lists for each text, whose memory is released at the end of the context.

    Memory for the log probabilities of prompts, which come fast, is reserved from the start.
    """
    if logprobs is None:
        yield [Scores(_Account(held, 0)) for _ in streams]
        return
    count = sum(stream.most_pieces for stream in streams) * (1 + logprobs)
    if count > MOST_SCORES:
        raise ApiError(
            f"logprobs: up to {count} log probabilities of prompts and answers; the limit is {MOST_SCORES}",
            param="logprobs",
            code="too_many_logprobs",
        )
    reserved = sum(stream.scored_tokens for stream in streams) * (1 + logprobs) * _SCORE_BYTES
    with held.holding(reserved):
        held.check()
        account = _Account(held, reserved)
        scores = [Scores(account) for _ in streams]
        try:
            yield scores
        finally:
            for lists in scores:
                lists.drop()
