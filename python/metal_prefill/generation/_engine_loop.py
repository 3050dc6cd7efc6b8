"""Engine loop for requests of threads and tasks."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple

from metal_prefill import _core
from metal_prefill._support.forks import renew_in_child
from metal_prefill.engine import EngineOwner
from metal_prefill.generation._scheduler import Scheduler
from metal_prefill.generation._stream import PendingCall, Stream, make_streams
from metal_prefill.generation._text_generation import Piece

if TYPE_CHECKING:
    import asyncio


class Made(NamedTuple):
    """Result of a pass for one of the texts of a request."""

    text: int  # index of the text in its request
    pieces: list[Piece]
    ended: bool  # whether the text has ended; `Stream.finish_reason` and `Stream.error` have the reason


class PendingTexts:
    """The streams of one request, and the task that waits for them.

    Asynchronous iteration yields the results of each pass. It ends once all texts have ended, and raises an
    error only if the engine loop itself failed; the error of a text is in its stream.
    """

    def __init__(self, streams: Sequence[Stream]) -> None:
        import asyncio  # callers have imported it; it takes longer to import than most of the package

        self.streams = list(streams)
        self.loop = asyncio.get_running_loop()
        self.results: asyncio.Queue[list[Made] | Exception] = asyncio.Queue()
        self._left = dict(enumerate(self.streams))  # streams whose end the engine loop has not reported

    @property
    def done(self) -> bool:
        return not self._left

    def sorted(self, pieces: Mapping[Stream, list[Piece]]) -> list[Made]:
        """Return the results of a pass; texts that ended are included even without a piece."""
        made = [
            Made(i, pieces.get(stream, []), stream.finish_reason is not None)
            for i, stream in self._left.items()
            if stream in pieces or stream.finish_reason is not None
        ]
        for text in made:
            if text.ended:
                del self._left[text.text]
        return made

    def cancel(self) -> None:
        """End all texts before the next pass, and release their memory."""
        for stream in self.streams:
            stream.cancel()

    async def __aiter__(self) -> AsyncIterator[list[Made]]:
        running = len(self.streams)
        while running:
            made = await self.results.get()
            if isinstance(made, Exception):
                raise made
            running -= sum(text.ended for text in made)
            yield made


def _deliver(items: Iterable[tuple[PendingTexts, list[Made] | Exception]]) -> None:
    """Deliver the results of a pass with one call into each event loop, for all tasks that wait there."""
    of_loops: dict[asyncio.AbstractEventLoop, list[tuple[PendingTexts, list[Made] | Exception]]] = {}
    for item in items:
        of_loops.setdefault(item[0].loop, []).append(item)
    for loop, batch in of_loops.items():
        try:
            loop.call_soon_threadsafe(_put, batch)
        except RuntimeError:  # closed: no task is waiting
            for texts, _ in batch:
                texts.cancel()


def _put(batch: Iterable[tuple[PendingTexts, list[Made] | Exception]]) -> None:
    for texts, made in batch:
        texts.results.put_nowait(made)


class EngineLoop:
    """Run a scheduler in a separate thread while there is something to compute."""

    def __init__(
        self,
        model: EngineOwner,
        *,
        max_streams: int = 32,  # limit of the scheduler
        # Called in that thread with the scheduler after each pass.
        after_pass: Callable[[Scheduler], object] | None = None,
    ) -> None:
        self.engine = model.engine
        self._max_streams = max_streams
        self._after_pass = after_pass
        self.begin()
        renew_in_child(self, EngineLoop.begin)

    def begin(self) -> None:
        """Initialize, also in a forked process, which has neither the thread nor the waiting tasks."""
        self._lock = threading.Lock()  # guards the members below
        self._new: list[PendingTexts | PendingCall] = []
        self._running = False

    def _add(self, new: PendingTexts | PendingCall) -> None:
        with self._lock:
            self._new.append(new)
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name="metal_prefill engine loop", daemon=True).start()

    def enter(self, streams: Sequence[Stream]) -> PendingTexts:
        """Begin streams, from a task that then iterates over their results."""
        texts = PendingTexts(streams)
        self._add(texts)
        return texts

    def submit(self, requests: Sequence[_core.Computation]) -> Future[list[Any]]:
        """Compute requests in passes with the streams; see :meth:`Scheduler.call`.

        If the future is cancelled, nothing is computed from the next pass on.
        """
        call = PendingCall(requests)
        self._add(call)
        return call.results

    async def generate(self, prompt: Any, max_tokens: int, **options: Any) -> AsyncIterator[str]:
        """Continue a prompt; see :meth:`metal_prefill.Model.generate_async`."""
        import asyncio

        streams = await asyncio.to_thread(make_streams, self.engine, prompt, 1, max_tokens, **options)
        texts = self.enter(streams)
        try:
            async for made in texts:
                for piece in (piece for text in made for piece in text.pieces if piece.text):
                    yield piece.text
        finally:
            texts.cancel()
        if (error := texts.streams[0].error) is not None:
            raise error

    def _run(self) -> None:
        pending: list[PendingTexts | PendingCall] = []
        try:
            scheduler = Scheduler(self, max_streams=self._max_streams)
            while self._admit(scheduler, pending):
                passes = scheduler.passes
                pieces: defaultdict[Stream, list[Piece]] = defaultdict(list)
                for stream, piece in scheduler.step_pieces():
                    pieces[stream].append(piece)
                made = ((item, item.sorted(pieces)) for item in pending if isinstance(item, PendingTexts))
                _deliver((texts, results) for texts, results in made if results)
                pending = [item for item in pending if not item.done]
                if self._after_pass is not None and scheduler.passes != passes:
                    self._after_pass(scheduler)
        except Exception as error:
            with self._lock:
                self._running = False
                pending, self._new = [*pending, *self._new], []
            _deliver((item, error) for item in pending if isinstance(item, PendingTexts))
            for item in pending:
                if isinstance(item, PendingCall):
                    item.fail(error)

    def _admit(self, scheduler: Scheduler, pending: list[PendingTexts | PendingCall]) -> bool:
        """Pass new requests to the scheduler.

        Returns False if nothing is left to do; the loop then ends.
        """
        with self._lock:
            new, self._new = self._new, []
            if not new and not pending and not scheduler.busy:
                self._running = False
                return False
        pending += new
        for item in new:
            if isinstance(item, PendingTexts):
                scheduler.enter(item.streams)
            else:
                scheduler.call(item)
        return True
