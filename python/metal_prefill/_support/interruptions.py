"""Detection of Ctrl-C during imports."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interruptions() -> Iterator[list[int]]:
    """Yield a list of the Ctrl-C interrupts that occur while the block runs.

    Not all of them raise KeyboardInterrupt: if an import of NumPy is interrupted, it raises ImportError with
    a message about a broken installation.
    """
    heard: list[int] = []

    def hear(number: int, frame: FrameType | None) -> None:
        heard.append(number)
        signal.default_int_handler(number, frame)

    try:
        ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if ours:
            signal.signal(signal.SIGINT, hear)
    except ValueError:  # only the main thread can receive signals
        ours = False
    try:
        yield heard
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
