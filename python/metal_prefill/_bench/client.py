"""The parent's end of a worker process."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Protocol

from metal_prefill._bench.cases import Case
from metal_prefill._bench.engines import Identity, Options
from metal_prefill._bench.errors import BenchError

TAIL_LINES = 5  # of a worker's last words


class Worker(Protocol):
    """An engine that can be asked for one sample at a time."""

    @property
    def name(self) -> str:
        """Name of the engine."""

    @property
    def identity(self) -> Identity:
        """What it says of itself."""

    @property
    def load_ns(self) -> int:
        """Nanoseconds from the path to ready."""

    def sample(self, case: Case) -> tuple[int, int]:
        """Run a test once; return nanoseconds and involuntary context switches."""

    def peak_rss(self) -> int:
        """Largest resident memory so far, in bytes."""

    def close(self) -> None:
        """End the process."""


WorkerFactory = Callable[[str, Options, int], Worker]


class WorkerProcess:
    """An engine in a process of its own.

    Parameters
    ----------
    name
        Key of `engines.KINDS`.
    options
        How it is to run.
    vocab_size
        Token ids lie below it.

    Raises
    ------
    BenchError
        The engine cannot load the model, or its process dies.
    """

    def __init__(self, name: str, options: Options, vocab_size: int) -> None:
        self.name = name
        # Lives as long as the worker; close() ends it.
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        arguments = json.dumps(options.to_json() | {"vocab_size": vocab_size})
        self._process = subprocess.Popen(
            [sys.executable, "-m", "metal_prefill._bench.worker", name, arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        try:
            hello = self._receive("loading the model")
        except BaseException:
            self.close()
            raise
        self.load_ns: int = hello.pop("load_ns")
        self.rss_before_load: int = hello.pop("rss_before_load")
        self.identity = Identity(**hello)

    def sample(self, case: Case) -> tuple[int, int]:
        """Run a test once; return nanoseconds and involuntary context switches."""
        reply = self._ask({"do": "sample", "case": asdict(case)}, case.name)
        return reply["ns"], reply["switches"]

    def peak_rss(self) -> int:
        """Largest resident memory so far, in bytes."""
        peak: int = self._ask({"do": "memory"}, "reading its memory")["peak_rss"]
        return peak

    def log(self) -> str:
        """Return what the engine has printed."""
        self._log.seek(0)
        return self._log.read()

    def _ask(self, request: dict[str, Any], doing: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has died; _receive says how
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        return self._receive(doing)

    def _receive(self, doing: str) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
            tail = " / ".join(self.log().strip().splitlines()[-TAIL_LINES:])
            raise BenchError(
                f"{self.name}: its process died ({how}) while {doing}" + (f": {tail}" if tail else "")
            )
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise BenchError(f"{self.name}: {reply['error']} (while {doing})")
        return reply

    def close(self) -> None:
        """End the process."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        try:
            self._process.wait(timeout=5)  # it ends by itself when its requests end
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()
