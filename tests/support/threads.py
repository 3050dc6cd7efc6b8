"""Calls of functions by concurrent threads, and sessions in use by another thread."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from metal_prefill import Session

HANGS = 120  # seconds after which a thread counts as hanging; the machine may be busy
T = TypeVar("T")


def running_threads() -> int:
    """Return the number of threads of this process, on Linux."""
    return len(os.listdir("/proc/self/task"))


def at_once(work: Callable[[int], T], threads: int = 4) -> list[T]:
    """Call `work` in several threads that start together; return their results, or raise an error of one."""
    start = threading.Barrier(threads)
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            start.wait(HANGS)
            results[number] = work(number)
        except BaseException as error:
            errors.append(error)

    running = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(HANGS)
    assert not any(thread.is_alive() for thread in running), f"no result within {HANGS} s"
    if errors:
        raise errors[0]
    return [results[number] for number in range(threads)]


@contextmanager
def in_use(session: Session, prompt: Sequence[int]) -> Iterator[None]:
    """Hold another thread in the callback after the first chunk of a prompt."""
    inside, done = threading.Event(), threading.Event()

    def hold(finished: int, total: int) -> None:
        inside.set()
        done.wait(HANGS)

    thread = threading.Thread(target=session.forward_prompt, args=(prompt,), kwargs={"progress": hold})
    thread.start()
    inside.wait(HANGS)
    try:
        yield
    finally:
        done.set()
        thread.join()
