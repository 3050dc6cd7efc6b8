"""Work of many threads on one model, compared with that of a model without other users.

Sessions belong to single threads, which know their tokens; a few are shared. Meanwhile allocations fail: a
call may then raise, and must leave its session unchanged.
"""

from __future__ import annotations

import asyncio
import ctypes
import ctypes.util
import gc
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from metal_prefill import DeviceError, KVMemoryError, Model, Session
from metal_prefill._support import threads
from support.allocation_faults import failing_allocation
from support.missing import resident_bytes

REFUSALS = (MemoryError, DeviceError, KVMemoryError)
CONTEXT = 320
MOST_SESSIONS = 4  # of a thread
MADE = 6  # tokens of a text
SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_k": 40, "repeat_penalty": 1.1}
GROWTH = 8 << 20  # bytes; memory kept by allocators varies by this amount from round to round
MOST_STREAMS = 256  # concurrent texts of a server, each with two jobs at most
JOBS, JOB_S = "metal_prefill jobs", 120.0  # name of threads; maximum time of a job
ROUND_S = 20.0
SETTLING = 3  # rounds after which memory is stable
SEED = os.environ.get("SOAK_SEED", "1")
SECONDS = float(os.environ.get("SOAK_SECONDS", "0"))  # of a test and device; 0: the time of the suite
# Sanitizers keep freed memory.
UNDER_SANITIZER = any(name in os.environ for name in ("ASAN_OPTIONS", "TSAN_OPTIONS"))


class Cancelled(Exception):
    """Raised in a progress callback."""


class Oracle:
    """Makes one call at a time on a model without other users: no batches, no sharing, no other threads."""

    def __init__(self, path: Path, device: str, chunk_tokens: int) -> None:
        self._model = Model(path, device=device, threads=1, chunk_tokens=chunk_tokens, prefix_memory=0)
        self._session = self._model.session(max_context=CONTEXT)
        self._lock = threading.Lock()
        self._answer = lru_cache(512)(self._compute)

    def _compute(self, call: Callable[..., Any], tokens: tuple[int, ...], **options: Any) -> Any:
        with self._lock:
            while True:
                with suppress(*REFUSALS):
                    self._session.rewind(0)
                    found = call(self._session, tokens, **options)
                    return found if isinstance(found, np.ndarray) else "".join(found)

    def logits(self, tokens: list[int]) -> bytes:
        return bytes(self._answer(Session.forward_prompt_logits, tuple(tokens)))

    def scores(self, tokens: list[int], first: int) -> bytes:
        """Return the log probabilities of the tokens after `first`."""
        return bytes(self._answer(Session.score, tuple(tokens))[first:])

    def text(self, prompt: list[int], seed: int) -> str:
        """Return a sampled text."""
        options = {"seed": seed, "speculate": "off", **SAMPLED}
        return str(self._answer(Session.generate, tuple(prompt), max_tokens=MADE, **options))

    def close(self) -> None:
        self._model.close()


@dataclass
class Held:
    """A session of one thread, and its expected tokens."""

    session: Session
    tokens: list[int] = field(default_factory=list)


class Worker:
    """One thread: random calls on its own sessions, on shared ones, and on the model.

    Attributes
    ----------
    calls : Counter of str
        Calls of each kind that were compared.
    refused : int
        Calls that raised for lack of memory.
    largest_batch : int
        Sessions of the largest batch.
    """

    def __init__(self, model: Model, oracle: Oracle, shared: list[Session], folder: Path, seed: str) -> None:
        self._model, self._oracle, self._shared, self._folder = model, oracle, shared, folder
        self._random = Random(seed)
        self._held: list[Held] = []
        self._name = seed
        self.calls = Counter[str]()
        self.refused = self.largest_batch = 0

    def run(self, end: float) -> None:
        """Make calls until a time of `time.monotonic`."""
        while time.monotonic() < end:
            self.step()
        self.close()

    def step(self) -> None:
        """Make a call."""
        kinds = (
            *(self._append, self._append, self._append, self._reuse, self._score, self._rewind, self._fork),
            *(self._save_and_load, self._batch, self._cancel, self._texts, self._tasks, self._leave),
            self._join,
        )
        if not self._held:
            with suppress(*REFUSALS):
                self._held.append(Held(self._model.session(max_context=CONTEXT)))
            return
        try:
            call = self._random.choice(kinds)
            call()
            self.calls[call.__name__] += 1
        except REFUSALS:
            self.refused += 1
        for held in self._held:
            assert held.session.tokens == held.tokens

    def close(self) -> None:
        for held in self._held:
            held.session.close()
        self._held.clear()

    def _any(self) -> Held:
        return self._random.choice(self._held)

    def _tokens(self, most: int = 90) -> list[int]:
        """Make a prompt, often with a prefix that other threads also use."""
        family, n = self._random.randrange(4), self._random.randrange(1, most)
        common = [(17 * i + 31 * family) % 280 for i in range(self._random.choice((0, 20, 64, 130)))]
        return [*common, *(self._random.randrange(280) for _ in range(n))][:most]

    def _room(self, held: Held, n: int) -> None:
        if len(held.tokens) + n > CONTEXT:
            held.session.rewind(0)
            held.tokens = []

    def _append(self) -> None:
        held = self._any()
        ids = self._random.choice((self._tokens(), self._tokens(), [self._random.randrange(280)]))
        self._room(held, len(ids))
        forward = held.session.forward_prompt_logits
        logits = forward(ids) if len(ids) > 1 else held.session.forward_token(ids[0])
        held.tokens += ids
        assert logits.tobytes() == self._oracle.logits(held.tokens)

    def _reuse(self) -> None:
        held, ids = self._any(), self._tokens(150)
        try:
            logits = held.session.forward_prompt_logits(ids, reuse=True)
        except REFUSALS:  # the session keeps the finished part of the prompt, or its earlier tokens
            tokens = held.session.tokens
            assert tokens in (held.tokens, ids[: len(tokens)])
            held.tokens = tokens
            self.refused += 1
            return
        held.tokens = ids
        assert logits.tobytes() == self._oracle.logits(ids)

    def _score(self) -> None:
        held, ids = self._any(), self._tokens(40)
        if len(ids) < 2:
            return
        self._room(held, len(ids))
        scores = held.session.score(ids)
        whole, before = [*held.tokens, *ids], len(held.tokens)
        held.tokens += ids[:-1]
        assert scores.tobytes() == self._oracle.scores(whole, before)

    def _rewind(self) -> None:
        held = self._any()
        held.tokens = held.tokens[: self._random.randrange(len(held.tokens) + 1)]
        held.session.rewind(len(held.tokens))

    def _fork(self) -> None:
        held = self._any()
        self._keep(Held(held.session.fork(), list(held.tokens)))

    def _keep(self, held: Held) -> None:
        if len(self._held) == MOST_SESSIONS:
            self._held.pop(self._random.randrange(MOST_SESSIONS)).session.close()
        self._held.append(held)

    def _save_and_load(self) -> None:
        held, path = self._any(), self._folder / f"{self._name}.session"
        held.session.save(path)
        self._keep(Held(self._model.load_session(path, max_context=CONTEXT), list(held.tokens)))

    def _batch(self) -> None:
        chosen = self._random.sample(self._held, self._random.randrange(1, len(self._held) + 1))
        self.largest_batch = max(self.largest_batch, len(chosen))
        ids = [self._tokens(self._random.choice((2, 9, 60))) for _ in chosen]
        for held, tokens in zip(chosen, ids, strict=True):
            self._room(held, len(tokens))
        outputs: list[Any] = self._random.choices(("logits", "greedy", "none"), k=len(chosen))
        results = self._model.forward_batch(
            [held.session for held in chosen], ids, output=outputs, return_errors=True
        )
        for held, tokens, output, result in zip(chosen, ids, outputs, results, strict=True):
            if isinstance(result, REFUSALS):
                self.refused += 1
                continue
            held.tokens += tokens
            if output == "none":
                assert result is None
                continue
            expected = np.frombuffer(self._oracle.logits(held.tokens), np.float32)
            assert np.array_equal(result, expected if output == "logits" else expected.argmax())

    def _cancel(self) -> None:
        held, ids = self._any(), self._tokens(150)
        self._room(held, len(ids))
        most = self._random.randrange(len(ids))

        def progress(done: int, total: int) -> None:
            if done > most:
                raise Cancelled

        with suppress(Cancelled):
            held.session.forward_prompt(ids, progress=progress)
        held.tokens = [*held.tokens, *ids][: held.session.position]

    def _request(self) -> tuple[list[int], int]:
        return self._tokens(50), self._random.randrange(1000)

    def _texts(self) -> None:
        """Compute texts together: prompts enter as others end."""
        requests = [self._request() for _ in range(3)]
        texts = [""] * len(requests)
        prompts = [(ids, {"seed": seed}) for ids, seed in requests]
        for i, piece in self._model.generate_many(prompts, MADE, max_streams=2, **SAMPLED):
            texts[i] += str(piece)
        assert texts == [self._oracle.text(ids, seed) for ids, seed in requests]

    def _tasks(self) -> None:
        """Run tasks that share the engine loop with other threads' tasks; one ends early."""
        requests = [self._request() for _ in range(2)]

        async def write(ids: list[int], seed: int, most: int) -> str:
            text = ""
            async for piece in self._model.generate_async(ids, MADE, seed=seed, **SAMPLED):
                text += piece
                if len(text) >= most:
                    break
            return text

        async def both() -> tuple[str | BaseException, str | BaseException]:
            return await asyncio.gather(
                write(*requests[0], 10**6), write(*requests[1], 1), return_exceptions=True
            )

        for (ids, seed), text in zip(requests, asyncio.run(both()), strict=True):
            if isinstance(text, BaseException):
                raise text
            assert self._oracle.text(ids, seed).startswith(text)

    def _leave(self) -> None:
        """Abandon a text after its first piece."""
        held, (ids, seed) = self._any(), self._request()
        pieces = held.session.generate(ids, MADE, seed=seed, **SAMPLED)
        first = ""
        try:
            first = next(pieces, "")
        finally:
            del pieces
            held.tokens = held.session.tokens
        assert self._oracle.text(ids, seed).startswith(first)

    def _join(self) -> None:
        """Replace the contents of a session that is shared with other threads by a prompt."""
        session, ids = self._random.choice(self._shared), self._tokens(120)
        logits = session.forward_prompt_logits(ids, reuse=True)
        assert logits.tobytes() == self._oracle.logits(ids)


@dataclass
class Footprint:
    """Resources of a process while nothing runs."""

    resident: int  # bytes
    descriptors: int
    threads: int  # without those of jobs
    jobs: int  # threads that wait for the next job of a constraint: as many as concurrent jobs so far
    children: int  # running child processes

    @classmethod
    def now(cls) -> Footprint:
        """Measure after jobs have ended and free memory has been returned."""
        gc.collect()
        end = time.monotonic() + JOB_S
        while (jobs := [t.name for t in threading.enumerate()].count(JOBS)) > len(threads._idle):
            assert time.monotonic() < end, "a job did not end"
            time.sleep(0.01)
        with suppress(AttributeError, OSError):
            ctypes.CDLL(ctypes.util.find_library("c")).malloc_trim(0)
        others = threading.active_count() - jobs
        return cls(resident_bytes(), len(os.listdir("/proc/self/fd")), others, jobs, _children())


def rounds(counts: Counter[str]) -> Iterator[tuple[int, float]]:
    """Yield the number of each round and its seconds until the time is over; then check that nothing grew."""
    end = time.monotonic() + SECONDS
    footprints: list[Footprint] = []
    while not footprints or time.monotonic() < end:
        yield len(footprints), min(ROUND_S, max(end - time.monotonic(), 0.5))
        footprints.append(Footprint.now())
        print(f"{footprints[-1]} {dict(counts)}", flush=True)
    for found in footprints[SETTLING:]:
        settled = footprints[SETTLING - 1]
        assert found.descriptors <= settled.descriptors
        assert found.threads <= settled.threads
        assert found.jobs <= 2 * MOST_STREAMS
        assert found.children <= settled.children
        assert UNDER_SANITIZER or found.resident <= settled.resident + GROWTH


def _children() -> int:
    """Return the number of processes whose parent is this one."""
    parents = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it ended meanwhile
            parents.append(int(path.read_text().rpartition(")")[2].split()[1]))
    return parents.count(os.getpid())


def fail_now_and_then(device: str, random: Random, end: float) -> int:
    """Make single allocations fail until a time of `time.monotonic`; return how many failed.

    On Metal there are few: only buffers, while pools grow.
    """
    most, pause = (100, 0.02) if device == "cpu" else (4, 2.0)
    came = 0
    while time.monotonic() < end:
        with failing_allocation(device, random.randrange(1, most)) as fault:
            time.sleep(random.uniform(0.001, pause))
        came += fault.came
    return came


def opened(path: Path, device: str) -> tuple[Model, Oracle]:
    """Open a model for workers, and its oracle."""
    chunk = 64 if device == "cpu" else 8  # on Metal, bits do not depend on splits of up to 8 tokens
    page = 64 * 4 * 32 * 2 * 2
    model = Model(
        path, device=device, threads=2, chunk_tokens=chunk, prefix_memory=20 * page, kv_memory=200 * page
    )
    return model, Oracle(path, device, chunk)


def assert_released(model: Model) -> None:
    """Check that a model without open sessions holds only pages of its prefix cache."""
    while any(thread.name == "metal_prefill engine loop" for thread in threading.enumerate()):
        time.sleep(0.01)
    gc.collect()  # frees sessions of texts
    stats = model.stats()
    assert stats["kv_pool_bytes"] == stats["prefix_bytes"]


def soak(path: Path, device: str, folder: Path, seconds: float, seed: str) -> dict[str, int]:
    """Run threads for some time, and return counts.

    Raises
    ------
    AssertionError
        A result differs from the oracle, or a session from its expected tokens.
    """
    model, oracle = opened(path, device)
    shared = [model.session(max_context=CONTEXT) for _ in range(2)]
    workers = [Worker(model, oracle, shared, folder, f"{seed}-{i}") for i in range(6)]
    end = time.monotonic() + seconds
    with ThreadPoolExecutor(len(workers)) as pool:
        running = [pool.submit(worker.run, end) for worker in workers]
        faults = fail_now_and_then(device, Random(seed), end)
    for worker in running:
        worker.result()
    for session in shared:
        session.close()
    assert_released(model)
    model.close()
    oracle.close()
    return {
        "calls": sum(worker.calls.total() for worker in workers),
        "refused": sum(worker.refused for worker in workers),
        "failed allocations": faults,
    }
