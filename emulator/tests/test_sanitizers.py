"""Mistakes planted in shaders are found by the sanitizers, and reported at their lines of the source."""

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from shader_library import build

pytestmark = pytest.mark.emulator
SOURCE = Path(__file__).parent / "shaders" / "planted.metal"
EMULATOR = Path(__file__).resolve().parents[1]
COMPILE_SHADER = EMULATOR / "msl" / "compile_shader.py"
RUNTIMES = {"address,undefined": "asan", "thread": "tsan"}
OPTIONS = "halt_on_error=1:exitcode=66:detect_leaks=0:print_stacktrace=1:external_symbolizer_path="
# Dispatches kernels of a library one after another and prints the first results of each.
DISPATCH = """
import json, sys
import numpy as np
from shader_library import ShaderLibrary

library = ShaderLibrary(sys.argv[1])
for kernel, planted, seed, dtype in json.loads(sys.argv[2]):
    x, out = np.arange(64).astype(dtype), np.zeros(64, dtype)
    library.run(kernel, (1,), (64,), [x, out, np.uint32(planted)], seed=seed, workers=2)
    print("results", *out[:3])
"""
Dispatch = Callable[..., subprocess.CompletedProcess[str]]


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
    lines = SOURCE.read_text().splitlines()
    return f"{SOURCE.name}:{next(n for n, line in enumerate(lines, 1) if f'MISTAKE: {mistake}' in line)}"


def missing(what: str, package: str) -> None:
    """Skip, or fail where the emulator is required."""
    message = f"there is no {what}: apt-get install {package}"
    if os.environ.get("METAL_EMULATOR_REQUIRED"):
        pytest.fail(message)
    pytest.skip(message)


def dispatcher(clang: str, folder: Path, sanitizers: str) -> Dispatch:
    """Build the faulty shaders with sanitizers; return a function that runs one in a new Python process."""
    runtime = f"libclang_rt.{RUNTIMES[sanitizers]}-{platform.machine()}.so"
    found = subprocess.run([clang, f"-print-file-name={runtime}"], capture_output=True, text=True, check=True)
    runtime = found.stdout.strip()
    if not Path(runtime).is_absolute():
        missing(runtime, "libclang-rt-19-dev")
    symbolizer = shutil.which("llvm-symbolizer-19") or shutil.which("llvm-symbolizer")
    if symbolizer is None:
        missing("llvm-symbolizer", "llvm-19")
    library = build(SOURCE, folder, sanitizers)
    environment = os.environ | {"LD_PRELOAD": runtime, "PYTHONPATH": str(EMULATOR / "testing")}
    for name in ("ASAN_OPTIONS", "UBSAN_OPTIONS", "TSAN_OPTIONS"):
        environment[name] = f"{OPTIONS}{symbolizer}"

    def dispatch(*runs: tuple[str, bool, int, str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", DISPATCH, str(library), json.dumps(runs)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )

    return dispatch


@pytest.fixture(scope="module")
def address(clang: str, tmp_path_factory: pytest.TempPathFactory) -> Dispatch:
    return dispatcher(clang, tmp_path_factory.mktemp("address"), "address,undefined")


@pytest.fixture(scope="module")
def thread(clang: str, tmp_path_factory: pytest.TempPathFactory) -> Dispatch:
    return dispatcher(clang, tmp_path_factory.mktemp("thread"), "thread")


SEEDS = (0, 1, 2)
BETWEEN_OTHERS = ("exchange_between", "exchange_in_simdgroup")
MISTAKES = [
    ("read_beyond_buffer", "beyond a buffer", "AddressSanitizer", "f4"),
    ("read_beyond_threadgroup_array", "beyond a threadgroup array", "AddressSanitizer", "f4"),
    ("read_beyond_local_array", "beyond a local array", "out of bounds", "f4"),
    ("overflow", "signed overflow", "signed integer overflow", "i4"),
]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_missing_threadgroup_barrier_is_a_race_in_any_order(thread: Dispatch, seed: int) -> None:
    found = thread(("exchange", True, seed, "f4"))
    assert found.returncode == 66
    assert "data race" in found.stderr
    assert line_of("written") in found.stderr
    assert line_of("read") in found.stderr


@pytest.mark.parametrize("seed", SEEDS[:2])
@pytest.mark.parametrize("kernel", BETWEEN_OTHERS)
def test_a_barrier_missing_between_others_is_a_race(thread: Dispatch, kernel: str, seed: int) -> None:
    assert "data race" in thread((kernel, True, seed, "f4")).stderr


def test_a_simdgroup_barrier_orders_nothing_between_simdgroups(thread: Dispatch) -> None:
    assert "data race" in thread(("exchange_far", True, 0, "f4")).stderr


@pytest.mark.parametrize(("kernel", "mistake", "words", "dtype"), MISTAKES)
def test_a_mistake_is_reported_with_its_line(
    address: Dispatch, kernel: str, mistake: str, words: str, dtype: str
) -> None:
    found = address((kernel, True, 0, dtype))
    assert found.returncode != 0
    assert words in found.stderr
    assert line_of(mistake) in found.stderr


@pytest.mark.parametrize(
    ("sanitizer", "runs"),
    [
        (
            "thread",
            [("exchange", seed) for seed in SEEDS]
            + [(kernel, seed) for kernel in BETWEEN_OTHERS for seed in SEEDS[:2]]
            + [("exchange_far", 0)],
        ),
        ("address", [(kernel, 0) for kernel, *_ in MISTAKES]),
    ],
    ids=["thread", "address"],
)
def test_without_the_mistakes_nothing_is_reported(
    request: pytest.FixtureRequest, sanitizer: str, runs: list[tuple[str, int]]
) -> None:
    """Of all kernels, in one process: its start takes longer than they do."""
    dispatch: Dispatch = request.getfixturevalue(sanitizer)
    dtypes = {kernel: dtype for kernel, *_, dtype in MISTAKES}
    result = dispatch(*((kernel, False, seed, dtypes.get(kernel, "f4")) for kernel, seed in runs))
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("results") == len(runs)
    assert result.stderr == ""
