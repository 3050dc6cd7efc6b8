"""Test the CPU engine on this processor and report which instruction sets ran.

``python tools/check/processor.py`` needs the package from a build with ``METAL_PREFILL_TESTING``, the folder
of tests and pytest, but no compiler. It runs the tests of all kernels of this processor and those of the
engine, then both benchmarks, whose few samples show only that they run. On an idle machine that takes less
than two minutes.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parents[2] / "tests"
BENCH_KERNELS = Path(__file__).parents[1] / "measure" / "bench_kernels.py"
FILES = ("cpu/test_machine_code.py", "cpu/kernels", "engine/test_engine.py")
DEAD = "its process died"  # the message of a `BenchError`
TIME_LIMIT_S = 600  # per step; beyond it the step hangs


@dataclass(frozen=True)
class Step:
    """Command that must succeed.

    Attributes
    ----------
    name : str
    command : tuple of str
        Arguments for this Python.
    """

    name: str
    command: tuple[str, ...]


def steps(sets: list[str], tests: Path, threads: int) -> list[Step]:
    """Return the steps for a processor with these instruction sets, fastest first."""
    parallel = ("-n", str(threads)) if importlib.util.find_spec("xdist") and threads > 1 else ()
    # Neither the kernels of another processor, emulated, nor Metal.
    others = "not metal" if any("neon" in isa for isa in sets) else "not metal and not neon"
    pytest = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark", "-k", others, *parallel)
    files = tuple(str(tests / name) for name in FILES)
    kernels = (str(BENCH_KERNELS), "--types", "Q4_0,Q6_K", "--tokens", "1,32", "-r", "1")
    short = ("--patience", "0", "-r", "2", "-n", "16")
    bench = ("-m", "metal_prefill.bench", "--demo", "--device", "cpu", "-p", "32,128", *short)
    return [
        Step("kernels and engine", (*pytest, *files)),
        *(Step(f"benchmark of kernels, {isa}", (*kernels, "-t", str(threads), "--isa", isa)) for isa in sets),
        Step("benchmark, one thread", (*bench, "-t", "1")),
        Step(f"benchmark, {threads} threads", (*bench, "-t", str(threads))),
    ]


def outcome(code: int) -> str:
    """Describe how a process ended."""
    if code < 0:
        return f"died ({signal.Signals(-code).name})"
    return f"failed (exit code {code})" if code else "passed"


def run(step: Step) -> bool:
    """Run a step; print its output if it fails, otherwise its last line."""
    begin = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, *step.command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIME_LIMIT_S,
        )
        how, text, passed = outcome(done.returncode), done.stdout, done.returncode == 0
        if DEAD in text:  # a benchmark omits a limit whose process crashes; here that is a failure
            how, passed = "lost a process", False
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""
        text = output.decode(errors="replace") if isinstance(output, bytes) else output
        how, passed = "did not end", False
    print(f"{step.name}: {how} in {time.monotonic() - begin:.0f} s", flush=True)
    lines = text.rstrip().splitlines()
    for line in lines[-1:] if passed and "pytest" in step.command else lines:
        print(f"    {line}")
    return passed


def main() -> int:
    """Run as a program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tests", type=Path, default=TESTS, help="folder of tests (default: %(default)s)")
    options = parser.parse_args()
    if importlib.util.find_spec("_cpu_testing") is None:
        parser.error("the package lacks the module that calls single kernels: run `make test-processor`")

    import metal_prefill
    from metal_prefill import _core
    from metal_prefill.bench import _machine

    sets, built = _core.cpu.kernel_sets(), _core.cpu.built_sets()
    threads = _machine.available_threads()
    print(f"processor: {_machine.cpu_name()}, {threads} threads, {platform.system()} {platform.machine()}")
    print(f"metal_prefill {metal_prefill.__version__}, Python {platform.python_version()}")
    print(f"instruction sets built: {', '.join(built)}")
    print(f"run on this processor: {', '.join(sets)}", flush=True)
    begin = time.monotonic()
    results = [run(step) for step in steps(sets, options.tests.resolve(), threads)]
    verdict = "passed" if all(results) else f"{results.count(False)} of {len(results)} steps failed"
    print(f"{_machine.cpu_name()}: {', '.join(sets)}: {verdict} in {time.monotonic() - begin:.0f} s")
    return 0 if all(results) else 1


if __name__ == "__main__":
    os.environ.pop("METAL_PREFILL_CPU_ISA", None)
    sys.exit(main())
