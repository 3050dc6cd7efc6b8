"""Mistakes planted in shaders are found by the sanitizers, and reported at their lines of the source."""

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from shader_library import EMULATOR, PLANTED, SANITIZERS, build

pytestmark = pytest.mark.emulator
COMPILE_SHADER = EMULATOR / "msl" / "compile_shader.py"
OPTIONS = "halt_on_error=1:exitcode=66:detect_leaks=0:print_stacktrace=1:external_symbolizer_path="
# Runs kernels of a library, each in a fork, which a report ends; prints the exit status and messages of each.
DISPATCH = """
import json, os, sys, tempfile
import numpy as np
from shader_library import ShaderLibrary

library = ShaderLibrary(sys.argv[1])
found = []
for kernel, planted, seed, dtype in json.loads(sys.argv[2]):
    with tempfile.TemporaryFile() as output:
        if (child := os.fork()) == 0:
            os.dup2(output.fileno(), 2)
            x, out = np.arange(64).astype(dtype), np.zeros(64, dtype)
            library.run(kernel, 64, [x, out, np.array([planted], np.uint32)], seed)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        output.seek(0)
        found.append((status, output.read().decode()))
print(json.dumps(found))
"""


class Outcome(NamedTuple):
    """End of a process that ran a kernel."""

    status: int
    messages: str


Outcomes = dict[tuple[str, bool, int], Outcome]  # by kernel, whether its mistake is planted, and seed


def test_sanitized_shaders_are_identified_by_their_full_source(tmp_path: Path) -> None:
    """Only the code changes: its loops are not unrolled."""
    source = EMULATOR / "tests" / "kernels" / "ceilings.metal"
    written = source.read_text().count("#pragma unroll")
    assert written
    counts = []
    for flags in ([], ["--sanitize", "thread"]):
        output = tmp_path / "translated.cpp"
        command = [sys.executable, str(COMPILE_SHADER), str(source)]
        subprocess.run([*command, *flags, "-o", str(output)], check=True)
        code, _, text = output.read_text().partition("const char kSource[]")
        counts.append((code.count("#pragma unroll") > 0, text.count("#pragma unroll") >= written))
    assert counts == [(True, True), (False, True)]


def line_of(mistake: str) -> str:
    """Return file and line as a report names them."""
    lines = PLANTED.read_text().splitlines()
    return f"{PLANTED.name}:{next(n for n, line in enumerate(lines, 1) if f'MISTAKE: {mistake}' in line)}"


def missing(what: str, package: str) -> None:
    """Skip, or fail where the emulator is required."""
    message = f"there is no {what}: apt-get install {package}"
    if os.environ.get("METAL_EMULATOR_REQUIRED"):
        pytest.fail(message)
    pytest.skip(message)


SEEDS = (0, 1, 2)
BETWEEN_OTHERS = ("exchange_between", "exchange_in_simdgroup")
MISTAKES = [
    ("read_beyond_buffer", "beyond a buffer", "AddressSanitizer", "f4"),
    ("read_beyond_threadgroup_array", "beyond a threadgroup array", "AddressSanitizer", "f4"),
    ("read_beyond_local_array", "beyond a local array", "out of bounds", "f4"),
    ("overflow", "signed overflow", "signed integer overflow", "i4"),
]
RACES = [
    *(("exchange", seed, "f4") for seed in SEEDS),
    *((kernel, seed, "f4") for kernel in BETWEEN_OTHERS for seed in SEEDS[:2]),
    ("exchange_far", 0, "f4"),
]


def outcomes(clang: str, folder: Path, sanitizer: str, runs: list[tuple[str, int, str]]) -> Outcomes:
    """Build the faulty shaders with sanitizers, and run kernels with and without their mistakes."""
    runtime = f"libclang_rt.{sanitizer[0]}san-{platform.machine()}.so"
    found = subprocess.run([clang, f"-print-file-name={runtime}"], capture_output=True, text=True, check=True)
    runtime = found.stdout.strip()
    if not Path(runtime).is_absolute():
        missing(runtime, "libclang-rt-19-dev")
    symbolizer = shutil.which("llvm-symbolizer-19") or shutil.which("llvm-symbolizer")
    if symbolizer is None:
        missing("llvm-symbolizer", "llvm-19")
    library = build(PLANTED, folder, SANITIZERS[sanitizer])
    environment = os.environ | {"LD_PRELOAD": runtime, "PYTHONPATH": str(EMULATOR / "testing")}
    environment["OPENBLAS_NUM_THREADS"] = "1"  # ThreadSanitizer does not support forks of several threads
    for name in ("ASAN_OPTIONS", "UBSAN_OPTIONS", "TSAN_OPTIONS"):
        environment[name] = f"{OPTIONS}{symbolizer}"
    each = [(kernel, planted, seed, dtype) for kernel, seed, dtype in runs for planted in (True, False)]
    done = subprocess.run(
        [sys.executable, "-c", DISPATCH, str(library), json.dumps(each)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    ended = [Outcome(*outcome) for outcome in json.loads(done.stdout)]
    return {run[:3]: outcome for run, outcome in zip(each, ended, strict=True)}


@pytest.fixture(scope="module")
def address(clang: str, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    runs = [(kernel, 0, dtype) for kernel, *_, dtype in MISTAKES]
    return outcomes(clang, tmp_path_factory.mktemp("address"), "address", runs)


@pytest.fixture(scope="module")
def thread(clang: str, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return outcomes(clang, tmp_path_factory.mktemp("thread"), "thread", RACES)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_missing_threadgroup_barrier_is_a_race_in_any_order(thread: Outcomes, seed: int) -> None:
    found = thread["exchange", True, seed]
    assert found.status == 66
    assert "data race" in found.messages
    assert line_of("written") in found.messages
    assert line_of("read") in found.messages


@pytest.mark.parametrize("seed", SEEDS[:2])
@pytest.mark.parametrize("kernel", BETWEEN_OTHERS)
def test_a_barrier_missing_between_others_is_a_race(thread: Outcomes, kernel: str, seed: int) -> None:
    assert "data race" in thread[kernel, True, seed].messages


def test_a_simdgroup_barrier_orders_nothing_between_simdgroups(thread: Outcomes) -> None:
    assert "data race" in thread["exchange_far", True, 0].messages


@pytest.mark.parametrize(("kernel", "mistake", "words", "dtype"), MISTAKES)
def test_a_mistake_is_reported_with_its_line(
    address: Outcomes, kernel: str, mistake: str, words: str, dtype: str
) -> None:
    found = address[kernel, True, 0]
    assert found.status != 0
    assert words in found.messages
    assert line_of(mistake) in found.messages


@pytest.mark.parametrize("sanitizer", ["thread", "address"])
def test_without_the_mistakes_nothing_is_reported(request: pytest.FixtureRequest, sanitizer: str) -> None:
    found: Outcomes = request.getfixturevalue(sanitizer)
    assert {outcome for (_, planted, _), outcome in found.items() if not planted} == {(0, "")}
