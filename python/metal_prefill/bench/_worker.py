"""Worker process of one engine, which separates memory and threads of engines, and its parent's side.

The worker loads the engine and runs tests. It waits for the next one in a blocking read, which leaves the
cores to other engines.
"""

import gc
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from multiprocessing.connection import Connection, Pipe
from typing import Any, NamedTuple

from metal_prefill.bench import _engines, _machine
from metal_prefill.bench._cases import Case, stream_ids, text_ids, token_ids
from metal_prefill.bench._engines import Adapter, BenchError, Identity, Ids, Options
from metal_prefill.bench._model_file import task_ids

REST_S = 2.0  # longest wait for an engine's threads to sleep after a sample
REST_STEP_S = 0.02
TAIL_LINES = 5  # last lines of a process's log in an error message


class Loaded(NamedTuple):
    load_ns: int
    identity: Identity
    peak_rss: int  # bytes


class Taken(NamedTuple):
    """A run of a test."""

    ns: int
    switches: int  # involuntary context switches meanwhile
    peak_rss: int = 0  # bytes


def timed_run(adapter: Adapter, case: Case, vocab_size: int, task: Callable[[], Ids]) -> Taken:
    """Run a test once; `task` returns the ids of `cases.TASK`, for tests of copying."""
    if case.choice:
        given = case.choice in ("argmax", "sampled")
        ids = token_ids(case.n_depth + 1, vocab_size) if given else task()
        adapter.clear()
        adapter.prefill(ids[:-1])
        return _timed(lambda: adapter.choose(ids, case.n_gen, case.choice))
    if case.n_texts:
        texts = text_ids(case, vocab_size)
        return _timed(lambda: [adapter.embed(texts) for _ in range(case.calls)])
    if case.n_streams:
        ids = stream_ids(case, vocab_size)
        adapter.open_streams(case.n_streams, case.context)
        prefill, decode = adapter.prefill_streams, adapter.decode_streams
    else:
        ids = token_ids(case.context, vocab_size)
        adapter.clear()
        prefill, decode = adapter.prefill, adapter.decode
    if case.n_depth:
        prefill(ids[..., : case.n_depth])
    timed = ids[..., case.n_depth :]
    call = prefill if case.n_prompt else decode
    return _timed(lambda: call(timed))


def _timed(work: Callable[[], object]) -> Taken:
    switches = _machine.involuntary_switches()
    begin = time.perf_counter_ns()
    work()
    elapsed = time.perf_counter_ns() - begin
    return Taken(elapsed, _machine.involuntary_switches() - switches)


def _rest() -> None:
    """Wait until the engine's threads no longer spin for more work; some engines spin for 0.2 s."""
    deadline = time.monotonic() + REST_S
    used = time.process_time()
    while time.monotonic() < deadline:
        time.sleep(REST_STEP_S)
        before, used = used, time.process_time()
        if used - before < REST_STEP_S / 10:
            return


def main() -> None:
    """Run as a process: load the engine that the first message names, and run a test for each further one."""
    parent = Connection(int(sys.argv[1]))
    try:
        name, options, vocab_size = parent.recv()
        begin = time.perf_counter_ns()
        engine = _engines.load(name, options)
        task = cache(lambda: task_ids(options.path))
        loaded = time.perf_counter_ns()
        parent.send(Loaded(loaded - begin, engine.identity(), _machine.peak_rss_bytes()))
        gc.disable()
        with suppress(EOFError):  # the parent has closed its end
            while True:
                taken = timed_run(engine, parent.recv(), vocab_size, task)
                gc.collect()
                _rest()
                parent.send(taken._replace(peak_rss=_machine.peak_rss_bytes()))
    except Exception as error:
        parent.send(f"{type(error).__name__}: {error}")
        raise


class LoggedProcess:
    """Child process whose output is kept for error messages."""

    def __init__(self, command: Sequence[str], **pipes: Any) -> None:
        # Lives as long as the process; end() closes it.
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(command, **{"stdout": self._log, "stderr": self._log, **pipes})

    def last_words(self) -> str:
        """Return the last lines of the process's output."""
        self._log.seek(0)
        return " / ".join(self._log.read().strip().splitlines()[-TAIL_LINES:])

    def end(self, seconds: float) -> None:
        """Wait for the process to end, and kill it after some time."""
        try:
            self._process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


class WorkerProcess(LoggedProcess):
    """Worker that runs an engine in its own process; if that ends, an error names the engine."""

    def __init__(self, name: str, options: Options, vocab_size: int) -> None:
        self.name = name
        self._connection, theirs = Pipe()
        command = (sys.executable, "-c", f"from {__name__} import main; main()", str(theirs.fileno()))
        with theirs:
            super().__init__(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        try:
            self.load_ns, self.identity, self.peak_rss = self._ask(
                (name, options, vocab_size), "loading the model"
            )
        except BaseException:
            self.close()
            raise

    def sample(self, case: Case) -> tuple[int, int]:
        """Run a test once; return nanoseconds and involuntary context switches."""
        ns, switches, self.peak_rss = self._ask(case, case.name)
        return ns, switches

    def close(self) -> None:
        self._connection.close()
        self.end(5)  # it ends by itself when its requests end

    def _ask(self, request: object, doing: str) -> Any:
        try:
            self._connection.send(request)
            reply = self._connection.recv()
        except (EOFError, ConnectionError):
            code, tail = self._process.wait(), self.last_words()
            how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
            raise BenchError(
                f"{self.name}: its process died ({how}) while {doing}" + (f": {tail}" if tail else "")
            ) from None
        if isinstance(reply, str):
            raise BenchError(f"{self.name}: {reply} (while {doing})")
        return reply
