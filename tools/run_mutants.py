"""Plant errors one at a time and report those that no test notices.

``tests/mutants`` lists them: a file, a text that occurs in it once, its replacement, the error, and the tests
that must notice it. This program copies the sources to ``build/mutants``, builds them there, expects those
tests to pass, and then applies one change after another::

    make mutants
    .venv/bin/python tools/run_mutants.py shaders/ cpp/batch.cpp     # only what begins so
    .venv/bin/python tools/run_mutants.py --rest                     # only those without a result so far

A test that ends the process, hangs or fails to compile counts as noticing the error. A change that does not
build is an error of the list. With survivors, or with such errors, the exit status is 1.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from mutants import MUTANTS, Mutant  # noqa: E402

WORK = ROOT / "build" / "mutants"
TREE, BUILD, PACKAGE = WORK / "tree", WORK / "native", WORK / "package"
RESULTS = WORK / "results.json"
TOOLS = Path(sys.executable).parent  # cmake and ninja of the environment
TARGETS = ("_core", "_cpu_testing", "_metal_testing")
# Of the kernels of shaders only these variants are built: all of them take a core ten minutes. The tests in
# `tests/mutants` use no others.
TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q6_k")
VARIANTS = (
    *TYPES,
    *(f"attention_decode_{cache}_{size}" for cache in ("f16", "f32") for size in (32, 64, 96, 128, 256)),
    *("attention_prefill_f16_64", "attention_prefill_f32_64"),
)
TIME_LIMIT_S = 600  # for the tests of one error; beyond it they hang
CAUGHT, SURVIVED, NOT_BUILT, NO_TESTS = "caught", "survived", "not built", "no tests"


def copy_sources() -> None:
    """Update the copy; unchanged files keep their times, so that little is rebuilt."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    wanted = {name for name in names if name and (ROOT / name).is_file()}
    for path in TREE.rglob("*"):
        if (
            path.is_file()
            and path.relative_to(TREE).as_posix() not in wanted
            and "__pycache__" not in path.parts
        ):
            path.unlink()
    for name in wanted:
        source, copy = ROOT / name, TREE / name
        if not copy.exists() or copy.read_bytes() != source.read_bytes():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, copy)
            shutil.copymode(source, copy)


def configure() -> None:
    """Set up the build, and a package made of the copied Python files and the built modules."""
    if not (BUILD / "build.ninja").exists():
        options = shlex.split(
            subprocess.run(
                [ROOT / "tools" / "setup_clang.sh"], check=True, stdout=subprocess.PIPE, text=True
            ).stdout
        )
        defines = [f"-D{o.removeprefix('cmake.define.')}" for o in options if o.startswith("cmake.define.")]
        subprocess.run(
            [
                *(TOOLS / "cmake", "-S", TREE, "-B", BUILD, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release"),
                *(f"-DPython_EXECUTABLE={sys.executable}", "-DSKBUILD_PROJECT_NAME=metal_prefill", *defines),
                f"-DMETAL_PREFILL_SHADER_VARIANTS={';'.join(VARIANTS)}",
            ],
            check=True,
            stdout=subprocess.DEVNULL,
        )
    shutil.rmtree(PACKAGE, ignore_errors=True)
    (PACKAGE / "metal_prefill").mkdir(parents=True)
    for path in (TREE / "python" / "metal_prefill").iterdir():
        if path.name != "__pycache__":
            (PACKAGE / "metal_prefill" / path.name).symlink_to(path)


def link_modules() -> None:
    """Copy the built modules to where Python finds them."""
    for target in TARGETS:
        (built,) = [path for path in BUILD.rglob(f"{target}*.so") if PACKAGE not in path.parents]
        link = (PACKAGE / "metal_prefill" if target == "_core" else PACKAGE) / built.name
        if not link.is_symlink():
            link.symlink_to(built)


def build() -> str | None:
    """Build the copy; return the compiler's output if it fails."""
    done = subprocess.run(
        [TOOLS / "ninja", "-C", BUILD, *TARGETS], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return done.stdout if done.returncode else None


def is_native(path: str) -> bool:
    """Whether a change to a file needs a build."""
    return path.startswith(("cpp/", "shaders/", "emulator/")) and not path.endswith(".py")


def run_tests(tests: Sequence[str]) -> tuple[int, str]:
    """Run tests on the copy; returns the exit status, 1 where they do not end, and the output."""
    command = [sys.executable, "-B", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE), "METAL_PREFILL_REQUIRE_EMULATOR": "1"}
    try:
        done = subprocess.run(
            command,
            cwd=TREE,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=TIME_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return 1, f"did not end within {TIME_LIMIT_S} s"
    return done.returncode, done.stdout


@contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """Plant the error in the copy for the duration of the block."""
    path = TREE / mutant.file
    plain = path.read_text(encoding="utf-8")
    path.write_text(mutant.applied(plain), encoding="utf-8")
    try:
        yield
    finally:
        path.write_text(plain, encoding="utf-8")


def outcome(mutant: Mutant) -> tuple[str, str]:
    """Plant an error; return the outcome and the output that shows it."""
    with planted(mutant):
        if is_native(mutant.file) and (said := build()):
            return NOT_BUILT, said
        status, said = run_tests(mutant.tests)
    # 4 and 5: pytest found nothing to run.
    return (SURVIVED if status == 0 else NO_TESTS if status in (4, 5) else CAUGHT), said


def key(mutant: Mutant) -> str:
    """Return the key of a result."""
    return hashlib.sha256(json.dumps(asdict(mutant)).encode()).hexdigest()[:16]


def read_results() -> dict[str, dict[str, object]]:
    """Return the results so far."""
    if not RESULTS.exists():
        return {}
    found: dict[str, dict[str, object]] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return found


def check_plain(mutants: Iterable[Mutant]) -> None:
    """Expect the tests to pass without a planted error; exit otherwise."""
    passed = 0
    for tests in sorted({mutant.tests for mutant in mutants}):
        status, said = run_tests(tests)
        last = said.splitlines()[-1] if said else ""
        if status != 0:
            print(said)
            sys.exit(f"error: without a planted error these tests fail: {shlex.join(tests)}")
        passed += int(match[1]) if (match := re.search(r"(\d+) passed", last)) else 0
    print(f"without a planted error {passed} tests pass", flush=True)


def main() -> int:
    """Run as a program."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "paths", nargs="*", help="path prefixes of the files to plant errors in (default: all)"
    )
    parser.add_argument("--rest", action="store_true", help="skip errors that already have a result")
    options = parser.parse_args()
    results = read_results()
    chosen = [m for m in MUTANTS if not options.paths or m.file.startswith(tuple(options.paths))]
    if options.rest:
        chosen = [m for m in chosen if key(m) not in results]
    if not chosen:
        parser.error("no mutants selected")
    WORK.mkdir(parents=True, exist_ok=True)
    copy_sources()
    configure()
    if said := build():
        print(said)
        return 1
    link_modules()
    check_plain(chosen)
    wrong = []
    for mutant in chosen:
        begin = time.monotonic()
        how, said = outcome(mutant)
        seconds = time.monotonic() - begin
        results[key(mutant)] = {
            "file": mutant.file,
            "reason": mutant.reason,
            "outcome": how,
            "seconds": seconds,
        }
        RESULTS.write_text(json.dumps(results, indent=1), encoding="utf-8")
        print(f"{how:9} {seconds:5.0f} s  {mutant.file}: {mutant.reason}", flush=True)
        if how != CAUGHT:
            wrong.append(mutant)
            (WORK / f"{key(mutant)}.log").write_text(said, encoding="utf-8")
            print(f"          {WORK / key(mutant)}.log", flush=True)
    build()
    print(f"{len(chosen) - len(wrong)} of {len(chosen)} planted errors were caught")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
