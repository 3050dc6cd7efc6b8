"""Engines and a machine of given speed, for tests of benchmarks."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from metal_prefill import bench
from metal_prefill.bench import BenchResults, _engines, _machine, _worker
from metal_prefill.bench._cases import Case, Choice
from metal_prefill.bench._engines import Adapter, Identity, Ids, Options


class RecordingAdapter(Adapter):
    """Adapter that records its calls and computes nothing."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def identity(self) -> Identity:
        raise NotImplementedError

    def clear(self) -> None:
        self.calls.append(("clear",))

    def prefill(self, ids: Ids) -> None:
        self.calls.append(("prefill", ids.tolist()))

    def decode(self, ids: Ids) -> None:
        self.calls.append(("decode", ids.tolist()))

    def open_streams(self, count: int, context: int) -> None:
        self.calls.append(("open", count, context))

    prefill_streams, decode_streams = prefill, decode

    def choose(self, ids: Ids, count: int, choice: Choice) -> list[int]:
        self.calls.append(("choose", ids.tolist(), count, choice))
        return []


def options_for(path: Path, max_context: int = 256, max_prompt: int = 200) -> Options:
    """Return options of an engine with one thread."""
    return Options(str(path), max_context, max_prompt, threads=1, device="cpu", compute="f32")


@dataclass
class FakeWorker:
    """Worker whose engine takes `ns_per_token` for each token and records its inputs."""

    name: str
    ns_per_token: int
    device: str = "CPU (fake)"
    switches: Iterator[int] | None = None
    times: Iterator[int] | None = None  # nanoseconds of each sample, instead of `ns_per_token`
    log: list[str] = field(default_factory=list)
    load_ns: int = 5_000_000
    peak_rss: int = 100 << 20
    closed: bool = False

    @property
    def identity(self) -> Identity:
        return Identity(f"{self.name} 1.0", self.device, 2, "none")

    def sample(self, case: Case) -> tuple[int, int]:
        self.log.append(self.name)
        switches = next(self.switches) if self.switches is not None else 0
        if self.times is not None:
            return next(self.times), switches
        return case.timed_tokens * self.ns_per_token, switches

    def close(self) -> None:
        self.closed = True


class SteadyCalibrator(_machine.Calibrator):
    """Machine whose calibration takes the given times, then repeats the shortest."""

    def __init__(self, *times_ns: int, best_ns: int = 1000) -> None:
        self.times = list(times_ns)
        self.best_ns = best_ns
        self.reference_ns = best_ns

    def measure(self) -> int:
        elapsed = self.times.pop(0) if self.times else self.best_ns
        self.reference_ns = min(self.reference_ns, elapsed)
        return elapsed

    def close(self) -> None:
        pass


def compare(
    workers: dict[str, FakeWorker], path: Path, function: str = "run", **arguments: object
) -> BenchResults:
    """Measure fake engines, by default one prompt and decoding, in three samples."""
    tests = {"prompts": [8], "n_gen": 4} if function == "run" else {}
    peers = [name for name in workers if name != _engines.OURS]
    with patch.object(_worker, "WorkerProcess", lambda name, *_: workers[name]):
        options: Any = {"compare": peers, "repetitions": 3, **tests, **arguments}
        return getattr(bench, function)(path, **options)


def fakes(**ns_per_token: int) -> dict[str, FakeWorker]:
    names = {"ours": _engines.OURS, "llama": "llama.cpp", "openvino": "openvino", "hf": "transformers"}
    return {names[key]: FakeWorker(names[key], ns) for key, ns in ns_per_token.items()}
