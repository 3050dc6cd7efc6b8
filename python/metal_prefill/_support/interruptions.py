"""Ctrl-C while modules are imported."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interruptions() -> Iterator[list[int]]:
    """List the interruptions by Ctrl-C while the block runs. Not all become KeyboardInterrupt.

    NumPy, interrupted while it is imported, raises ImportError and speaks of a bad installation.
    """
    heard: list[int] = []

    def hear(number: int, frame: FrameType | None) -> None:
        heard.append(number)
        signal.default_int_handler(number, frame)

    try:
        ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if ours:
            signal.signal(signal.SIGINT, hear)
    except ValueError:  # not the main thread, which alone hears signals
        ours = False
    try:
        yield heard
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
