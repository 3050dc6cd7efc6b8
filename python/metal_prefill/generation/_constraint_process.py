"""Processes that compile and match constraints, and their limits; see `_constraint_worker.py`."""

from __future__ import annotations

import json
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias
from weakref import finalize

from metal_prefill.errors import ConstraintError
from metal_prefill.generation._constraint_worker import READY, SPELL

# Seconds after which a process that does not answer counts as hanging: one that prepares a vocabulary or
# compiles a source, which also have limits on processor time, or one that forks, for which others wait.
PATIENCE = 120.0
FORK_PATIENCE = 5.0

_PROGRAM = """
import sys
sys.path[:] = {path!r}
from metal_prefill.generation._constraint_worker import main
main()
"""

Encode: TypeAlias = Callable[[bytes], list[int]]
Answer: TypeAlias = tuple[list[Any], bytes]  # of a worker


class Limits(NamedTuple):
    seconds: float  # of processor time
    patience: float  # seconds to wait for an answer


class WorkerEnded(Exception):
    """A worker ended, or was ended, before it answered."""

    def __init__(self, status: int, hung: bool) -> None:
        super().__init__(f"exit status {status}")
        self.status = status  # exit status; negative: the number of a signal
        self.late = status == -signal.SIGPROF  # whether it exceeded its processor time
        self.hung = hung and not self.late  # whether it did not answer, without exceeding a limit


class NoWorkerError(ConstraintError):
    """A worker could not be started, or did not respond, regardless of its constraint."""


class Worker:
    """A process with one constraint, made by :meth:`ForkServer.fork`."""

    def __init__(self, server: ForkServer, requests: Connection, pid: int) -> None:
        self.alive = True  # whether it accepts requests
        self.pid = pid
        self._server = server
        self._requests = requests
        self._lock = threading.Lock()
        self._released: deque[int] = deque()  # texts whose matchers it can forget
        self._finalizer = finalize(self, _end_quietly, requests, server.ended, pid)

    def ask(
        self,
        limits: Limits,
        encode: Encode,  # function that tokenizes a string, which the worker may request before it answers
        # A method of the worker.
        action: str,
        *arguments: Any,
    ) -> Answer:
        """Send a request and return its answer.

        Raises WorkerEnded if the worker crashed, exceeded a limit or had ended before. It accepts no further
        requests.
        """
        with self._lock:
            answered = hung = False
            try:
                self._send(limits.seconds, action, *arguments)
                while True:
                    if not self._requests.poll(limits.patience):
                        hung = True
                        break
                    header, _, content = self._requests.recv_bytes().partition(b"\n")
                    answer: list[Any] = json.loads(header)
                    if answer != [SPELL]:
                        answered = True
                        return answer, content
                    try:
                        ids = encode(content)
                    except ValueError:  # not UTF-8
                        ids = None
                    self._requests.send_bytes(pickle.dumps(ids))
            except (EOFError, OSError):
                pass
            finally:  # also after KeyboardInterrupt: the next request must not read this answer
                if not answered:
                    self.alive = False
                    self._requests.close()
        self._finalizer.detach()
        raise WorkerEnded(self._server.end(self.pid), hung)

    def _send(self, seconds: float, action: str | None, *arguments: Any) -> None:
        self._requests.send_bytes(pickle.dumps((seconds, _taken(self._released), action, *arguments)))

    def release(self, text: int) -> None:
        """Forget a text, now or with the next request. Garbage collection may call this at any time."""
        self._released.append(text)
        if self.alive and self._lock.acquire(blocking=False):
            try:
                self._send(0, None)
            except OSError:  # the worker has ended; the next request reports it
                pass
            finally:
                self._lock.release()

    def end(self) -> None:
        """End the process, which has no texts."""
        self.alive = False
        self._finalizer()


def _taken(numbers: deque[int]) -> list[int]:
    """Remove all numbers, to which other threads may append."""
    taken = []
    while numbers:
        taken.append(numbers.popleft())
    return taken


def _end_quietly(requests: Connection, ended: deque[int], pid: int) -> None:
    requests.close()  # ends the process; the server collects its exit status later
    ended.append(pid)


class ForkServer:
    """A process with a prepared vocabulary, which forks for each constraint."""

    def __init__(self, tokens: list[bytes], special_ids: list[int], stop_ids: list[int]) -> None:
        self._vocabulary = (tokens, special_ids, stop_ids)
        self.ended: deque[int] = deque()  # forks that are no longer needed
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: Connection | None = None
        self._finalizer: Any = None

    def fork(self) -> Worker:
        """Return a new worker; raise NoWorkerError if no process could be started."""
        ours, theirs = socket.socketpair()
        requests = Connection(ours.detach())
        try:
            with theirs, self._lock:
                return Worker(self, requests, self._fork(theirs.fileno()))
        except BaseException:
            requests.close()
            raise

    def _fork(self, handle: int) -> int:
        """Fork with a connection for requests, and return the id of the process."""
        for _ in range(2):  # an external signal may have ended it
            if self._control is None:
                self._start()
            with suppress(EOFError, OSError):
                return self._ask(_taken(self.ended), handle)
        raise NoWorkerError("the process that checks constraints ended")

    def end(self, pid: int) -> int:
        """End a worker, if it has not ended, and return its exit status."""
        with self._lock, suppress(EOFError, OSError):
            if self._control is not None:
                return self._ask([pid])
        return -signal.SIGKILL

    def _ask(self, ended: list[int], handle: int | None = None) -> int:
        """End forks, and fork if there is a connection for that; return the last result."""
        assert self._control is not None
        assert self._process is not None
        try:
            self._control.send_bytes(pickle.dumps((handle is not None, ended)))
            if handle is not None:
                send_handle(self._control, handle, self._process.pid)
            if not self._control.poll(FORK_PATIENCE):
                raise EOFError
            return int(json.loads(self._control.recv_bytes().partition(b"\n")[0])[-1])
        except BaseException:
            self._stop()
            raise

    def _start(self) -> None:
        folder = Path(__file__).parents[2]  # of the package, which is not in the path of editable installs
        # The working directory, which an empty entry names, may have changed.
        path = [*(entry for entry in sys.path if isinstance(entry, str) and entry), str(folder)]
        ours, theirs = socket.socketpair()
        with theirs:
            self._control = Connection(ours.detach())
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", _PROGRAM.format(path=path)],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,  # so that Ctrl-C in a terminal does not end it
                )
            except BaseException:
                self._control.close()
                self._control = None
                raise
        self._finalizer = finalize(self, _stop, self._process, self._control)
        try:
            self._control.send_bytes(pickle.dumps(self._vocabulary))
            started = self._control.poll(PATIENCE) and self._control.recv_bytes() == READY
        except (EOFError, OSError):
            started = False
        except BaseException:
            self._stop()
            raise
        if not started:
            raise NoWorkerError(
                f"the process that checks constraints did not start: {sys.executable}, status {self._stop()}"
            )

    def _stop(self) -> int | None:
        """End the process and its forks, and return its exit status."""
        self._control = self._process = None
        return self._finalizer()


def _stop(process: subprocess.Popen[bytes], control: Connection) -> int:
    control.close()  # ends it, after its forks
    try:
        return process.wait(1)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
