"""Parent side of a worker process."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Protocol

from metal_prefill.bench._cases import Case
from metal_prefill.bench._engines import Identity, Options
from metal_prefill.bench._process import JsonProcess


class Worker(Protocol):
    """Protocol of an engine that takes one sample at a time."""

    @property
    def name(self) -> str:
        """Name of the engine."""

    @property
    def identity(self) -> Identity:
        """Device, settings and build, as the engine reports them."""

    @property
    def load_ns(self) -> int:
        """Load time in nanoseconds."""

    def sample(self, case: Case) -> tuple[int, int]:
        """Run a test once; return nanoseconds and involuntary context switches."""

    def peak_rss(self) -> int:
        """Largest resident memory so far, in bytes."""

    def close(self) -> None:
        """End the process."""


WorkerFactory = Callable[[str, Options, int], Worker]


class WorkerProcess(JsonProcess):
    """Worker that runs an engine in its own process."""

    def __init__(self, name: str, options: Options, vocab_size: int) -> None:
        arguments = json.dumps(options.to_json() | {"vocab_size": vocab_size})
        command = (sys.executable, "-m", "metal_prefill.bench._worker", name, arguments)
        super().__init__(name, command, "loading the model")
        self.load_ns: int = self.hello.pop("load_ns")
        self.rss_before_load: int = self.hello.pop("rss_before_load")
        self.identity = Identity(**self.hello)

    def sample(self, case: Case) -> tuple[int, int]:
        """Run a test once; return nanoseconds and involuntary context switches."""
        reply = self.ask({"do": "sample", "case": asdict(case)}, case.name)
        return reply["ns"], reply["switches"]

    def peak_rss(self) -> int:
        """Largest resident memory so far, in bytes."""
        peak: int = self.ask({"do": "memory"}, "reading its memory")["peak_rss"]
        return peak
