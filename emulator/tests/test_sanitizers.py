"""Mistakes planted in shaders are found by the sanitizers, and reported at their lines of the source.

Only builds with a sanitizer contain these shaders.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from compile_shader import without_unrolling
from scanner.program import translate

pytestmark = pytest.mark.emulator
EMULATOR = Path(__file__).resolve().parents[1]
PLANTED = EMULATOR / "tests" / "shaders" / "planted.metal"
# Runs each kernel in a fork, which a report ends; prints the exit status and messages of each.
DISPATCH = """
import json, os, sys, tempfile
import numpy as np
from metal_kernels import KernelLibrary, testing_module

emulator = testing_module().emulator
found = []
for kernel, seed, planted in json.loads(sys.argv[2]):
    with tempfile.TemporaryFile() as output:
        if (child := os.fork()) == 0:
            os.dup2(output.fileno(), 2)
            emulator.set_options(emulator.Options(workers=2, seed=seed))
            dtype = np.int32 if kernel == "overflow" else np.float32
            x, out = np.arange(64, dtype=dtype), np.zeros(64, dtype)
            library = KernelLibrary(open(sys.argv[1]).read())
            library.dispatch(kernel, [x, out, np.uint32(planted)], groups=1, threads=64)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        output.seek(0)
        found.append((status, output.read().decode()))
print(json.dumps(found))
"""


class Mistake(NamedTuple):
    """A kernel with a mistake, the order of its threads, and the report of a sanitizer."""

    kernel: str
    seed: int
    words: str
    lines: tuple[str, ...] = ()


RACE = "data race"
MISTAKES = {
    "thread": [
        *(Mistake("exchange", seed, RACE, ("written", "read")) for seed in range(3)),
        *(Mistake("exchange_between", seed, RACE) for seed in range(2)),
        *(Mistake("exchange_in_simdgroup", seed, RACE) for seed in range(2)),
        Mistake("exchange_far", 0, RACE),
    ],
    "address": [
        Mistake("read_beyond_buffer", 0, "AddressSanitizer", ("beyond a buffer",)),
        Mistake("read_beyond_threadgroup_array", 0, "AddressSanitizer", ("beyond a threadgroup array",)),
        Mistake("read_beyond_local_array", 0, "out of bounds", ("beyond a local array",)),
        Mistake("overflow", 0, "signed integer overflow", ("signed overflow",)),
    ],
}


@pytest.mark.usefixtures("clang")
def test_sanitized_shaders_are_identified_by_their_full_source() -> None:
    """Preventing unrolled loops changes only the compiled code."""
    source = EMULATOR / "tests" / "kernels" / "ceilings.metal"
    translated = translate(source, "cpu", 300, [])
    code, _, rest = without_unrolling(translated).partition("const char kSource[]")
    assert "#pragma unroll" in translated.removesuffix(rest)
    assert "#pragma unroll" not in code
    assert source.read_text() in rest


def line_of(mistake: str) -> str:
    """Return file and line as a report names them."""
    lines = PLANTED.read_text().splitlines()
    return f"{PLANTED.name}:{next(n for n, line in enumerate(lines, 1) if f'MISTAKE: {mistake}' in line)}"


def ends(mistakes: list[Mistake], planted: bool) -> list[Any]:
    """Return the exit status and the messages of a process for each kernel."""
    runs = json.dumps([(mistake.kernel, mistake.seed, planted) for mistake in mistakes])
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path}\n{DISPATCH}", str(PLANTED), runs]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.fixture
def mistakes(metal_testing: Any) -> list[Mistake]:
    """Return the mistakes that the sanitizer of this build finds; skip other builds."""
    if not metal_testing.emulator.sanitizer:
        pytest.skip("needs a build with a sanitizer")
    return MISTAKES[metal_testing.emulator.sanitizer]


def test_each_mistake_is_reported_with_its_lines(mistakes: list[Mistake]) -> None:
    for mistake, (status, messages) in zip(mistakes, ends(mistakes, planted=True), strict=True):
        assert status != 0, mistake
        for words in (mistake.words, *map(line_of, mistake.lines)):
            assert words in messages, mistake


def test_without_the_mistakes_nothing_is_reported(mistakes: list[Mistake]) -> None:
    assert ends(mistakes, planted=False) == [[0, ""]] * len(mistakes)
