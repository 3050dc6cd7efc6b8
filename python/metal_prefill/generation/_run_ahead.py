"""Passes that the engine submits before they are requested, and their times."""

import time

from metal_prefill import _core
from metal_prefill.engine import Engine


class RunAhead:
    """Times the passes of one text or one scheduler and notes them for all texts of the engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._next = False
        self._start = 0.0
        # Whether the engine may already be computing the next tokens, which then get no drafts.
        self.sent = False

    def begin(
        self,
        continues: bool,  # whether the chosen tokens will be appended next, without drafts
    ) -> bool:
        """Start the clock of a pass.

        Returns
        -------
        bool
            Whether to tell the engine so: it may then submit the next pass at once.
        """
        self._next = continues and self._engine.runs_ahead
        self._start = time.perf_counter()
        return self._next

    def end(
        self,
        rows: int,  # rows of the pass; 0 if its time does not represent passes with as many rows
        # A session of the pass. The host saw only the rest of a pass that was submitted ahead, so its time is
        # the GPU's.
        session: _core.Session | None,
    ) -> float:
        """Stop the clock and return the seconds that the host waited."""
        seconds = time.perf_counter() - self._start
        if rows:
            ahead = self.sent and session is not None
            known = session.stats()["gpu_seconds"] if ahead and session is not None else 0.0
            self._engine.row_cost.note(rows, max(seconds, known))
        self.sent = self._next
        return seconds
