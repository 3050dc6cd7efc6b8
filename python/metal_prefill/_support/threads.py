"""Runs functions in threads, for callers that may stop waiting for the result."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

_Jobs = SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]]

_idle: list[_Jobs] = []  # threads that wait for a job


def in_thread(function: Callable[..., Any], *arguments: Any) -> Future[Any]:
    """Call a function in a daemon thread, and return its future.

    Jobs never wait for each other: a thread is started if none is idle, and kept for later jobs. Unlike those
    of :class:`concurrent.futures.ThreadPoolExecutor`, the threads do not delay the end of the process.
    """
    try:
        jobs = _idle.pop()
    except IndexError:
        jobs = SimpleQueue()
        threading.Thread(target=_serve, args=(jobs,), name="metal_prefill jobs", daemon=True).start()
    future: Future[Any] = Future()
    jobs.put((future, function, arguments))
    return future


def _serve(jobs: _Jobs) -> None:
    while True:
        future, function, arguments = jobs.get()
        result, error = None, None
        try:
            result = function(*arguments)
        except BaseException as raised:
            error = raised
        del function, arguments  # an idle thread keeps nothing alive
        _idle.append(jobs)
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)
        del future, result, error


os.register_at_fork(after_in_child=_idle.clear)
