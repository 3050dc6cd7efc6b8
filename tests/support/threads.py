"""Functions that several threads call at the same time."""

import threading
from collections.abc import Callable
from typing import TypeVar

HANGS = 120  # seconds after which a thread is taken to hang; the machine may be busy
T = TypeVar("T")


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
