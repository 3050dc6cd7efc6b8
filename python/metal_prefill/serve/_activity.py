"""Recent activity of a server for ``/activity``, and Prometheus metrics for ``/metrics``.

Activity comprises passes, texts, pages, and prefixes that prompts share. An answer describes texts only by
numbers, and only texts of the requested prefix namespace. It adds up rows of others, as in ``/metrics``.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request

from metal_prefill import _core
from metal_prefill.errors import ClosedError
from metal_prefill.generation._scheduler import Scheduler
from metal_prefill.generation._stream import Stream
from metal_prefill.model import Model
from metal_prefill.serve._errors import ApiError
from metal_prefill.serve._prefix_store import PAGE

# Latest passes that are kept; several count as one if they have only next tokens of the same texts.
PASSES = 64
ENDED_TEXTS = 64  # texts that are kept after their end, of all namespaces
MOST_TEXTS = 32  # texts in an answer
MOST_DIGITS = 18  # of the number of a pass in a query
COMPARED_PROMPTS = 8  # latest ones of a namespace, with which the next one is compared
COMPARED_TOKENS = 8192  # first tokens of a prompt, which are compared with others
LEAST_TOKENS = 64  # repeated after a change; fewer cost little
_MOST_SHIFT = 16  # tokens by which a change lengthens or shortens a prompt

Ids = npt.NDArray[np.int32]


def pass_number(request: Request) -> int:
    """Return the query parameter ``since`` of a request, or -1; raise `ApiError` for another query."""
    for name, value in request.query_params.multi_items():
        if name != "since":
            raise ApiError(f"Unrecognized query parameter: {name}", param=name, code="unknown_parameter")
        if not (value.isascii() and value.isdigit() and len(value) <= MOST_DIGITS):
            raise ApiError(
                f"since must be the number of a pass, in at most {MOST_DIGITS} digits; got {value[:40]!r}",
                param="since",
                code="invalid_value",
            )
    return int(request.query_params.get("since", -1))


class Change(NamedTuple):
    """The first difference of a prompt from one that it repeats, such as the time in a system message.

    Everything after it is computed again, because the states of a token depend on all tokens before it.
    """

    position: int  # number of tokens before it
    tokens: int  # tokens after it that an earlier prompt has, too, and that are computed again


def change_of(prompt: Ids, earlier: Sequence[Ids]) -> Change | None:
    """Return the change with which a prompt repeats one of the earlier ones; None if it repeats none.

    At least half of the tokens after the longest shared prefix must be the same, at positions that differ by
    up to 16.
    """
    shared = [_core.common_prefix(prompt, other) for other in earlier]
    position = max(shared, default=0)
    rest = prompt[position:]
    repeated = 0
    for other, begin in zip(earlier, shared, strict=True):
        if begin == position < len(other):
            after = other[position:]
            repeated = max(
                repeated,
                *(_equal(rest[shift:], after) for shift in range(_MOST_SHIFT + 1)),
                *(_equal(rest, after[shift:]) for shift in range(1, _MOST_SHIFT + 1)),
            )
    if repeated < max(LEAST_TOKENS, len(rest) / 2):
        return None
    return Change(position, repeated)


def _equal(a: Ids, b: Ids) -> int:
    n = min(len(a), len(b))
    return int(np.count_nonzero(a[:n] == b[:n]))


@dataclass(eq=False)
class _Text:
    request: str
    index: int
    namespace: str
    prompt: Ids  # at most COMPARED_TOKENS
    stream: Stream | None  # None once its request has ended
    change: Change | None
    last: dict[str, Any] | None = None  # its description when its request ended

    @property
    def waits(self) -> bool:
        """Whether no pass has computed a part of its prompt."""
        return self.stream is not None and self.stream.started is None

    def end(self) -> None:
        """Keep the description in place of the stream."""
        self.last, self.stream = {**self.described(), "state": "ended"}, None

    def described(self) -> dict[str, Any]:
        stream = self.stream
        if stream is None:
            return self.last or {}
        writing = stream.writing
        return {
            "id": self.request,
            "index": self.index,
            "state": "text" if writing else "waiting" if self.waits else "prompt",
            "prompt_tokens": stream.prompt_tokens,
            "ready_tokens": stream.ready_tokens,
            "cached_tokens": stream.cached_tokens if writing else 0,
            "tokens": stream.text.writer.made,
            "change": None if self.change is None else self.change._asdict(),
        }


@dataclass
class _Passes:
    """Consecutive passes with rows of the same texts; one pass unless it has only next tokens."""

    first: int  # numbers of the passes
    last: int
    seconds: float
    texts: list[_Text | None]  # None if it is unknown
    rows: list[int]  # of each text, in all passes together
    writing: list[bool]  # by text; otherwise they are rows of its prompt
    inputs: int

    def add(self, later: _Passes) -> bool:
        """Add the pass that follows, if it has only next tokens of the same texts."""
        only_texts = not (self.inputs or later.inputs) and all(self.writing) and all(later.writing)
        if not only_texts or self.texts != later.texts:
            return False
        self.last = later.last
        self.seconds += later.seconds
        self.rows = [a + b for a, b in zip(self.rows, later.rows, strict=True)]
        return True


class Activity:
    """Record of recent passes and texts.

    Thread-safe. The engine loop calls :meth:`after_pass`, which takes time in proportion to the texts of the
    pass, and waits only while another thread copies a list of bounded size.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._lock = threading.Lock()  # guards the members below
        self._texts: dict[Stream, _Text] = {}
        self._left: list[Stream] = []  # streams that the next pass removes from `_texts`
        self._ended: deque[_Text] = deque(maxlen=ENDED_TEXTS)
        self._passes: deque[_Passes] = deque(maxlen=PASSES)
        self._number = 0  # of the latest pass; each scheduler of the engine loop counts from 1

    def enter(self, request: str, streams: Sequence[Stream]) -> Change | None:
        """Add the texts of a request by the id of its answer; return the change of its first prompt."""
        first = streams[0]
        with self._lock:
            known = [*self._ended, *self._texts.values()]
        earlier = [text.prompt for text in known if text.namespace == first.prefix_namespace]
        change = change_of(first.prompt[:COMPARED_TOKENS], earlier[-COMPARED_PROMPTS:])
        with self._lock:
            for i, stream in enumerate(streams):
                prompt, own = stream.prompt[:COMPARED_TOKENS], change if i == 0 else None
                self._texts[stream] = _Text(request, i, stream.prefix_namespace, prompt, stream, own)
        return change

    def leave(self, streams: Iterable[Stream]) -> None:
        with self._lock:
            for stream in streams:
                if (text := self._texts.get(stream)) is not None and text.stream is not None:
                    text.end()
                    self._ended.append(text)
                    # The pass in which it ended may not be recorded yet.
                    self._left.append(stream)

    def after_pass(self, scheduler: Scheduler) -> None:
        done = scheduler.last_pass
        with self._lock:
            texts = [self._texts.get(part.stream) for part in done.streams]
            rows = [part.rows for part in done.streams]
            writing = [part.writing for part in done.streams]
            self._number += 1
            passes = _Passes(self._number, self._number, done.seconds, texts, rows, writing, done.calls)
            if not self._passes or not self._passes[-1].add(passes):
                self._passes.append(passes)
            for stream in self._left:
                self._texts.pop(stream, None)
            self._left.clear()

    def described(self, namespace: str, since: int = -1) -> dict[str, Any]:
        """Return the texts of a namespace, and passes after number `since`, as JSON of bounded size."""
        with self._lock:
            passes = [replace(done) for done in self._passes if done.last > since]
            live = [text for text in self._texts.values() if text.stream is not None]
            ended = list(self._ended)
        own = [text for text in live if text.namespace == namespace]
        own_live = len(own)
        own.sort(key=lambda text: text.waits)  # the others first, each in the order of arrival
        own += [text for text in reversed(ended) if text.namespace == namespace]
        own = own[:MOST_TEXTS]
        numbers = {text: i for i, text in enumerate(own)}
        return {
            "passes": [_described_passes(done, numbers) for done in passes],
            "texts": [text.described() for text in own],
            "other_texts": len(live) - own_live,
            "pages": self._described_pages(),
            "prefixes": self._described_prefixes(namespace, [text.prompt for text in own]),
        }

    def _described_pages(self) -> dict[str, int]:
        stats = self._model.engine.core.stats()
        size = int(stats["kv_page_bytes"])
        return {
            "tokens": PAGE,
            "bytes": size,
            "in_use": int(stats["kv_pool_bytes"]) // size,
            "kept": int(stats["prefix_bytes"]) // size,
            "limit": int(stats["kv_limit_bytes"]) // size,
        }

    def _described_prefixes(self, namespace: str, prompts: Sequence[Ids]) -> list[dict[str, Any]]:
        core = self._model.engine.core
        nodes = prefix_tree(prompts)
        kept = [core.cached_tokens(namespace, prompt) for prompt in prompts]
        found = [max((kept[i] for i in node.prompts), default=0) for node in nodes]
        for i in reversed(range(len(nodes))):  # children follow their parents
            if (parent := nodes[i].parent) is not None:
                found[parent] = max(found[parent], found[i])
        return [
            {
                "parent": node.parent,
                "start": node.start,
                "tokens": node.end - node.start,
                "kept": min(max(most - node.start, 0), node.end - node.start),
                "texts": node.prompts,
            }
            for node, most in zip(nodes, found, strict=True)
        ]


def _described_passes(done: _Passes, numbers: dict[_Text, int]) -> dict[str, Any]:
    rows: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
    others = 0
    for text, count, writing in zip(done.texts, done.rows, done.writing, strict=True):
        number = None if text is None else numbers.get(text)
        if number is None:
            others += count
        else:
            rows[writing].append((number, count))
    return {
        "first": done.first,
        "last": done.last,
        "seconds": round(done.seconds, 6),
        "prompts": rows[False],
        "texts": rows[True],
        "inputs": done.inputs,
        "others": others,
    }


class Node(NamedTuple):
    """A run of tokens that prompts share."""

    parent: int | None  # index of the node whose tokens precede it
    # Positions of its tokens.
    start: int
    end: int
    prompts: list[int]  # indices of the prompts that end with it


def prefix_tree(prompts: Sequence[Ids]) -> list[Node]:
    """Return the radix tree of prompts, parents before their children.

    It has fewer than twice as many nodes as there are prompts.
    """
    nodes: list[Node] = []

    def grow(indices: list[int], start: int, parent: int | None) -> None:
        """Add the nodes of sorted prompts that agree in their first `start` tokens and have more."""
        while indices:
            token = prompts[indices[0]][start]
            alike = [i for i in indices if prompts[i][start] == token]
            end = _core.common_prefix(prompts[alike[0]], prompts[alike[-1]])
            longer = [i for i in alike if len(prompts[i]) > end]
            nodes.append(Node(parent, start, end, sorted(set(alike) - set(longer))))
            grow(longer, end, len(nodes) - 1)
            indices = indices[len(alike) :]

    # Big-endian bytes sort as the ids do, so that the first and the last of some prompts differ the most.
    grow(sorted(range(len(prompts)), key=lambda i: prompts[i].astype(">i4").tobytes()), 0, None)
    return nodes


_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_BATCH = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Metrics:
    """Counters of one server. Rates, such as tokens per second, are computed with Prometheus's ``rate``."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, model: Model) -> None:
        registry = self._registry = CollectorRegistry()
        counter = partial(Counter, namespace="metal_prefill", registry=registry)
        gauge = partial(Gauge, namespace="metal_prefill", registry=registry)
        histogram = partial(Histogram, namespace="metal_prefill", registry=registry)
        self.requests = counter("requests", "Answered requests", ("path", "status"))
        self.request_seconds = histogram("request_seconds", "Time of a request", ("path",), buckets=_SECONDS)
        self.first_token_seconds = histogram(
            "first_token_seconds", "Time from a request to the first token of its answer", buckets=_SECONDS
        )
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens")
        self.cached_tokens = counter("cached_tokens", "Prompt tokens found in the cache")
        self.generated_tokens = counter("generated_tokens", "Generated tokens")
        self._changes = counter("changed_prompts", "Prompts that repeat an earlier one after a change")
        self._repeated = counter(
            "repeated_tokens", "Tokens that were computed again because a token before them changed"
        )
        self._position = gauge(
            "changed_position", "Position of the first difference in the latest prompt with a change"
        )
        self._waiting = gauge("waiting_texts", "Queued texts")
        self._writing = gauge("active_texts", "Texts in flight")
        self._passes = counter("passes", "Passes through the model")
        self._pass_seconds = counter("pass_seconds", "Time of passes")
        self._prefill = counter("prefill_tokens", "Computed tokens of prompts and other inputs")
        self._batch = histogram("batch_texts", "Texts that received tokens from a pass", buckets=_BATCH)
        for name, text in (
            ("kv_pool_bytes", "K and V in use"),
            ("prefix_bytes", "K and V kept for later prompts with the same prefix"),
        ):
            gauge(name, text).set_function(partial(_memory, model, name))

    def after_pass(self, scheduler: Scheduler) -> None:
        rows = scheduler.last_pass
        self._waiting.set(scheduler.waiting)
        self._writing.set(scheduler.streams - scheduler.waiting)
        self._passes.inc()
        self._pass_seconds.inc(rows.seconds)
        self._prefill.inc(rows.prompts + rows.calls)
        if rows.writing:
            self._batch.observe(rows.writing)

    def count_prompt(self, stream: Stream) -> None:
        self.prompt_tokens.inc(stream.prompt_tokens)
        self.cached_tokens.inc(stream.cached_tokens)

    def count_change(self, change: Change | None) -> None:
        if change is not None:
            self._changes.inc()
            self._repeated.inc(change.tokens)
            self._position.set(change.position)

    def page(self) -> bytes:
        """Return the metrics in Prometheus's text format."""
        return generate_latest(self._registry)


def _memory(model: Model, name: str) -> float:
    """Return bytes of K and V; none are left of a closed model."""
    with suppress(ClosedError):
        return model.stats()[name]
    return 0.0
