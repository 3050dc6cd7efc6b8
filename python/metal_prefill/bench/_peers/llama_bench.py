"""A program with llama-bench's options and JSON, such as that of ik_llama.cpp or of another llama.cpp.

The program generates the tokens, warms up and takes the time itself; a sample is one run of it. As in
`llama_cpp`, a prompt is one micro-batch, with flash attention.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from typing import Any

from metal_prefill.bench._cases import Case
from metal_prefill.bench._engines import Identity, Options, ProgramEngine
from metal_prefill.bench._errors import BenchError
from metal_prefill.bench._machine import available_threads, counted, cpu_name
from metal_prefill.bench._process import describe_exit

# Options of ik_llama.cpp, which repacks weights at load only on request and has no option for the depth.
_IK = "ik_llama.cpp"
_IK_OPTIONS = ("-rtr", "1")


class LlamaBench(ProgramEngine):
    """Program that runs each test with one repetition."""

    def __init__(self, options: Options, name: str) -> None:
        self._options = options
        self._name = name
        self._threads = options.threads or available_threads()
        self._first = self._run(1, 0, 0)

    def _run(self, n_prompt: int, n_gen: int, depth: int) -> dict[str, Any]:
        """Run a test and return the JSON object of its last row."""
        options, rows = self._options, str(max(self._options.max_prompt, 32))
        cache = options.kv_dtype
        command = [options.program, "-m", options.path, "-t", str(self._threads), "-ngl", "0", "-fa", "1"]
        command += ["-b", rows, "-ub", rows, "-ctk", cache, "-ctv", cache, "-r", "1", "-o", "json"]
        command += _IK_OPTIONS if self._name == _IK else ()
        if depth and self._name == _IK:
            command += ["-p", "0", "-n", "0", "-gp", f"{depth},{n_gen}"]
        else:
            command += ["-p", str(n_prompt), "-n", str(n_gen), *(["-d", str(depth)] if depth else [])]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except OSError as error:
            raise BenchError(f"{options.program} cannot be run: {error.strerror}") from None
        if done.returncode != 0:
            tail = " / ".join(done.stderr.strip().splitlines()[-3:])
            how = describe_exit(self._name, done.returncode)
            raise BenchError(f"{options.program} failed ({how})" + (f": {tail}" if tail else ""))
        try:
            row: dict[str, Any] = json.loads(done.stdout)[-1]
            if int(row["samples_ns"][0]) <= 0 or int(row["n_gen"]) != n_gen:
                raise ValueError
        except (ValueError, KeyError, IndexError, TypeError):
            raise BenchError(
                f"{options.program} did not print the JSON of llama-bench: {done.stdout[:200]!r}"
            ) from None
        return row

    def identity(self) -> Identity:
        """Return the identity of the engine."""
        repacked = ", weights repacked" if self._name == _IK else ""
        cache = f"KV {self._options.kv_dtype}"
        return Identity(
            build=f"{self._name} ({self._first.get('build_commit', 'unknown commit')})",
            device=f"CPU ({cpu_name()}, {counted(self._threads, 'thread')})",
            threads=self._threads,
            settings=f"flash attention, {cache}, one micro-batch{repacked}, random tokens",
        )

    def measure(self, case: Case) -> int:
        """Run a test once, and return the nanoseconds that the program reports."""
        return int(self._run(case.n_prompt, case.n_gen, case.n_depth)["samples_ns"][0])

    def peak_rss(self) -> int:
        """Largest resident memory of the program so far, in bytes."""
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def load(options: Options, name: str) -> ProgramEngine:
    """Check that the program works on the model."""
    return LlamaBench(options, name)
