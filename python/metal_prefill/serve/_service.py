"""State shared by all endpoints of a server: the model, its engine loop, limits, metrics."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from typing import TypeVar

import anyio
import anyio.to_thread

from metal_prefill.errors import GGUFError
from metal_prefill.generation._constraint import MOST_COMPILING, NotCompiledError, may_compile
from metal_prefill.generation._engine_loop import EngineLoop
from metal_prefill.generation._scheduler import Scheduler
from metal_prefill.generation._stream import Stream
from metal_prefill.hub._local_file import model_name
from metal_prefill.model import Model
from metal_prefill.serve._activity import Activity, Metrics
from metal_prefill.serve._errors import CLOSE, RETRY, ApiError, log
from metal_prefill.serve._forms import LARGE
from metal_prefill.serve._prefix_store import PrefixStore
from metal_prefill.serve._settings import Settings
from metal_prefill.tasks._embedding import check_pooling
from metal_prefill.tasks._reranking import Options, check_ranks

_T = TypeVar("_T")

PREPARERS = 8  # threads that read prompts: tokens, templates
# Bytes of a text, or BYTES_PER_TOKEN for each token of the context if that is more. Encoding takes up to 200
# times as much memory.
MOST_TEXT = 1 << 20
BYTES_PER_TOKEN = 8
MOST_RETRY_AFTER = 60  # seconds
HELD = 32  # requests of the largest size that may be in flight, or more smaller ones
MOST_SCORED = 1 << 28  # bytes of log probabilities whose texts have not ended
MOST_UNSENT = 1 << 28  # bytes of answers, other than streams, that clients have not received


class Service:
    """A model that a server serves."""

    def __init__(self, model: Model, settings: Settings) -> None:
        self.model, self.engine = model, model.engine
        self.settings = settings
        self.names = list(settings.names) or [model_name(model.path)]
        self.no_text = ""  # reason that the model generates no text; empty if it does
        try:
            self.engine.check_generates()
        except ValueError as error:
            self.no_text = str(error)
        self.created = int(time.time())
        self.metrics = Metrics(model)
        # Requests that arrive or are answered; log probabilities of their texts; answers that are being sent.
        self.requests = InFlight("requests in flight", HELD * settings.max_body)
        self.scores = InFlight("log probabilities of requests in flight", MOST_SCORED)
        self.answers = InFlight("answers that clients have not received", MOST_UNSENT)
        self._turns = anyio.Semaphore(1)
        self.activity = Activity(model)
        self.loop = EngineLoop(model, max_streams=settings.max_streams, after_pass=self._after_pass)
        self._store = (
            None
            if settings.prefix_store is None
            else PrefixStore(self.engine, settings.prefix_store, settings.prefix_store_bytes)
        )
        self._texts = 0  # that were admitted and have not ended
        self._mean_seconds = 1.0  # of a request, over the latest ones
        self._closing = False
        self._noted_ids = False
        self._answering: set[anyio.CancelScope] = set()
        self._preparers = anyio.CapacityLimiter(PREPARERS)
        # Constraints have separate threads: other prompts do not wait while some compile.
        self._constrainers = anyio.CapacityLimiter(MOST_COMPILING)
        self._inspectors = anyio.CapacityLimiter(1)  # at most one core describes the server's activity
        self.text_workers = anyio.CapacityLimiter(settings.max_streams)

    def _after_pass(self, scheduler: Scheduler) -> None:
        self.metrics.after_pass(scheduler)
        self.activity.after_pass(scheduler)

    def check_model(self, name: str | None) -> str:
        """Return the name of the model that a request selects; raises ApiError for any other."""
        if name is None or name in self.names:
            return name or self.names[0]
        raise ApiError(
            f"The model {name!r} does not exist; this server has {' or '.join(map(repr, self.names))}",
            status=404,
            code="model_not_found",
            param="model",
        )

    @property
    def most_text(self) -> int:
        """Bytes that a text may have."""
        return max(MOST_TEXT, BYTES_PER_TOKEN * self.engine.max_context)

    def check_text(self, text: str, param: str) -> None:
        """Raise `ApiError` if a text takes too much memory to encode."""
        if 4 * len(text) > self.most_text:
            self.check_size(len(text.encode("utf-8", "replace")), param)

    def check_size(self, size: int, param: str) -> None:
        """Raise `ApiError` if a text has too many bytes."""
        if size > self.most_text:
            raise ApiError(
                f"{param}: a text of {size} bytes; the limit is {self.most_text}",
                param=param,
                code="text_too_long",
            )

    def note_foreign_ids(self, ids: list[int]) -> None:
        """Log once that ids lack the tokens around each text, probably because of another tokenizer."""
        frame = self.engine.tokenizer.frame
        begin, end = list(frame.begin), list(frame.end)
        framed = ids[: len(begin)] == begin and ids[len(ids) - len(end) :] == end
        if not (framed or self._noted_ids):
            self._noted_ids = True
            log.warning(
                "token ids to embed lack the tokens around texts of %s: unless its own tokenizer made them, "
                "their vectors are meaningless; OpenAIEmbeddings of LangChain sends texts with "
                "check_embedding_ctx_length=False",
                self.names[0],
            )

    def tasks(self) -> list[str]:
        """Return the tasks: ``completion``, ``chat``, ``embedding``, ``rerank`` and ``classification``.

        ``chat`` requires a chat template in the file; without one, conversations have a plain format.
        """
        engine = self.engine
        tasks = ["completion"] if engine.config.causal else []
        if tasks and self.engine.tokenizer.chat_template:
            tasks.append("chat")
        with suppress(ValueError, GGUFError):
            check_pooling(engine, self.settings.pooling)
            tasks.append("embedding")
        with suppress(ValueError, GGUFError):
            check_ranks(engine, Options())
            tasks.append("rerank")
        if engine.head.labels and engine.head.pooling != "none":
            tasks.append("classification")
        return tasks

    @asynccontextmanager
    async def turn(self, size: int) -> AsyncIterator[Callable[[], None]]:
        """Wait for the turn of a body of `size` bytes; the returned function ends the turn early."""
        with ExitStack() as held:
            if size > LARGE:
                await self._turns.acquire()
                held.callback(self._turns.release)
            yield held.close

    @contextmanager
    def admitted(self, texts: int) -> Iterator[None]:
        """Admit a request while the queue has room."""
        settings = self.settings
        room = settings.max_streams + settings.max_queue
        if texts > room:
            raise ApiError(
                f"{texts} texts are wanted; this server takes {room} at a time", code="too_many_texts"
            )
        if self._texts + texts > room:
            waiting = max(self._texts - settings.max_streams, 0)
            seconds = self._mean_seconds * (1 + waiting / settings.max_streams)
            raise ApiError(
                f"the queue is full: {waiting} texts wait, of {settings.max_queue} that may",
                status=429,
                code="queue_full",
                headers={"Retry-After": str(min(max(math.ceil(seconds), 1), MOST_RETRY_AFTER))},
            )
        self._texts += texts
        begin = time.monotonic()
        try:
            yield
        finally:
            self._texts -= texts
            self._mean_seconds += 0.1 * (time.monotonic() - begin - self._mean_seconds)

    @contextmanager
    def answering(self) -> Iterator[anyio.CancelScope]:
        """Provide the scope of an answer, which `end_answers` cancels."""
        with anyio.CancelScope() as scope:
            self._answering.add(scope)
            if self._closing:
                scope.cancel()
            try:
                yield scope
            finally:
                self._answering.discard(scope)

    def end_answers(self) -> None:
        """Cancel the answers in flight and to all later requests; called in the event loop."""
        self._closing = True
        for scope in self._answering:
            scope.cancel()

    async def streams(self, work: Callable[[], list[Stream]]) -> list[Stream]:
        """Make streams in a thread, and load the stored prefixes of their prompts into the cache.

        Work with a constraint that must be compiled first is done again among the few that may compile.
        """

        def prepared() -> list[Stream]:
            streams = work()
            if self._store is not None:
                for stream in streams:
                    if stream.reuses:
                        self._store.load(stream.prompt, stream.prefix_namespace)
            return streams

        compiles = may_compile.set(False)
        try:
            return await self.prepare(prepared)
        except NotCompiledError:
            pass
        finally:
            may_compile.reset(compiles)
        return await anyio.to_thread.run_sync(prepared, limiter=self._constrainers)

    def note_prompts(self, streams: Iterable[Stream]) -> None:
        """Store prefixes that finished prompts share with others."""
        if self._store is not None:
            for stream in streams:
                if stream.reuses:
                    self._store.note(stream.prompt, stream.prefix_namespace)

    def close(self) -> None:
        """Wait until pending prefixes are stored."""
        if self._store is not None:
            self._store.close()

    async def prepare(self, work: Callable[[], _T]) -> _T:
        """Run a function that prepares a request, in a thread."""
        return await anyio.to_thread.run_sync(work, limiter=self._preparers)

    async def inspect(self, work: Callable[[], _T]) -> _T:
        """Read the state of the server in a thread that prompts do not wait for, one call at a time."""
        return await anyio.to_thread.run_sync(work, limiter=self._inspectors)


class InFlight:
    """Count of bytes in flight, with a limit."""

    def __init__(self, what: str, most: int) -> None:
        self._what, self._most = what, most
        self.size = self.holders = 0

    @contextmanager
    def holding(self, size: int = 0) -> Iterator[Held]:
        """Count bytes, and those that are added, until the end of the context."""
        held = Held(self)
        held.add(size)
        self.holders += 1
        try:
            yield held
        finally:
            self.size -= held.size
            self.holders -= 1

    def check(self) -> None:
        """Raise `ApiError` if the bytes exceed the limit."""
        if self.size > self._most:
            raise ApiError(
                f"{self._what} exceed {self._most} bytes in total; retry later",
                status=503,
                code="too_many_bytes",
                headers={**CLOSE, **RETRY},
            )


class Held:
    """Bytes in flight of one request."""

    def __init__(self, of_all: InFlight) -> None:
        self._of_all = of_all
        self.size = 0

    def add(self, size: int) -> None:
        self.size += size
        self._of_all.size += size

    def check(self) -> None:
        """Raise `ApiError` if too many bytes are held, of which this request has at least its share."""
        if self.size * self._of_all.holders >= self._of_all.size:
            self._of_all.check()
