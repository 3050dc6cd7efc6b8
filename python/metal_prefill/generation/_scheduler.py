"""Continuous batching of many prompts on one engine.

A :class:`Scheduler` holds streams, each of which is a prompt and the text that follows it. Every
:meth:`Scheduler.step` is one pass through the model, with the next token of each stream that is writing and
with pieces of prompts. New prompts enter as others end; a long prompt is computed in pieces between the
tokens of other streams.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent import futures
from typing import TYPE_CHECKING, Any, NamedTuple

from metal_prefill import _core
from metal_prefill._support.arguments import TokenIds, integer
from metal_prefill.engine import EngineOwner
from metal_prefill.errors import ConstraintError, KVMemoryError, SessionBusyError
from metal_prefill.generation._constraint import BATCH_PATIENCE
from metal_prefill.generation._sampling import TextOptions
from metal_prefill.generation._speculation import RunAhead
from metal_prefill.generation._stream import PendingCall, Stream, make_streams
from metal_prefill.generation._text_generation import NextTokens, Piece

if TYPE_CHECKING:
    from typing_extensions import Unpack

PROMPT_TURN = 64  # tokens of a prompt in one pass while others wait: a page
# Rows of long prompts in a pass with writing streams or waiting short prompts. Each row adds 3 to 5
# percent of the time of a single one (measured on a CPU): 32 make a pass 2 to 2.6 times as long.
LEAST_PROMPT_ROWS = 32
ROWS_PER_WRITING = 2  # further prompt rows for each stream that is writing, whose row takes time, too
SHORT_PROMPT = 4 * PROMPT_TURN  # maximum of tokens to compute of a prompt that precedes longer ones


class StreamRows(NamedTuple):
    """Rows of one stream in a pass."""

    stream: Stream
    rows: int  # number of rows, including drafts
    writing: bool  # whether they are rows of its text; otherwise they are rows of its prompt


class _Share(NamedTuple):
    """Requests that divide rows of a pass, and the maximum rows of one while others wait."""

    requests: Sequence[_core.Computation]
    rows: int
    turn: int

    @property
    def wanted(self) -> int:
        """Maximum number of rows of the requests."""
        return min(sum(request.left for request in self.requests), self.rows)


class PassRows(NamedTuple):
    writing: int  # number of streams that got tokens
    # Number of rows of prompts, and of calls.
    prompts: int
    calls: int
    seconds: float  # time of the pass
    streams: list[StreamRows]  # rows by stream


class Scheduler:
    """Computes many streams together.

    Not safe to call from several threads; :meth:`metal_prefill.Model.generate_async` is.

    Parameters
    ----------
    model
        Owner of the engine. Its default session is not used.
    max_streams
        Maximum number of active streams; others wait.

    Attributes
    ----------
    passes : int
        Number of passes so far.
    last_pass : PassRows
        Contents of the last pass.

    Notes
    -----
    Every stream that is writing gets a token in each pass. A prompt that waits gets its turn within
    ``ceil(max_streams / (LEAST_PROMPT_ROWS / PROMPT_TURN))`` passes: after its turn it goes to the back.
    While calls wait as well, prompts and calls alternate, and that number is twice as large.

    Prompts fill passes only while no stream is writing. Otherwise a pass has at most
    ``LEAST_PROMPT_ROWS + ROWS_PER_WRITING * writing`` rows of prompts that have more than ``SHORT_PROMPT``
    tokens to compute, and ``PROMPT_TURN + ROWS_PER_WRITING * writing`` rows of shorter ones, which go first.
    The limit of long prompts also holds while a short one waits, and for calls. Prompts whose tokens are
    scored (`prompt_logprobs`) are long prompts in this sense until the last of these tokens.

    If there are streams of several requests (:meth:`enter`), each request has an equal share of the active
    streams, as far as it needs them. While another request has too few, a stream of the one with the most
    active streams waits, and later recomputes tokens that the prefix cache no longer holds. For the limits
    above, the prompts of a request count as one, as do its writing streams. A short text is therefore delayed
    by the rows of the other active streams, but does not wait for the end of any.
    """

    def __init__(self, model: EngineOwner, *, max_streams: int = 32) -> None:
        max_streams = integer("max_streams", max_streams, 1)
        self._engine = model.engine
        self._core = model.engine.core
        self._ahead = RunAhead(model.engine)
        self._max_streams = self._most_streams = max_streams
        self._ends = 0  # streams that ended since `_max_streams` changed
        self._waiting: deque[Stream] = deque()
        self._active: deque[Stream] = deque()
        self._results: dict[Stream, Any] = {}  # of passes, not yet received by the streams
        self._made: list[tuple[Stream, Piece]] = []  # not yet returned by `step_pieces`
        self._calls: list[PendingCall] = []  # in order of arrival
        self._calls_first = False
        self._stepping = False
        self._several = False  # whether streams are grouped in requests
        self.passes = 0
        self.last_pass = PassRows(0, 0, 0, 0.0, [])

    @property
    def max_streams(self) -> int:
        """Maximum number of active streams.

        When memory runs out, it drops to the number of streams that kept their pages. It rises by one, up to
        the requested number, each time that as many streams have ended.
        """
        return self._max_streams

    @property
    def streams(self) -> int:
        """Number of streams that have not ended."""
        return len(self._waiting) + len(self._active)

    @property
    def writing(self) -> int:
        """Number of streams whose prompts are computed."""
        return sum(s.writing and not s.scoring for s in self._active)

    @property
    def waiting(self) -> int:
        """Number of streams that wait to become active."""
        return len(self._waiting)

    @property
    def busy(self) -> bool:
        """Whether the scheduler has tokens to compute."""
        return bool(self._waiting or self._active or self._calls)

    def submit(self, prompt: str | TokenIds, max_tokens: int = 128, **options: Unpack[TextOptions]) -> Stream:
        """Add a stream. Parameters are those of :meth:`metal_prefill.Session.stream`.

        Raises
        ------
        TypeError, ValueError, ContextOverflowError
            As for a prompt that is computed at once.
        KVMemoryError
            The prompt would not fit in ``kv_memory`` even alone. One that has to wait for the pages of others
            waits.
        """
        return self.submit_answers(prompt, 1, max_tokens, **options)[0]

    def submit_answers(
        self, prompt: str | TokenIds, n: int, /, max_tokens: int = 128, **options: Unpack[TextOptions]
    ) -> list[Stream]:
        """Add `n` streams of one prompt, which is computed once.

        Each has random numbers of its own. The first makes the text that :meth:`submit` makes with the same
        seed. Other parameters and errors are those of :meth:`submit`.
        """
        streams = make_streams(self._engine, prompt, n, max_tokens, **options)
        self._waiting += streams
        return streams

    def enter(self, streams: Iterable[Stream]) -> None:
        """Add the streams of one request, which :func:`make_streams` made.

        They share the scheduler with other requests as the notes on the class describe. All streams of
        :meth:`submit` belong to one user.
        """
        request = object()
        for stream in streams:
            stream.asked_by = request
            self._waiting.append(stream)

    def call(self, call: PendingCall) -> None:
        """Add requests of the caller, which share passes with the streams."""
        self._calls.append(call)

    def step(self) -> list[tuple[Stream, str]]:
        """Compute one pass and return the text it added, by stream; without streams, return an empty list.

        See :meth:`step_pieces`.
        """
        return [(stream, piece.text) for stream, piece in self.step_pieces() if piece.text]

    def step_pieces(self) -> list[tuple[Stream, Piece]]:
        """Compute one pass and return the tokens it added, by stream; without streams, return an empty list.

        A stream whose constraint takes long skips passes until the answer arrives; if all streams wait for
        one, the list is empty after a moment. A stream that ended has its `finish_reason`. An
        exception that is not a stream's own, such as KeyboardInterrupt, leaves every stream as it was before
        the pass or after it.

        Raises
        ------
        SessionBusyError
            A function that drafts for one of the streams called this, or another thread is computing a pass.
        """
        if self._stepping:
            raise SessionBusyError("the scheduler is computing a pass; start the next one when it has ended")
        try:
            self._stepping = True
            return self._pass()
        finally:
            self._stepping = False

    def _pass(self) -> list[tuple[Stream, Piece]]:
        self._drop_ended()
        self._take_results(0.0)  # to which constraints have answered in the meantime
        self._drop_ended()
        self._admit()
        self._several = len({s.asked_by for s in (*self._active, *self._waiting)}) > 1
        ready = [s for s in self._active if s not in self._results]
        prompts = [s for s in ready if not s.writing]
        scored = [s for s in ready if s.scoring]
        writing = [s for s in ready if s.writing and not s.scoring]
        calls = [request for call in self._calls for request in call.left]
        shares, scored_rows = self._prompt_shares(calls, prompts, scored, writing)
        given = sum(len(tokens.ids) for _, tokens in scored_rows)
        texts = self._next_tokens(writing, given + sum(share.wanted for share in shares))
        if not (texts or scored_rows or prompts or calls):
            if (answers := self._pending_answers()) and not self._made:
                futures.wait(answers, BATCH_PATIENCE, futures.FIRST_COMPLETED)
            return self._delivered()
        begin = time.perf_counter()
        continues = self._ahead.begin(
            not (scored_rows or prompts or calls) and all(s.text.can_run_ahead for s, _ in texts)
        )
        chosen = [*texts, *scored_rows]
        requests = [s.text.request(s.session, tokens, continues=continues) for s, tokens in chosen]
        rows_before = sum(request.computed for request in calls)
        whole = _Share(requests, self._core.pass_rows, self._core.pass_rows)
        self._core.forward_pass([*shares, whole])
        end = time.perf_counter()
        self.passes += 1
        results = [(s, request.take_result()) for (s, _), request in zip(chosen, requests, strict=True)]
        rows = [StreamRows(s, len(tokens.ids), not s.scoring) for s, tokens in chosen]
        for stream in prompts:
            assert stream.request is not None
            if n := stream.note_pass(begin):
                rows.append(StreamRows(stream, n, writing=False))
            if stream.request.finished:
                results.append((stream, stream.request.take_result()))
        for part in rows:
            if not part.writing:  # it had its turn, and goes to the back
                self._active.remove(part.stream)
                self._active.append(part.stream)
        call_rows = sum(request.computed for request in calls) - rows_before
        forced = any(tokens.forced for _, tokens in texts)
        total = sum(part.rows for part in rows) + call_rows
        seconds = self._ahead.end(0 if forced else total, rows[0].stream.session if rows else None)
        self.last_pass = PassRows(
            len(writing), sum(part.rows for part in rows if not part.writing), call_rows, seconds, rows
        )
        del calls, requests, whole, shares  # which hold sessions
        alone = len(self._active) == 1 and not self._calls
        for call in [call for call in self._calls if not call.left]:
            self._calls.remove(call)
            call.finish()
        for stream, result in results:
            if isinstance(result, list):
                stream.first_token = end if stream.first_token is None else stream.first_token
                stream.last_token = end
        self._results.update(results)
        self._take_results(BATCH_PATIENCE, alone=alone)
        self._drop_ended()
        return self._delivered()

    def _delivered(self) -> list[tuple[Stream, Piece]]:
        made, self._made = self._made, []
        return made

    def _take_results(self, patience: float, *, alone: bool = False) -> None:
        """Pass results to streams, unless their constraints take longer than `patience`.

        All constraints compute at the same time, and the streams wait for them together.
        """
        for stream, result in self._results.items():
            if isinstance(result, list):
                stream.text.send(result)
        if answers := self._pending_answers(slow=False):
            futures.wait(answers, patience)
        for stream in list(self._results):
            if stream.text.pending is None or stream.text.pending.done():
                self._made += self._take(stream, self._results[stream], alone)
                self._results.pop(stream, None)

    def _pending_answers(self, *, slow: bool = True) -> list[futures.Future[Any]]:
        """Return the answers of constraints that streams wait for, or only those of constraints in time."""
        texts = [stream.text for stream in self._results]
        return [t.pending for t in texts if t.pending is not None and (slow or not t.is_slow)]

    def _next_tokens(self, writing: list[Stream], prompt_rows: int) -> list[tuple[Stream, NextTokens]]:
        """Choose the next tokens of each stream, and drafts while the pass has room."""
        chosen = []
        rows, expected = prompt_rows + len(writing), float(len(writing))
        deadline = time.monotonic() + BATCH_PATIENCE
        for stream in writing:
            most = min(self._engine.exact_rows, self._core.pass_rows - rows + 1)
            try:
                tokens = stream.text.next_tokens(
                    most, rows, expected, sent=self._ahead.sent, deadline=deadline
                )
            except Exception as error:  # of the user's function
                stream.fail(error)
                continue
            rows, expected = rows + len(tokens.ids) - 1, expected + tokens.expected
            chosen.append((stream, tokens))
        return chosen

    def _asker(self, stream: Stream) -> object:
        """Return the unit that limits of passes count: requests if there are several, or else streams."""
        return stream.asked_by if self._several else stream

    def _prompt_shares(
        self,
        requests: list[_core.Computation],  # of calls
        prompts: list[Stream],
        scored: list[Stream],
        writing: list[Stream],
    ) -> tuple[list[_Share], list[tuple[Stream, NextTokens]]]:
        """Divide the rows of a pass among calls, short prompts and long ones; choose the scored ones."""
        full, askers = self._core.pass_rows, len({self._asker(s) for s in writing})
        room = max(full - len(writing), LEAST_PROMPT_ROWS)
        sizes = {s: s.left + s.computed for s in (*prompts, *scored)}
        sizes |= {s: len(s.ids) for s in self._waiting}
        wanted: Counter[object] = Counter()
        for stream, size in sizes.items():
            wanted[self._asker(stream)] += size
        short = [s for s in prompts if wanted[self._asker(s)] <= SHORT_PROMPT]
        long = [s for s in prompts if s not in short]
        fewest = LEAST_PROMPT_ROWS + ROWS_PER_WRITING * askers
        most_short, most_long = room, room
        if (long or scored) and (short or writing):
            most_long = min(room // 2 if short else room, fewest)
            most_short -= most_long
        if writing:
            most_short = min(most_short, PROMPT_TURN + ROWS_PER_WRITING * askers)
        scored_rows = self._scored_rows(scored, most_long, len(long))
        most_long -= sum(len(tokens.ids) for _, tokens in scored_rows)
        calls = _Share(requests, min(room, fewest) if writing else room, full)
        shares = [
            _Share([s.request for s in some if s.request is not None], most, PROMPT_TURN)
            for some, most in ((short, most_short), (long, most_long))
        ]
        # In turn, so that neither keeps the other waiting.
        self._calls_first = not self._calls_first
        return ([calls, *shares] if self._calls_first else [*shares, calls]), scored_rows

    def _scored_rows(self, scored: list[Stream], room: int, others: int) -> list[tuple[Stream, NextTokens]]:
        """Choose the rows of prompts for their log probabilities, and leave other prompts their part."""
        rows = []
        room = -(-room * len(scored) // max(len(scored) + others, 1))
        for i, stream in enumerate(scored):
            turn = max(min(PROMPT_TURN, room), -(-room // (len(scored) - i)))
            most = min(stream.left, self._engine.exact_rows, turn, room)
            if most > 0:
                rows.append((stream, stream.text.next_tokens(most)))
                room -= len(rows[-1][1].ids)
        return rows

    def _admit(self) -> None:
        """Activate streams, of the requests with the fewest active ones first.

        If there is no room, a stream of a request with at least two more active ones waits instead.
        """
        while self._waiting:
            active = Counter(s.asked_by for s in self._active)
            chosen = min(self._waiting, key=lambda s: active[s.asked_by])
            if len(self._active) >= self._max_streams:
                others = [
                    s
                    for s in self._active
                    if active[s.asked_by] >= active[chosen.asked_by] + 2 and s not in self._results
                ]
                if not others:
                    return
                self._suspend(max(reversed(others), key=lambda s: active[s.asked_by]))
            self._waiting.remove(chosen)
            # The others of its request go to the back.
            self._waiting = deque(sorted(self._waiting, key=lambda s: s.asked_by is chosen.asked_by))
            chosen.begin(self._engine)
            self._active.append(chosen)

    def _suspend(self, stream: Stream) -> None:
        """Release the memory of an active stream, and make it wait."""
        stream.restart()
        self._active.remove(stream)
        self._waiting.appendleft(stream)

    def _take(self, stream: Stream, result: Any, alone: bool) -> Iterator[tuple[Stream, Piece]]:
        """Note the result of a pass for a stream, and yield its tokens.

        `alone`: during the pass, neither other streams nor calls held memory.
        """
        if isinstance(result, KVMemoryError) and not alone:
            # Others will end and leave room.
            self._suspend(stream)
            self._max_streams = max(len(self._active), 1)
            self._ends = 0
        elif isinstance(result, Exception):
            stream.fail(result)
        elif result is not None:
            try:
                for piece in stream.take(result):
                    yield stream, piece
            except ConstraintError as error:
                stream.fail(error)

    def _drop_ended(self) -> None:
        for stream in [s for s in (*self._active, *self._waiting) if s.finish_reason is not None]:
            if stream in self._active:
                self._active.remove(stream)
                self._note_end()
            else:
                self._waiting.remove(stream)
            self._results.pop(stream, None)
            stream.release()
            stream.text.close()
        self._calls = [call for call in self._calls if not call.results.cancelled()]

    def _note_end(self) -> None:
        """Raise the limit once as many streams ended as it allows.

        Only the end of a stream releases memory. If the limit rose sooner, streams would take each other's
        pages and compute their prompts again, without end.
        """
        self._ends += 1
        if self._ends >= self._max_streams:
            self._max_streams = min(self._max_streams + 1, self._most_streams)
            self._ends = 0
