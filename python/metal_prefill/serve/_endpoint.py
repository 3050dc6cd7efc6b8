"""Request handling: read and validate the body, answer until done or the client disconnects.

An answer is one JSON body, or a stream of server-sent events.
"""

import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import anyio
import anyio.lowlevel
import msgspec
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from metal_prefill.errors import ClosedError, ContextOverflowError
from metal_prefill.serve._errors import CLOSE, NO_RETRY, ApiError, api_error, log
from metal_prefill.serve._forms import LARGE, Form, decode
from metal_prefill.serve._service import InFlight, Service
from metal_prefill.serve._settings import Settings

_PIECE = 1 << 18  # bytes of an answer that are sent at a time
HELD = 32  # requests of the largest size that may be in flight, or more smaller ones
MOST_UNSENT = 1 << 28  # bytes of answers, other than streams, that clients have not received
CLOSING_SECONDS = 2  # time limit for a client to receive the end of an answer when the server closes

_Form = TypeVar("_Form", bound=Form)


class StalledClientError(Exception):
    """Client that takes too long to receive a piece of an answer."""


class Style(NamedTuple):
    """Format of errors and events."""

    error: Callable[[ApiError], dict[str, Any]] = ApiError.body  # returns the body of an error
    # Returns the event of an error that ends a stream.
    event_error: Callable[[ApiError], dict[str, Any]] = ApiError.body
    named: bool = False  # whether each event has its type as a name, and the last one ends the stream


OPENAI = Style()


class Reply:
    """Sender of the answer to a request."""

    begin = 0.0  # time of the request, once its body is read
    namespace = ""  # of its prefixes
    model = ""  # name by which it selects the model
    end_turn: Callable[[], None]  # to be called once it is prepared

    def __init__(
        self,
        send: Send,  # ASGI's send function
        send_seconds: float,  # time limit in seconds for the client to receive a piece
        unreceived: InFlight,  # bytes of answers that clients have not received
        style: Style,  # format of errors and events
    ) -> None:
        self._style = style
        self._send = send
        self._unreceived = unreceived
        self._seconds = send_seconds
        self._begun = self._events = self._complete = False
        # HTTP status of the answer; until one is sent, 499, which nginx logs for clients that disconnect.
        self.status = 499

    async def json(self, content: Any) -> None:
        """Send a complete JSON answer."""
        await self.encoded(msgspec.json.encode(content))

    async def encoded(self, body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        """Send a complete answer that is JSON already."""
        await self._begin(
            status, {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
        )
        with self._unreceived.holding(len(body)):
            # A server keeps what its client has not received: it gets the next piece once it has sent most.
            for end in range(_PIECE, len(body) + _PIECE, _PIECE):
                await self._body(body[end - _PIECE : end], more=end < len(body))

    async def pieces(
        self, parts: Iterator[bytes], size: int, prepare: Callable[[Callable[[], bytes]], Awaitable[bytes]]
    ) -> None:
        """Send a JSON answer that is made while it is sent, by calls of `prepare`.

        `size` is the number of bytes that it is made of, which count as not received until its end.
        """

        def piece() -> bytes:
            made = bytearray()
            for part in parts:
                made += part
                if len(made) >= _PIECE:
                    break
            return bytes(made)

        made = await prepare(piece)
        if len(made) < _PIECE:
            await self.encoded(made)
            return
        with self._unreceived.holding(size):
            await self._begin(200, {"content-type": "application/json"})
            while made:
                await self._body(made, more=True)
                made = await prepare(piece)
            await self._body(b"", more=False)

    async def events(self, *contents: Any) -> None:
        """Send events in one piece; the first ones start the stream."""
        if not self._events:
            await self._begin(200, {"content-type": "text/event-stream", "cache-control": "no-cache"})
            self._events = True
        pieces = []
        for content in contents:
            name = f"event: {content['type']}\n" if self._style.named else ""
            pieces.append(b"%bdata: %b\n\n" % (name.encode(), msgspec.json.encode(content)))
        await self._body(b"".join(pieces), more=True)

    async def end_of_events(self) -> None:
        """End the stream, as clients expect with the event ``[DONE]`` if events have no names."""
        await self._body(b"" if self._style.named else b"data: [DONE]\n\n", more=False)

    async def error(self, error: Exception) -> None:
        """Send an error as the answer, or as the last event of a stream that has started.

        If part of a JSON answer was sent, nothing more is sent and the connection is closed.
        """
        answer = api_error(error)
        if not self._begun:
            await self.encoded(msgspec.json.encode(self._style.error(answer)), answer.status, answer.headers)
        elif self._events and not self._complete:
            await self.events(self._style.event_error(answer))
            await self.end_of_events()

    async def _begin(self, status: int, headers: dict[str, str]) -> None:
        self.status = status
        await self._send({"type": "http.response.start", "status": status, "headers": Headers(headers).raw})
        self._begun = True

    async def _body(self, body: bytes, more: bool) -> None:
        self._complete = not more
        with anyio.move_on_after(self._seconds) as scope:
            await self._send({"type": "http.response.body", "body": body, "more_body": more})
            await anyio.lowlevel.checkpoint()  # uvicorn learns that the client has gone before the next piece
        if scope.cancelled_caught:
            raise StalledClientError


class Bodies:
    """Reader of the request bodies of a server."""

    def __init__(self, settings: Settings) -> None:
        self._limit = settings.max_body
        self._seconds = settings.body_seconds
        # Requests that arrive or are answered.
        self.requests = InFlight("requests in flight", HELD * self._limit)
        # Answers that are being sent.
        self.answers = InFlight("answers that clients have not received", MOST_UNSENT)
        self._turns = anyio.Semaphore(1)

    async def read(self, request: Request) -> bytes:
        """Read a body; raise `ApiError` if it is not JSON, too large or slow, or too many are in flight."""
        _check_type(request.headers)
        limit = self._limit
        stated = request.headers.get("content-length", "0")
        if stated.isdigit() and int(stated) > limit:
            raise _too_large(limit)
        body = bytearray()
        with self.requests.holding() as held, anyio.move_on_after(self._seconds) as scope:
            async for piece in request.stream():
                body += piece
                held.add(len(piece))
                if len(body) > limit:
                    raise _too_large(limit)
                self.requests.check()
                self.answers.check()
        if scope.cancelled_caught:
            raise ApiError(
                f"the body did not arrive within {self._seconds:g} s",
                status=408,
                code="body_timeout",
                headers=CLOSE,
            )
        return bytes(body)

    @asynccontextmanager
    async def turn(self, size: int) -> AsyncIterator[Callable[[], None]]:
        """Wait for the turn of a body of `size` bytes, which the returned function ends early."""
        with ExitStack() as held:
            if size > LARGE:
                await self._turns.acquire()
                held.callback(self._turns.release)
            yield held.close


def _too_large(limit: int) -> ApiError:
    return ApiError(
        f"the body has more than {limit} bytes", status=413, code="request_too_large", headers=CLOSE
    )


def _check_type(headers: Headers) -> None:
    """Raise `ApiError` unless a body is plain JSON, which pages of other sites may not send unasked."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(
            f"the Content-Type must be application/json, got {kind or 'none'}",
            status=415,
            code="unsupported_content_type",
            headers=CLOSE,
        )
    coding = headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("", "identity"):
        raise ApiError(
            f"the Content-Encoding {coding} is not supported: send the body without compression",
            status=415,
            code="unsupported_content_encoding",
            headers=CLOSE,
        )


@dataclass
class Endpoint(Generic[_Form]):
    """An ASGI application for one path."""

    service: Service
    bodies: Bodies
    form: type[_Form]  # of requests
    answer: Callable[[Service, _Form, Reply], Awaitable[None]]  # answers a request
    style: Style = OPENAI

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        settings, metrics = self.service.settings, self.service.metrics
        reply = Reply(send, settings.send_seconds, self.bodies.answers, self.style)
        begin = time.perf_counter()
        try:
            async with anyio.create_task_group() as group:
                with self.service.answering() as answering:
                    request = Request(scope, receive)
                    try:
                        body = await self.bodies.read(request)
                    except ApiError as error:
                        await reply.error(error)
                    except ClientDisconnect:
                        pass
                    else:
                        group.start_soon(_cancel_after_disconnect, receive, group.cancel_scope)
                        with self.bodies.requests.holding(len(body)):
                            await self._reply(body, reply, prefix_key(settings, request.headers))
                if answering.cancelled_caught:
                    with anyio.move_on_after(CLOSING_SECONDS), suppress(StalledClientError, OSError):
                        await reply.error(ClosedError("the server is closing"))
                group.cancel_scope.cancel()
        finally:
            metrics.requests.labels(scope["path"], reply.status).inc()
            metrics.request_seconds.labels(scope["path"]).observe(time.perf_counter() - begin)

    async def _reply(self, body: bytes, reply: Reply, key: bytes) -> None:
        seconds = self.service.settings.max_seconds
        try:
            with anyio.move_on_after(seconds) as scope:
                async with self.bodies.turn(len(body)) as reply.end_turn:
                    large = len(body) > LARGE
                    work = partial(decode, body, self.form)
                    form = await self.service.prepare(work) if large else work()
                    reply.begin = time.perf_counter()
                    reply.namespace = prefix_namespace(key, form.prompt_cache_key)
                    reply.model = self.service.check_model(form.model)
                    await self.answer(self.service, form, reply)
            if scope.cancelled_caught:
                message = f"the answer took longer than {seconds:g} s"
                await reply.error(ApiError(message, status=504, code="timeout", headers=NO_RETRY))
        except ContextOverflowError as error:  # LiteLLM recognizes the first words, LangChain the others
            most = self.service.engine.max_context
            limit = f"This model's maximum context length is {most} tokens"
            message = f"{limit}. However, the prompt is too long: {error}"
            await reply.error(ApiError(message, code="context_length_exceeded"))
        except (StalledClientError, OSError):  # uvicorn closes the connection
            log.info("a client stopped reading its answer")
        except Exception as error:
            await reply.error(error)


async def _cancel_after_disconnect(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


def prefix_key(settings: Settings, headers: Headers) -> bytes:
    """Return the API key that separates the prefixes of a request from others; empty if all share them."""
    return b"" if settings.share_prefixes or not settings.api_keys else given_key(headers)


def prefix_namespace(key: bytes, cache_key: str | None) -> str:
    """Return the namespace of a request by its :func:`prefix_key` and its ``prompt_cache_key``.

    The namespace is a hash, so that neither value is stored. It is empty, and shared, if both are.
    """
    if not key and not cache_key:
        return ""
    # The digest has a fixed size, so that no two pairs concatenate to the same bytes.
    parts = hashlib.blake2b(key).digest() + (cache_key or "").encode("utf-8", "surrogatepass")
    return hashlib.blake2b(parts, digest_size=32).hexdigest()


def given_key(headers: Headers) -> bytes:
    """Return the API key in the headers of a request; empty without one."""
    given = dict(headers.raw)
    kind, _, key = given.get(b"authorization", b"").partition(b" ")
    return key.strip() if kind.lower() == b"bearer" else given.get(b"x-api-key", b"")
