"""Request handling: read and validate the body, then answer until done or the client disconnects."""

import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Generic, TypeVar

import anyio
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from metal_prefill.errors import ClosedError, ContextOverflowError
from metal_prefill.serve._bodies import LARGE, Sender
from metal_prefill.serve._errors import ApiError, log
from metal_prefill.serve._forms import Form, decode
from metal_prefill.serve._keys import prefix_key, prefix_namespace
from metal_prefill.serve._reply import OPENAI, Reply, StalledClientError, Style, timeout_error
from metal_prefill.serve._service import Service

CLOSING_SECONDS = 2  # time limit for a client to receive the end of an answer when the server closes

_Form = TypeVar("_Form", bound=Form)


class Endpoint(Generic[_Form]):
    """An ASGI application for one path."""

    def __init__(
        self,
        service: Service,
        form: type[_Form],
        answer: Callable[[Service, _Form, Reply, Sender], Awaitable[None]],
        style: Style = OPENAI,
    ) -> None:
        self._style = style
        self._service = service
        self._form = form
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        settings, metrics = self._service.settings, self._service.metrics
        bodies = self._service.bodies
        reply = Reply(send, settings.send_seconds, bodies.answers.holding, self._style)
        begin = time.perf_counter()
        try:
            async with anyio.create_task_group() as group:
                with self._service.answering() as answering:
                    request = Request(scope, receive)
                    body = await self._read(request, reply)
                    if body is not None:
                        group.start_soon(_cancel_after_disconnect, receive, group.cancel_scope)
                        with bodies.requests.holding(len(body)):
                            await self._reply(body, reply, prefix_key(settings, request.headers))
                if answering.cancelled_caught:
                    with anyio.move_on_after(CLOSING_SECONDS), suppress(StalledClientError, OSError):
                        await reply.error(ClosedError("the server is closing"))
                group.cancel_scope.cancel()
        finally:
            metrics.requests.labels(scope["path"], reply.status).inc()
            metrics.request_seconds.labels(scope["path"]).observe(time.perf_counter() - begin)

    async def _read(self, request: Request, reply: Reply) -> bytes | None:
        try:
            return await self._service.bodies.read(request)
        except ApiError as error:
            await reply.error(error)
        except ClientDisconnect:
            pass
        return None

    async def _reply(self, body: bytes, reply: Reply, key: bytes) -> None:
        seconds = self._service.settings.max_seconds
        try:
            with anyio.move_on_after(seconds) as scope:
                async with self._service.bodies.turn(len(body)) as turn:
                    form = await self._decoded(body)
                    sender = Sender(prefix_namespace(key, form.prompt_cache_key), turn)
                    await self._answer(self._service, form, reply, sender)
            if scope.cancelled_caught:
                await reply.error(timeout_error(seconds))
        except ContextOverflowError as error:  # LiteLLM recognizes the first words, LangChain the others
            most = self._service.model.max_context
            limit = f"This model's maximum context length is {most} tokens"
            message = f"{limit}. However, the prompt is too long: {error}"
            await reply.error(ApiError(message, code="context_length_exceeded"))
        except (StalledClientError, OSError):  # uvicorn closes the connection
            log.info("a client stopped reading its answer")
        except Exception as error:
            await reply.error(error)

    async def _decoded(self, body: bytes) -> _Form:
        if len(body) > LARGE:
            return await self._service.prepare(lambda: decode(body, self._form))
        return decode(body, self._form)


async def _cancel_after_disconnect(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()
