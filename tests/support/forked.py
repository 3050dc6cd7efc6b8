"""Work in a forked process."""

import os
import signal
import threading
from collections.abc import Callable

HANGS = 60


def in_child(work: Callable[[], object], hangs: float = HANGS) -> str:
    """Run `work` in a forked process, and return its result or raise its error here.

    A child that takes longer than `hangs` seconds is killed.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = str(work())
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(writing, answer.encode())
        os._exit(0)
    os.close(writing)
    watchdog = threading.Timer(hangs, os.kill, (child, signal.SIGKILL))
    watchdog.start()
    with os.fdopen(reading, "rb") as file:
        answer = file.read().decode()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    watchdog.cancel()
    return answer if status == 0 else f"the child ended with {status}"
