"""Calls that compute tokens of other sessions in the passes of a scheduler."""

from collections.abc import Sequence
from typing import Any

from metal_prefill import _core


class PendingCall:
    """Requests of sessions that the scheduler does not own, until passes have computed them."""

    def __init__(self, requests: Sequence[_core.Computation]) -> None:
        self.requests = list(requests)
        # Results as the native engine returns them; None until all requests are finished.
        self.results: list[Any] | None = None
        self.cancelled = False  # if set, the call is dropped before the next pass


class PendingCalls:
    """Calls in order of arrival."""

    def __init__(self) -> None:
        self._calls: list[PendingCall] = []

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, requests: Sequence[_core.Computation]) -> PendingCall:
        """Add a call."""
        pending = PendingCall(requests)
        self._calls.append(pending)
        return pending

    @property
    def requests(self) -> list[_core.Computation]:
        """Requests that are not finished, the oldest first."""
        return [request for call in self._calls for request in call.requests if not request.finished]

    def take_results(self) -> None:
        """Take the results of calls all of whose requests are finished, and drop these calls."""
        for call in [call for call in self._calls if all(request.finished for request in call.requests)]:
            self._calls.remove(call)
            call.results = [request.take_result() for request in call.requests]
            call.requests = []

    def drop_cancelled(self) -> None:
        """Drop the calls whose results are no longer awaited."""
        self._calls = [pending for pending in self._calls if not pending.cancelled]
