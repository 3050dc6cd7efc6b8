"""Measured times of passes through a model."""

from __future__ import annotations

_ROW_SHARE = 0.12  # of the time of one row that another row takes, until it is measured: rather too little,
# or longer drafts would never be tried


class RowCost:
    """Seconds that passes take by their rows, as measured, where each row has an output or is of a prompt.

    Passes that another program delays must not look expensive: an estimate follows shorter times at once, and
    longer ones slowly.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}  # by number of rows, rounded up

    def note(self, rows: int, seconds: float) -> None:
        """Take the time of a pass."""
        key = _bucket(rows)
        known = self._seconds.get(key)
        if known is None:
            self._seconds[key] = seconds
        else:
            weight = 0.3 if seconds < known else 0.05
            self._seconds[key] = known + weight * (min(seconds, 2 * known) - known)

    def seconds(self, rows: int) -> float:
        """Estimate the time of a pass."""
        key = _bucket(rows)
        if key in self._seconds or not self._seconds:
            return self._seconds.get(key, float(rows))
        known = self._seconds.copy()  # other threads note their passes
        below = max((rows for rows in known if rows < key), default=None)
        above = min((rows for rows in known if rows > key), default=None)
        if below is not None and above is not None:
            share = (key - below) / (above - below)
            return known[below] + share * (known[above] - known[below])
        nearest = max(known) if above is None else min(known)
        one = known.get(1, known[nearest] / (1 + _ROW_SHARE * (nearest - 1)))
        return max(known[nearest] + _ROW_SHARE * one * (key - nearest), one)


def _bucket(rows: int) -> int:
    """Round up to a number of rows that is measured: steps of an eighth at least."""
    step = 1 << max(rows.bit_length() - 4, 0)
    return -(-rows // step) * step
