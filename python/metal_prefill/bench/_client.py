"""Parent side of a worker process, which answers requests: one JSON object per line."""

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict
from typing import Any

from metal_prefill.bench._cases import Case
from metal_prefill.bench._engines import BenchError, Identity, Options
from metal_prefill.bench._machine import has_amx

TAIL_LINES = 5  # last lines of a process's log in an error message


def describe_exit(name: str, code: int) -> str:
    """Describe the exit status of a process; a signal is negative.

    GCC 12 miscompiles the tile configuration of llama.cpp's AMX kernels (llama.cpp issue 26954).
    """
    if code >= 0:
        return f"exit code {code}"
    died = signal.Signals(-code)
    if name == "llama.cpp" and died in (signal.SIGILL, signal.SIGSEGV, signal.SIGBUS) and has_amx():
        return (
            f"{died.name}; this processor has AMX, for which GCC 12 miscompiles llama.cpp: build it with "
            "clang or a later GCC"
        )
    return died.name


class WorkerProcess:
    """Worker that runs an engine in its own process, whose death is an error that names it."""

    def __init__(self, name: str, options: Options, vocab_size: int) -> None:
        self.name = name
        arguments = json.dumps(asdict(options) | {"vocab_size": vocab_size})
        command = (sys.executable, "-m", "metal_prefill.bench._worker", name, arguments)
        # Lives as long as the process; close() ends it.
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        try:
            hello = self._receive("loading the model")
        except BaseException:
            self.close()
            raise
        self.load_ns: int = hello.pop("load_ns")
        self.identity = Identity(**hello)

    def _ask(self, request: dict[str, Any], doing: str) -> dict[str, Any]:
        """Send a request and return the answer."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the process died; _receive raises the error
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        return self._receive(doing)

    def sample(self, case: Case) -> tuple[int, int]:
        """Run a test once; return nanoseconds and involuntary context switches."""
        reply = self._ask({"do": "sample", "case": asdict(case)}, case.name)
        return reply["ns"], reply["switches"]

    def peak_rss(self) -> int:
        """Largest resident memory so far, in bytes."""
        peak: int = self._ask({"do": "memory"}, "reading its memory")["peak_rss"]
        return peak

    def close(self) -> None:
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

    def _receive(self, doing: str) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            how = describe_exit(self.name, code)
            self._log.seek(0)
            tail = " / ".join(self._log.read().strip().splitlines()[-TAIL_LINES:])
            raise BenchError(
                f"{self.name}: its process died ({how}) while {doing}" + (f": {tail}" if tail else "")
            )
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise BenchError(f"{self.name}: {reply['error']} (while {doing})")
        return reply
