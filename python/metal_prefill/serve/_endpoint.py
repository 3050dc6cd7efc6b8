"""Request handling: check access, read the body, answer until done or the client disconnects.

An answer is one JSON body, or a stream of server-sent events.

A page of another site, which a browser on the same machine shows, can send requests to any address. Its
``Origin`` identifies it, unless the name of its site resolves to this server (DNS rebinding): then ``Host``
is that name.
"""

import hashlib
import hmac
import ipaddress
import socket
import time
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar
from urllib.parse import urlsplit

import anyio
import anyio.lowlevel
import msgspec
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from metal_prefill.errors import ClosedError, ContextOverflowError
from metal_prefill.serve._errors import CLOSE, NO_RETRY, ApiError, api_error, log
from metal_prefill.serve._forms import LARGE, Form, decode
from metal_prefill.serve._service import Service
from metal_prefill.serve._settings import Settings

_PIECE = 1 << 18  # bytes of an answer that are sent at once
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

    def __init__(self, send: Send, service: Service, style: Style) -> None:
        self._send = send  # ASGI's function
        self._service = service
        self._style = style
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
        with self._service.answers.holding(len(body)):
            # uvicorn buffers unsent bytes. It takes the next piece once most are sent.
            for end in range(_PIECE, len(body) + _PIECE, _PIECE):
                await self._body(body[end - _PIECE : end], more=end < len(body))

    async def pieces(self, parts: Iterator[bytes], size: int) -> None:
        """Send a JSON answer that is made while it is sent, in threads.

        `size` is the number of bytes that it is made of, which count as not received until its end.
        """

        def piece() -> bytes:
            made = bytearray()
            for part in parts:
                made += part
                if len(made) >= _PIECE:
                    break
            return bytes(made)

        made = await self._service.prepare(piece)
        if len(made) < _PIECE:
            await self.encoded(made)
            return
        with self._service.answers.holding(size):
            await self._begin(200, {"content-type": "application/json"})
            while made:
                await self._body(made, more=True)
                made = await self._service.prepare(piece)
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
        with anyio.move_on_after(self._service.settings.send_seconds) as scope:
            await self._send({"type": "http.response.body", "body": body, "more_body": more})
            await anyio.lowlevel.checkpoint()  # uvicorn learns that the client has gone before the next piece
        if scope.cancelled_caught:
            raise StalledClientError


async def _body_of(request: Request, service: Service) -> bytes:
    """Read a body; raise `ApiError` if it is not JSON, too large or slow, or too many are in flight."""
    _check_type(request.headers)
    limit, seconds = service.settings.max_body, service.settings.body_seconds
    stated = request.headers.get("content-length", "0")
    if stated.isdigit() and int(stated) > limit:
        raise _too_large(limit)
    body = bytearray()
    with service.requests.holding() as held, anyio.move_on_after(seconds) as scope:
        async for piece in request.stream():
            body += piece
            held.add(len(piece))
            if len(body) > limit:
                raise _too_large(limit)
            service.requests.check()
            service.answers.check()
    if scope.cancelled_caught:
        raise ApiError(
            f"the body did not arrive within {seconds:g} s",
            status=408,
            code="body_timeout",
            headers=CLOSE,
        )
    return bytes(body)


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
    form: type[_Form]  # of requests
    answer: Callable[[Service, _Form, Reply], Awaitable[None]]  # answers a request
    style: Style = OPENAI

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service, metrics = self.service, self.service.metrics
        reply = Reply(send, service, self.style)
        begin = time.perf_counter()
        try:
            async with anyio.create_task_group() as group:
                with service.answering() as answering:
                    request = Request(scope, receive)
                    try:
                        body = await _body_of(request, service)
                    except ApiError as error:
                        await reply.error(error)
                    except ClientDisconnect:
                        pass
                    else:
                        group.start_soon(_cancel_after_disconnect, receive, group.cancel_scope)
                        with service.requests.holding(len(body)):
                            await self._reply(body, reply, request.headers)
                if answering.cancelled_caught:
                    with anyio.move_on_after(CLOSING_SECONDS), suppress(StalledClientError, OSError):
                        await reply.error(ClosedError("the server is closing"))
                group.cancel_scope.cancel()
        finally:
            metrics.requests.labels(scope["path"], reply.status).inc()
            metrics.request_seconds.labels(scope["path"]).observe(time.perf_counter() - begin)

    async def _reply(self, body: bytes, reply: Reply, headers: Headers) -> None:
        service = self.service
        seconds = service.settings.max_seconds
        try:
            with anyio.move_on_after(seconds) as scope:
                async with service.turn(len(body)) as reply.end_turn:
                    work = partial(decode, body, self.form)
                    form = await service.prepare(work) if len(body) > LARGE else work()
                    reply.begin = time.perf_counter()
                    reply.namespace = prefix_namespace(service.settings, headers, form.prompt_cache_key)
                    reply.model = service.check_model(form.model)
                    await self.answer(service, form, reply)
            if scope.cancelled_caught:
                message = f"the answer took longer than {seconds:g} s"
                await reply.error(ApiError(message, status=504, code="timeout", headers=NO_RETRY))
        except ContextOverflowError as error:  # LiteLLM recognizes the first words, LangChain the others
            most = service.engine.max_context
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


def prefix_namespace(settings: Settings, headers: Headers, cache_key: str | None) -> str:
    """Return the namespace of a request: that of its API key, unless all share prefixes, and a cache key.

    The namespace is a hash, so that neither value is stored. It is empty, and shared, if both are.
    """
    key = b"" if settings.share_prefixes or not settings.api_keys else given_key(headers)
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


class Guard:
    """Middleware that refuses requests in which a function finds a problem."""

    def __init__(self, app: ASGIApp, problem_of: Callable[[Scope], ApiError | None]) -> None:
        self._app, self._problem_of = app, problem_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._problem_of(scope) if scope["type"] == "http" else None
        await (self._app if error is None else error.response())(scope, receive, send)


def server_names(settings: Settings) -> set[str]:
    """Return names of the server besides IP addresses; ``*`` allows all."""
    machine = socket.gethostname().lower()
    return {"localhost", machine, f"{machine}.local", *map(str.lower, settings.allowed_hosts)}


def foreign(names: Collection[str], origins: Collection[str], scope: Scope) -> ApiError | None:
    """Return the error for a request with a foreign ``Host`` or ``Origin``.

    `origins` are those of pages that may use the server besides its own; ``*`` allows all.
    """
    headers = Headers(scope=scope)
    host, origin = headers.get("host", "localhost"), headers.get("origin")
    if not _allows(names, host):
        return ApiError(
            f"{host!r} is not a name of this server; --allowed-host adds names",
            status=403,
            code="foreign_host",
        )
    if origin is None or "*" in origins or origin.lower() in origins:
        return None
    if origin.lower().partition("://")[2] == host.lower():
        return None
    return ApiError(
        f"pages of {origin!r} may not use this server; --cors-origin allows origins",
        status=403,
        code="foreign_origin",
    )


def _allows(names: Collection[str], host: str) -> bool:
    try:
        name = (urlsplit(f"//{host}").hostname or "").removesuffix(".")
    except ValueError:
        return False
    if name in names or name.endswith(".localhost") or "*" in names:
        return True
    try:
        ipaddress.ip_address(name)  # no site has an address as its name
    except ValueError:
        return False
    return True


def keyless(keys: Collection[bytes], open_paths: Collection[str], scope: Scope) -> ApiError | None:
    """Return the error for a request without a key to a path that is not open.

    The key is in ``Authorization: Bearer KEY`` or, as Anthropic's clients send it, in ``X-Api-Key: KEY``.
    """
    path: str = scope["path"]
    if path.removeprefix(scope.get("root_path", "")) in open_paths:  # relative to its mount point
        return None
    given = given_key(Headers(scope=scope))
    # All keys are compared, each in constant time, so that the time reveals nothing about them.
    if sum(hmac.compare_digest(given, known) for known in keys) > 0:
        return None
    problem = "Incorrect API key provided" if given else "You didn't provide an API key"
    return ApiError(problem, status=401, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
