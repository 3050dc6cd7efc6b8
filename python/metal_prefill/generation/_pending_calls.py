"""Calls that compute tokens of other sessions in the passes of a scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from metal_prefill.generation._batch_call import BatchCall
from metal_prefill.generation._text_call import TextCall


class PendingCall:
    """A call with tokens of sessions that the scheduler does not own, until a pass has computed them.

    Attributes
    ----------
    call : BatchCall or TextCall
    results : list or None
        Results as the native engine returns them; None before the pass.
    cancelled : bool
        If set, the call is dropped before the next pass.
    """

    def __init__(self, call: BatchCall | TextCall) -> None:
        self.call = call
        self.results: list[Any] | None = None
        self.cancelled = False

    @property
    def rows(self) -> int:
        """Number of rows of a pass that the call takes."""
        return self.call.rows


class PendingCalls:
    """Calls in order of arrival; each is computed in one pass."""

    def __init__(self) -> None:
        self._calls: list[PendingCall] = []

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, call: BatchCall | TextCall) -> PendingCall:
        """Add a call."""
        pending = PendingCall(call)
        self._calls.append(pending)
        return pending

    def fitting(self, room: int, taken: int) -> list[PendingCall]:
        """Choose the calls of a pass, the oldest first; one that is larger than a pass goes alone.

        `taken` of the `room` rows are in use.
        """
        chosen: list[PendingCall] = []
        for pending in self._calls:
            if taken and taken + pending.rows > room:
                break
            chosen.append(pending)
            taken += pending.rows
        return chosen

    def take_results(self, calls: Sequence[PendingCall], results: Sequence[Any]) -> None:
        """Distribute results, in the order of the calls and their sessions, and remove the calls."""
        at = 0
        for pending in calls:
            self._calls.remove(pending)
            end = at + pending.call.count
            pending.results = list(results[at:end])
            at = end

    def drop_cancelled(self) -> None:
        """Drop the calls whose results are no longer awaited."""
        self._calls = [pending for pending in self._calls if not pending.cancelled]


def rows_of(calls: Sequence[PendingCall]) -> int:
    """Return the number of rows of a pass that calls take."""
    return sum(pending.rows for pending in calls)
