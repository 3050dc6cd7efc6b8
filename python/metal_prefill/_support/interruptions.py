"""Ctrl-C during work that must complete, or that converts KeyboardInterrupt to another error."""

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


@contextmanager
def whole_interruptions() -> Iterator[None]:
    """Raise KeyboardInterrupt for any error of a block that Ctrl-C has interrupted.

    Native code that calls Python may raise SystemError or TypeError then, and an import ImportError.
    """
    with interruptions() as heard:
        try:
            yield
        except Exception:
            if heard:
                raise KeyboardInterrupt from None
            raise


@contextmanager
def deferred_interruptions() -> Iterator[None]:
    """Defer the handler of Ctrl-C until the block has ended."""
    heard: list[tuple[int, FrameType | None]] = []
    handler = signal.getsignal(signal.SIGINT)
    try:
        if callable(handler):
            signal.signal(signal.SIGINT, lambda number, frame: heard.append((number, frame)))
    except ValueError:  # only the main thread can receive signals
        handler = None
    try:
        yield
    finally:
        if callable(handler):
            signal.signal(signal.SIGINT, handler)
            if heard:
                handler(*heard[0])
