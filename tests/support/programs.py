"""Runs programs for tests."""

import io
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Run = Callable[..., str]  # runs a program with arguments; returns its output


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def finished(command: Sequence[str | Path], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program with options of `subprocess.run`, and accept any exit code."""
    return subprocess.run(command, **{"capture_output": True, "text": True, "check": False, **options})


def output(command: Sequence[str | Path], **options: Any) -> str:
    """Return the output of a program, which must succeed; options are those of `subprocess.run`."""
    done = finished(command, **options)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@contextmanager
def serving(command: Sequence[str | Path], **options: Any) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run ``metal-prefill serve``, yield the process and its address, and kill it if it is still running."""
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **options) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            found = re.search(r"at (http://\S+)/v1$", line)
            assert found, line + process.stderr.read()
            yield process, found[1]
        finally:
            process.kill()
