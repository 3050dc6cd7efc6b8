"""One engine loop that threads and tasks feed."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from metal_prefill.scheduler import Scheduler, SharedEngine, Stream

_END = object()


@dataclass(eq=False)
class _Request:
    """A stream to be, and who waits for its text."""

    arguments: tuple[Any, int, dict[str, Any]]
    deliver: Callable[[Any], None]
    cancelled: bool = False


class EngineLoop:
    """Runs a scheduler in a thread of its own for as long as there are streams."""

    def __init__(self, model: SharedEngine) -> None:
        self._model = model
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()  # guards what follows
        self._new: list[_Request] = []
        self._running = False

    async def generate(self, prompt: Any, max_tokens: int, **options: Any) -> AsyncIterator[str]:
        """Continue a prompt; see :meth:`metal_prefill.Model.generate_async`."""
        if self._process != os.getpid():  # a forked process has neither the thread nor who waits for it
            self._begin()
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[Any] = asyncio.Queue()

        def deliver(item: Any) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(queue.put_nowait, item)

        request = _Request((prompt, max_tokens, options), deliver)
        with self._lock:
            self._new.append(request)
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name="metal_prefill engine loop", daemon=True).start()
        try:
            while (item := await queue.get()) is not _END:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            request.cancelled = True

    def _run(self) -> None:
        requests: dict[Stream, _Request] = {}
        try:
            scheduler = Scheduler(self._model)
            while self._admit(scheduler, requests):
                for stream, request in requests.items():
                    if request.cancelled:
                        stream.cancel()
                for stream, piece in scheduler.step():
                    requests[stream].deliver(piece)
                for stream in [s for s in requests if s.finish_reason is not None]:
                    requests.pop(stream).deliver(stream.error or _END)
        except Exception as error:
            with self._lock:
                self._running = False
                failed, self._new = [*requests.values(), *self._new], []
            for request in failed:
                request.deliver(error)

    def _admit(self, scheduler: Scheduler, requests: dict[Stream, _Request]) -> bool:
        """Hand new requests to the scheduler; False, once and for all, when there is nothing left to do."""
        with self._lock:
            new, self._new = self._new, []
            if not new and not requests:
                self._running = False
                return False
        for request in new:
            prompt, max_tokens, options = request.arguments
            try:
                requests[scheduler.submit(prompt, max_tokens, **options)] = request
            except Exception as error:
                request.deliver(error)
        return True
