"""Peak rates of the machine, measured in a separate process whose crash cannot end a benchmark.

``python -m metal_prefill.bench._peak SET LIMIT THREADS`` answers requests on stdin with times on stdout, one
JSON object per line.
"""

from __future__ import annotations

import json
import sys
from typing import IO

from metal_prefill import _core
from metal_prefill.bench._process import JsonProcess

COMMAND = (sys.executable, "-m", "metal_prefill.bench._peak")


class PeakProcess:
    """A limit of the machine that can be timed like a `_core.cpu.Workload`.

    Parameters
    ----------
    isa
        A kernel set of this machine.
    limit
        One of `_core.cpu.peaks`.
    threads
        Size of the team.

    Raises
    ------
    BenchError
        If the process crashed, here or in `run`.
    """

    def __init__(self, isa: str, limit: str, threads: int) -> None:
        name = f"the measurement of the limit {limit} by {isa}"
        self._process = JsonProcess(name, (*COMMAND, isa, limit, str(threads)), "beginning")
        self.multiply_adds: float = self._process.hello["multiply_adds"]
        self.bytes: float = self._process.hello["bytes"]

    def run(self, repetitions: int) -> float:
        """Return the time of the repetitions in seconds."""
        seconds: float = self._process.ask({"repetitions": repetitions}, "running")["seconds"]
        return seconds

    def __enter__(self) -> PeakProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.close()


def serve(isa: str, limit: str, threads: int, requests: IO[str], replies: IO[str]) -> None:
    """Report the work of a repetition, then time the requested repetitions until `requests` ends."""

    def reply(**fields: float) -> None:
        print(json.dumps(fields), file=replies, flush=True)

    workload = _core.cpu.peak_workload(isa, limit, threads)
    reply(multiply_adds=workload.multiply_adds, bytes=workload.bytes)
    for line in requests:
        reply(seconds=workload.run(json.loads(line)["repetitions"]))


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.stdin, sys.stdout)
