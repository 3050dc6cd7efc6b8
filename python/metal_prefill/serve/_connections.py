"""Limits on the number of connections and on the time that clients may stall them.

uvicorn does not limit the time in which a request arrives, nor the time in which a client receives an answer
that the application has sent. The limits on single requests are in :mod:`metal_prefill.serve._endpoint`.
"""

import asyncio
import resource
import socket
from typing import Any

import h11
import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from metal_prefill.serve._endpoint import CLOSING_SECONDS
from metal_prefill.serve._errors import RETRY, ApiError
from metal_prefill.serve._settings import Settings

REFUSED = 64  # connections beyond the limit that are answered; further ones are closed at once
OTHER_FILES = 64  # descriptors other than connections: the model, the prefix store, libraries
MAX_HEADERS = 1 << 16  # bytes of a request's headers
# Chunks that a body may have, in addition to one for each KiB: the event loop parses all chunks that a read
# from the socket returns, 43,000 in 256 KiB, before it serves other connections.
MOST_CHUNKS = 4096
LOOKS = 4  # checks of a connection within the shortest of its time limits
FIRST_LOOK, LAST_LOOK = 0.005, 1.0  # seconds between checks for a reset, doubled after each


class Server(uvicorn.Server):
    """uvicorn server with limits on connections.

    When it closes, answers in flight may take `shutdown_grace`. Those that take longer end with an error;
    uvicorn would cancel their tasks in the middle of an event, and log a traceback for each.
    """

    def __init__(self, app: Starlette, shutdown_grace: int, **options: Any) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=_LimitedProtocol,
                ws="none",
                timeout_graceful_shutdown=shutdown_grace + 2 * CLOSING_SECONDS,
                **options,
            )
        )
        self._shutdown_grace = shutdown_grace
        self._end_answers = app.state.service.end_answers

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Finish answers in flight within the time limit, or end them at a second Ctrl-C."""
        end = asyncio.get_running_loop().call_later(self._shutdown_grace, self._end_answers)
        try:
            await super().shutdown(sockets)
        finally:
            end.cancel()
        if self.force_exit:
            # uvicorn would leave its tasks to be cancelled, and log a traceback for each.
            self._end_answers()
            if self.server_state.tasks:
                await asyncio.wait(self.server_state.tasks, timeout=CLOSING_SECONDS)
            await self.lifespan.shutdown()


def allow_files(settings: Settings) -> None:
    """Raise the process's limit on open files to one for each connection."""
    wanted = settings.max_connections + REFUSED + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and wanted > hard:
        most = hard - REFUSED - OTHER_FILES
        enough = f"enough for {most}" if most > 0 else "too few for any"
        raise ValueError(
            f"max_connections of {settings.max_connections} needs {wanted} open files; "
            f"this process may have {hard} (ulimit -Hn), which is {enough}"
        )
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class _TooManyChunksError(Exception):
    """Body in many small chunks."""


class _Connection(h11.Connection):
    """Parser of requests that limits the number of chunks of a body."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEADERS)
        self._chunks = self._bytes = 0

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunks = self._bytes = 0
        elif isinstance(event, h11.Data):
            self._chunks += event.chunk_start
            self._bytes += len(event.data)
            if self._chunks > MOST_CHUNKS + self._bytes // 1024:
                raise _TooManyChunksError(
                    f"the body has {self._chunks} chunks in its first {self._bytes} bytes; "
                    f"the limit is {MOST_CHUNKS}, and one for each KiB"
                )
        return event


class _LimitedProtocol(H11Protocol):
    """Connection that is closed if its client stalls.

    This class limits the time from the start of the connection, or the end of an answer, to the end of
    the headers of the next request. In between, the endpoint limits the time for each piece.
    """

    def __init__(self, config: uvicorn.Config, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        self.conn = _Connection()
        app: Any = config.app
        self._settings: Settings = app.state.service.settings
        self._pause = min(self._settings.header_seconds, self._settings.send_seconds) / LOOKS

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._turn_began: float | None = self.loop.time()
        # Unsent bytes of a finished answer, and when their number last fell.
        self._unsent, self._took = 0, 0.0
        self._look = self.loop.call_later(self._pause, self._look_after)
        self._half_closed: asyncio.TimerHandle | None = None
        limit = self._settings.max_connections
        beyond = len(self.connections) - limit
        if beyond > REFUSED:
            transport.abort()
        elif beyond > 0:
            self.app = ApiError(
                f"{limit} connections are open, which is the limit of this server; retry later",
                status=503,
                code="too_many_connections",
                headers={**RETRY, "Connection": "close"},
            ).response()

    def connection_lost(self, exc: Exception | None) -> None:
        self._look.cancel()
        if self._half_closed is not None:
            self._half_closed.cancel()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]  # what asyncio allows
        """Keep a connection whose client has closed its sending side after a complete request.

        A client that closes its connection sends the same as one that closes its sending side, but
        answers further bytes with a reset. An interim response provokes it before the answer starts.
        """
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body:
            return False
        if self._half_closed is None:
            if not cycle.response_started and cycle.scope["http_version"] == "1.1":
                interim = h11.InformationalResponse(status_code=102, headers=[])
                self.transport.write(self.conn.send(interim) or b"")
            self._look_for_reset(FIRST_LOOK)
        return True

    def _look_for_reset(self, delay: float) -> None:
        # asyncio no longer polls the socket for reads and therefore does not notice a reset.
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        elif not self.transport.is_closing():
            again = min(2 * delay, LAST_LOOK)
            self._half_closed = self.loop.call_later(delay, self._look_for_reset, again)

    def handle_events(self) -> None:
        try:
            super().handle_events()
        except _TooManyChunksError as error:
            self.send_400_response(str(error))
        if self.cycle is not None and not self.cycle.response_complete:
            self._turn_began = None

    def send_400_response(self, msg: str) -> None:
        """Answer an invalid request; if an answer was sent, only close the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    def on_response_complete(self) -> None:
        self._turn_began = self._took = self.loop.time()
        self._unsent = self.transport.get_write_buffer_size()
        super().on_response_complete()
        if self._half_closed is not None and self.cycle.response_complete:
            self.transport.close()

    def _look_after(self) -> None:
        now = self.loop.time()
        unsent = self.transport.get_write_buffer_size()
        over = self._turn_began is not None or self.transport.is_closing()
        if over and unsent > 0:
            if self._unsent == 0 or unsent < self._unsent:
                self._unsent, self._took = unsent, now
            slow = self._turn_began is not None and now - self._turn_began > self._settings.max_seconds
            if slow or now - self._took > self._settings.send_seconds:
                self.transport.abort()  # close() would wait until the client takes the rest
                return
        elif self._turn_began is not None and now - self._turn_began > self._settings.header_seconds:
            self.transport.close()
        self._look = self.loop.call_later(self._pause, self._look_after)
