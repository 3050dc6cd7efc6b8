"""Constraints on a text: its allowed and its forced next tokens, as computed by llguidance.

llguidance runs only in worker processes, which end if they exceed a limit on time or memory.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent import futures
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, finalize, proxy

from metal_prefill._support.forks import renew_in_child
from metal_prefill._support.threads import in_thread
from metal_prefill.errors import ConstraintError, MissingExtraError
from metal_prefill.generation._constraint_process import (
    PATIENCE,
    Answer,
    ForkServer,
    Limits,
    NoWorkerError,
    Worker,
    WorkerEnded,
)
from metal_prefill.generation._constraint_worker import STACK

if TYPE_CHECKING:
    from metal_prefill.text._tokenizer import Tokenizer

MOST_CHARACTERS = 1 << 20  # of a source
MOST_KEPT = 16  # compiled constraints of a vocabulary, each with a worker
MOST_COMPILING = 2  # at a time
COMPILE_SECONDS = 5.0  # of processor time for a source; large published schemas take less than one
# To compile it again, or to replay a text, if another text or an external signal ended the worker.
AGAIN_SECONDS = 1.0
# Processor time for a request of a text. A mask usually takes less than 0.01 s, and 0.1 s at the limits of
# llguidance.
STEP_SECONDS = 0.25
# Seconds that a batch waits for requests of its texts. Later answers leave their texts out of passes.
BATCH_PATIENCE = 0.02
STEP_PATIENCE = 10.0  # wall-clock seconds for such a request, in case the worker hangs without computing
# Bytes of a worker, for a constraint and its texts. Sources within llguidance's limits take up to 100 MB.
MEMORY = 256 << 20
# Requests of one source that exceed a limit or crash. After the first, other texts of the source, which have
# other tokens, continue in another worker; after the second, they fail.
MOST_STRIKES = 2
_SHOWN = 200  # characters of a message


class NotCompiledError(Exception):
    """A source is not compiled yet, and `may_compile` forbids to wait for it."""


may_compile = ContextVar("may_compile", default=True)


class _Vocabulary:
    """A tokenizer prepared for constraints, and its compiled constraints."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        ids = range(tokenizer.vocab_size)
        self._server = ForkServer(
            [tokenizer.token_bytes(i) for i in ids],
            [i for i in ids if tokenizer.is_special(i)],
            sorted(tokenizer.stop_ids),
        )
        # A vocabulary must keep neither its tokenizer nor itself alive.
        self._encode = partial(_encode, proxy(tokenizer))
        self._known: OrderedDict[tuple[str, str], _Compiled] = OrderedDict()
        self._lock = threading.Lock()
        self._compiling = threading.BoundedSemaphore(MOST_COMPILING)

    def compiled(self, kind: str, source: str) -> _Compiled:
        """Return a compiled constraint, which is kept for further texts, as is its error."""
        if len(source) > MOST_CHARACTERS:
            raise ConstraintError(
                f"{kind}: {len(source):,} characters exceed the limit of {MOST_CHARACTERS:,}"
            )
        key = (kind, source)
        if (known := self._find(key)) is None:
            if not may_compile.get():
                raise NotCompiledError
            with self._compiling:
                known = self._find(key) or self._compile(key)
        if known.refusal is not None:
            raise ConstraintError(*known.refusal.args)
        return known

    def _find(self, key: tuple[str, str]) -> _Compiled | None:
        with self._lock:
            if (known := self._known.get(key)) is not None:
                self._known.move_to_end(key)
        return known

    def _compile(self, key: tuple[str, str]) -> _Compiled:
        known = _Compiled(self._server, self._encode, *key)
        with self._lock:
            self._known[key] = known
            while len(self._known) > MOST_KEPT:
                self._known.popitem(last=False)
        return known


def _encode(tokenizer: Tokenizer, text: bytes) -> list[int]:
    return tokenizer.encode(text.decode("utf-8"), add_bos=False)


class _Compiled:
    """A constraint in a worker process."""

    def __init__(self, server: ForkServer, encode: Any, kind: str, source: str) -> None:
        self.kind = kind  # ``json_schema``, ``regex`` or ``grammar``
        # Error for further texts: the constraint does not compile, or a request exceeded a limit.
        self.refusal: ConstraintError | None = None
        self.slow = False  # whether the latest request took longer than a batch waits
        self.mask = b""  # of the first token
        self._server, self._encode, self._source = server, encode, source
        self._strikes = 0
        self._lock = threading.Lock()  # guards the restart of the worker
        self._start(Limits(COMPILE_SECONDS, PATIENCE), trial=True)

    def _start(self, limits: Limits, *, trial: bool) -> None:
        """Compile the constraint in a new worker, or reject all texts with it."""
        self._worker = self._server.fork()
        arguments = (self.kind, self._source, MEMORY, trial)
        try:
            (error,), self.mask = self._worker.ask(limits, self._encode, "compile", *arguments)
        except WorkerEnded as ended:
            self.refusal, self._strikes = self._error("compiling", limits, ended), MOST_STRIKES
            return
        if error:
            self.refusal, self._strikes = ConstraintError(self.message(error)), MOST_STRIKES
            self._worker.end()

    def _error(self, task: str, limits: Limits, ended: WorkerEnded) -> ConstraintError:
        """Return the error of a request whose worker ended; raise `NoWorkerError` if it is not the cause."""
        if ended.hung:
            raise NoWorkerError(
                f"{self.kind}: {task} it, a process did not respond within {limits.patience:g} s"
            ) from None
        if ended.late:
            return ConstraintError(
                f"{self.kind}: {task} it takes more than {limits.seconds:g} s of processor time"
            )
        return ConstraintError(
            f"{self.kind}: {task} it takes more than {MEMORY >> 20} MiB of memory, or {STACK >> 20} MiB of "
            f"stack (exit status {ended.status})"
        )

    def message(self, error: str) -> str:
        """Return the message of an error of llguidance, shortened."""
        error = " ".join(error.split())
        if error.startswith("NoExtensionBias"):
            error = "no text satisfies it"
        return f"{self.kind}: {error[:_SHOWN]}"

    def ask(self, text: Constraint, action: str, *arguments: Any) -> Answer:
        """Send a request for a text, and send it again if an external signal ended the worker.

        Raises ConstraintError if the request exceeded a limit.
        """
        begin = time.monotonic()
        for last in (False, True):
            worker = self._live_worker()
            replayed = None if text.worker is worker else text.taken
            limits = Limits(STEP_SECONDS + (AGAIN_SECONDS if replayed else 0), STEP_PATIENCE)
            try:
                answer = worker.ask(limits, self._encode, action, text.number, replayed, *arguments)
                break
            except WorkerEnded as ended:
                error = self._error("matching", limits, ended)
                if ended.late or last:
                    with self._lock:
                        self.refusal = error
                        self._strikes += 1
                    raise ConstraintError(*error.args) from None
        text.be_in(worker)
        self.slow = time.monotonic() - begin > BATCH_PATIENCE
        return answer

    def _live_worker(self) -> Worker:
        with self._lock:
            if not self._worker.alive:
                if self._strikes < MOST_STRIKES:
                    self._start(Limits(AGAIN_SECONDS, STEP_PATIENCE), trial=False)
                if self.refusal is not None and self._strikes >= MOST_STRIKES:
                    raise ConstraintError(*self.refusal.args)
            return self._worker


_vocabularies: WeakKeyDictionary[Tokenizer, _Vocabulary] = WeakKeyDictionary()
os.register_at_fork(after_in_child=_vocabularies.clear)  # the processes belong to the parent


def _vocabulary(tokenizer: Tokenizer) -> _Vocabulary:
    """Prepare a tokenizer for constraints; only the first call takes time."""
    if (known := _vocabularies.get(tokenizer)) is not None:
        return known
    if importlib.util.find_spec("llguidance") is None:
        raise MissingExtraError(
            "constrained output needs the package llguidance: pip install 'metal_prefill[guide]'"
        )
    return _vocabularies.setdefault(tokenizer, _Vocabulary(tokenizer))


_numbers = itertools.count()


class Step:
    """Result of advancing a constraint; the text takes its tokens one after another."""

    def __init__(self, taken: int, complete: bool, forced: list[int], error: str, met: bool) -> None:
        self._taken, self._complete, self._error = taken, complete, error
        self._position = 0
        # Tokens that must come next: at each of them the mask allows no other. The first ones are taken.
        self.forced = forced
        self.met = met  # whether the text may end after the tokens, if it can have no more

    def take(self) -> bool:
        """Take the next token, and return whether it completes the text, so that nothing can follow.

        Raises ConstraintError if the constraint has an error at this token.
        """
        self._position += 1
        if self._position > self._taken:
            raise ConstraintError(self._error)
        return self._complete and self._position == self._taken

    def check(self) -> None:
        """Raise the error that follows the last token, if there is one."""
        if self._error:
            raise ConstraintError(self._error)


class Constraint:
    """The constraint of one text, token by token.

    Raises ValueError if more than one is given, ConstraintError if it cannot be read, takes too much time,
    memory or stack, or nothing satisfies it, MissingExtraError if llguidance is not installed.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        # Schema of the text, which is JSON: a mapping, or its JSON.
        json_schema: Mapping[str, Any] | str | None = None,
        regex: str | None = None,  # the whole text matches it
        grammar: str | None = None,  # Lark grammar, from its rule `start`
    ) -> None:
        given = {"json_schema": json_schema, "regex": regex, "grammar": grammar}
        sources = {kind: source for kind, source in given.items() if source is not None}
        if len(sources) != 1:
            raise ValueError(f"a text has one constraint at most, got {' and '.join(sources)}")
        ((self._kind, source),) = sources.items()
        try:
            text = source if isinstance(source, str) else json.dumps(source)
        except RecursionError:
            raise ConstraintError(f"{self._kind}: its objects are nested too deeply") from None
        except (TypeError, ValueError) as error:
            raise ConstraintError(f"{self._kind}: {error}") from None
        self._tokenizer, self._source = tokenizer, text
        self.number = next(_numbers)
        self.taken: list[int] = []
        self._release: Any = None
        self.begin()
        renew_in_child(self, Constraint.begin)
        self._step: Step | None = None  # the latest one
        self._mask = self._compiled.mask  # of the next token; empty if there is none, or an error

    def begin(self) -> None:
        """Start without a worker and requests, also in a forked process, which compiles the source again."""
        if self._release is not None:
            self._release.detach()
        self.worker: Worker | None = None
        self._known: _Compiled | None = None
        self.pending: futures.Future[Answer] | None = None  # of :meth:`send`, until `advance` takes it
        self._latest: futures.Future[Answer] | None = None  # of the latest request

    @property
    def _compiled(self) -> _Compiled:
        if self._known is None:
            self._known = _vocabulary(self._tokenizer).compiled(self._kind, self._source)
        return self._known

    def be_in(self, worker: Worker) -> None:
        """Record the worker that holds the matcher of the text."""
        if worker is not self.worker:
            self._forget()
            self.worker = worker
            self._release = finalize(self, worker.release, self.number)
            self._release.atexit = False

    def close(self) -> None:
        """Make the worker forget the text. If the text continues, it is replayed."""
        if self._latest is not None:  # the worker may still need it
            self._latest.add_done_callback(lambda _: self._forget())
            self.pending = self._latest = None
        else:
            self._forget()

    def _forget(self) -> None:
        release, self._release = self._release, None  # the thread of an earlier request may also release it
        if release is not None:
            release()
        self.worker = None

    @property
    def slow(self) -> bool:
        """Whether the latest answer for its source took longer than a batch waits for answers."""
        return self._known is not None and self._known.slow

    def send(self, tokens: Sequence[int], most_forced: int, room: int) -> None:
        """Send the request of :meth:`advance` in a thread, unless it was sent before."""
        if self.pending is None:
            self.pending = self._in_thread("advance", list(map(int, tokens)), most_forced, room)

    def advance(
        self,
        tokens: Sequence[int],  # tokens of the text, without stop tokens
        most_forced: int = 0,  # maximum number of forced tokens to take; 0 does not compute them
        room: int | None = None,  # number of tokens that the text may still have
    ) -> Step:
        """Advance by tokens, as far as the mask allows them, and by forced tokens.

        Takes the answer to :meth:`send`, which had the same arguments, if that was called before. Raises
        ConstraintError if the request took too much time, memory or stack.
        """
        given = list(map(int, tokens))
        if self.pending is None:
            room = len(given) + most_forced + 1 if room is None else room
            answer = self._compiled.ask(self, "advance", given, most_forced, room)
        else:
            futures.wait([self.pending])
            sent, self.pending = self.pending, None
            answer = sent.result()
        (taken, complete, forced, error, met), self._mask = answer
        self.taken += [*given, *forced][:taken]
        message = self._compiled.message(error) if error else ""
        self._step = Step(taken, complete, forced, message, met)
        return self._step

    def ahead(self, drafts: Sequence[int], deadline: float | None = None) -> list[bytes]:
        """Return the mask after each draft, up to one that is not allowed or ends the text.

        Returns no masks if the answer has not arrived by `deadline`, on the clock of :func:`time.monotonic`.
        """
        if not drafts or (deadline is not None and self.slow):
            return []
        request = ("ahead", list(map(int, drafts)))
        if deadline is None:
            (count,), masks = self._compiled.ask(self, *request)
        else:
            try:
                (count,), masks = self._in_thread(*request).result(max(deadline - time.monotonic(), 0.0))
            except futures.TimeoutError:
                return []
        size = len(masks) // count if count else 0
        return [masks[i * size : (i + 1) * size] for i in range(count)]

    def _in_thread(self, *request: Any) -> futures.Future[Answer]:
        """Send a request in a thread after the answer to the previous one, whose error fails both."""
        earlier = self._latest

        def ask() -> Answer:
            if earlier is not None:
                earlier.result()
            return self._compiled.ask(self, *request)

        self._latest = in_thread(ask)
        return self._latest

    def mask(self) -> bytes:
        """Return the allowed tokens, one bit each, in words of 32 bits from the lowest bit."""
        if self._step is not None:
            self._step.check()
        return self._mask
