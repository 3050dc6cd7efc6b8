"""Plant errors one at a time and report those that no test notices.

``tests/mutants`` lists them: a file, a text that occurs in it once, its replacement, the error, and the tests
that must notice it. This program copies the sources to ``build/mutants``, builds them there, and applies one
change after another. At the end it expects the tests that failed to pass without the errors::

    make mutants
    .venv/bin/python tools/run_mutants.py shaders/ cpp/engine/batch.cpp     # only files with these prefixes
    .venv/bin/python tools/run_mutants.py --rest                     # only those without a result so far

Errors in Python files need no build: if only such are chosen, the tests run with the native modules that are
installed. After an error in a native file the objects that it changed are put back, so that the next error
compiles only what it changes itself. ``--in-place build/emulator`` spares the first build: it plants in this
checkout and builds in that folder, and is meant for a copy of a checkout. ``--part 3/16`` takes every 16th
error, for several copies at the same time. The program prints an estimate of its time from earlier results.

An error is noticed, too, if the tests end their process, hang or do not compile. A change that the build
refuses is a mistake in the list. With survivors, or with such mistakes, the exit status is 1.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from mutants import MUTANTS, Mutant  # noqa: E402

TOOLS = Path(sys.executable).parent  # cmake and ninja of the environment
TARGETS = ("_core", "_cpu_testing", "_metal_testing")
# Of the kernels of shaders only these variants are built: all of them take a core ten minutes. The tests in
# `tests/mutants` use no others.
TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q6_k")
VARIANTS = (
    *TYPES,
    *(f"attention_decode_{cache}_{size}" for cache in ("f16", "f32") for size in (32, 64, 96, 128, 256)),
    *("attention_prefill_f16_64", "attention_prefill_f16_128", "attention_prefill_f32_64"),
    *("attention_tensor_f16_64", "attention_tensor_f16_128"),
)
TIME_LIMIT_S = 600  # for the tests of one error; beyond it they hang
OBJECTS = (".o", ".a", ".so")  # outputs that compilers replace instead of changing them
CAUGHT, SURVIVED, NOT_BUILT, NO_TESTS = "caught", "survived", "not built", "no tests"
FALSE = "its test fails without it, too"


@dataclass(frozen=True)
class Place:
    """Folders that errors are planted and built in.

    Attributes
    ----------
    work : Path
        Results, logs and the package that tests import.
    tree : Path
        Sources.
    build : Path
        Native build.
    """

    work: Path
    tree: Path
    build: Path

    @classmethod
    def of(cls, work: Path, in_place: Path | None) -> Place:
        """Return a copy of the sources in a folder, or this checkout and the folder of its build."""
        return cls(work, ROOT, in_place) if in_place else cls(work, work / "tree", work / "native")

    @property
    def package(self) -> Path:
        """Folder of the package and of the modules for tests."""
        return self.work / "package"

    @property
    def results(self) -> Path:
        """Results of this and earlier runs."""
        return self.work / "results.json"

    def copy_sources(self) -> None:
        """Update the copy; unchanged files keep their times, so that little is rebuilt."""
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split(
            "\0"
        )
        wanted = {name for name in names if name and (ROOT / name).is_file()}
        for path in self.tree.rglob("*"):
            if (
                path.is_file()
                and path.relative_to(self.tree).as_posix() not in wanted
                and "__pycache__" not in path.parts
            ):
                path.unlink()
        for name in wanted:
            source, copy = ROOT / name, self.tree / name
            if not copy.exists() or copy.read_bytes() != source.read_bytes():
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, copy)
                shutil.copymode(source, copy)

    def configure(self) -> None:
        """Set up the build."""
        if (self.build / "build.ninja").exists():
            return
        done = subprocess.run(
            [ROOT / "tools" / "setup_clang.sh"], check=True, stdout=subprocess.PIPE, text=True
        )
        options = shlex.split(done.stdout)
        defines = [f"-D{o.removeprefix('cmake.define.')}" for o in options if o.startswith("cmake.define.")]
        subprocess.run(
            [
                *(TOOLS / "cmake", "-S", self.tree, "-B", self.build, "-G", "Ninja"),
                *("-DCMAKE_BUILD_TYPE=Release", "-DSKBUILD_PROJECT_NAME=metal_prefill"),
                *(f"-DPython_EXECUTABLE={sys.executable}", *defines),
                f"-DMETAL_PREFILL_SHADER_VARIANTS={';'.join(VARIANTS)}",
            ],
            check=True,
            stdout=subprocess.DEVNULL,
        )

    def make_package(self, *, built: bool) -> None:
        """Make a package of the Python files and of the native modules, built here or installed."""
        shutil.rmtree(self.package, ignore_errors=True)
        (self.package / "metal_prefill").mkdir(parents=True)
        for path in (self.tree / "python" / "metal_prefill").iterdir():
            if path.name != "__pycache__" and path.suffix not in OBJECTS:
                (self.package / "metal_prefill" / path.name).symlink_to(path)
        for target in TARGETS:
            module = self._built(target) if built else installed_module(target)
            folder = self.package / "metal_prefill" if target == "_core" else self.package
            if module is not None:
                (folder / module.name).symlink_to(module)

    def _built(self, target: str) -> Path | None:
        return next(self.build.rglob(f"{target}*.so"), None)

    def compile(self) -> str | None:
        """Build; return the compiler's output if it fails."""
        rules = (self.build / "build.ninja").read_text(encoding="utf-8")
        done = subprocess.run(
            [
                TOOLS / "ninja",
                "-C",
                self.build,
                *(target for target in TARGETS if f"build {target}:" in rules),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return done.stdout if done.returncode else None

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Put the build back as it is now when the block ends, instead of compiling again.

        Objects are kept by hard links, since compilers replace them. Generated sources are copied.
        """
        kept = self.build.with_name(self.build.name + ".kept")
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(self.build, kept, symlinks=True, copy_function=_keep)
        try:
            yield
        finally:
            shutil.rmtree(self.build)
            kept.rename(self.build)


def _keep(source: str, copy: str) -> None:
    if source.endswith(OBJECTS):
        os.link(source, copy)
    else:
        shutil.copy2(source, copy)


def installed_module(name: str) -> Path | None:
    """Return a native module of the installed package, if it has it."""
    spec = importlib.util.find_spec(f"metal_prefill.{name}" if name == "_core" else name)
    return Path(spec.origin) if spec is not None and spec.origin is not None else None


def is_native(path: str) -> bool:
    """Whether a change to a file needs a build."""
    return path.startswith(("cpp/", "shaders/", "emulator/")) and not path.endswith(".py")


def run_tests(place: Place, tests: Sequence[str], limit_s: float | None = TIME_LIMIT_S) -> tuple[int, str]:
    """Run tests; returns the exit status, 1 if they do not end, and the output."""
    cache = place.work / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    command = [
        sys.executable,
        "-B",
        "-m",
        "pytest",
        "-q",
        "-x",
        "-o",
        f"cache_dir={cache}",
        f"--rootdir={place.tree}",
        *tests,
    ]
    paths = filter(None, (str(place.package), os.environ.get("PYTHONPATH")))
    environment = {"METAL_PREFILL_REQUIRE_EMULATOR": "1", **os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    try:
        done = subprocess.run(
            command,
            cwd=place.tree,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired:
        return 1, f"did not end within {limit_s} s"
    return done.returncode, done.stdout


def failed_tests(place: Place, tests: Sequence[str]) -> Sequence[str]:
    """Return the tests that failed in the last run; all of these if their process ended or hung."""
    path = place.work / "cache" / "v" / "cache" / "lastfailed"
    return sorted(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else tests


@contextmanager
def planted(place: Place, mutant: Mutant) -> Iterator[None]:
    """Plant the error for the duration of the block; afterwards the file has its former time, too."""
    path = place.tree / mutant.file
    plain, before = path.read_text(encoding="utf-8"), path.stat()
    path.write_text(mutant.applied(plain), encoding="utf-8")
    try:
        yield
    finally:
        path.write_text(plain, encoding="utf-8")
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def outcome(place: Place, mutant: Mutant) -> tuple[str, str]:
    """Plant an error; return the outcome and the output that shows it."""
    native = is_native(mutant.file)
    with place.restored() if native else nullcontext(), planted(place, mutant):
        if native and (said := place.compile()):
            return NOT_BUILT, said
        status, said = run_tests(place, mutant.tests)
    # 4 and 5: pytest found nothing to run.
    return (SURVIVED if status == 0 else NO_TESTS if status in (4, 5) else CAUGHT), said


def key(mutant: Mutant) -> str:
    """Return the key of a result."""
    return hashlib.sha256(json.dumps(asdict(mutant)).encode()).hexdigest()[:16]


def read_results(place: Place) -> dict[str, dict[str, object]]:
    """Return the results so far."""
    if not place.results.exists():
        return {}
    found: dict[str, dict[str, object]] = json.loads(place.results.read_text(encoding="utf-8"))
    return found


def estimate_s(mutants: Collection[Mutant], results: dict[str, dict[str, object]]) -> float | None:
    """Return the seconds that errors will take by earlier results; None without a similar result.

    An error without a result counts as the average of those whose files need a build, or of the others.
    """
    seconds = {name: float(str(result["seconds"])) for name, result in results.items()}
    total = 0.0
    for native in (False, True):
        chosen = [key(m) for m in mutants if is_native(m.file) is native]
        similar = [seconds[name] for name, r in results.items() if is_native(str(r["file"])) is native]
        if chosen and not similar:
            return None
        total += sum(seconds.get(name, sum(similar) / len(similar)) for name in chosen)
    return total


def false_alarms(place: Place, noticed: dict[str, Sequence[str]]) -> list[str]:
    """Return the keys of errors whose tests fail without them, too.

    Parameters
    ----------
    place
        Where nothing is planted now.
    noticed
        By the key of an error, the tests that failed with it.
    """
    failing: set[str] = set()
    by_folder: dict[str, set[str]] = {}  # each with a configuration of its own
    for tests in noticed.values():
        if "-k" in tests:
            if run_tests(place, tests)[0] != 0:
                failing.add(shlex.join(tests))
        else:
            by_folder.setdefault(tests[0].partition("/")[0], set()).update(tests)
    for one_folder in by_folder.values():
        if run_tests(place, sorted(one_folder), limit_s=None)[0] != 0:
            failing.update(test for test in one_folder if run_tests(place, [test])[0] != 0)
    return [name for name, tests in noticed.items() if shlex.join(tests) in failing or failing & set(tests)]


def main() -> int:
    """Run as a program."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "paths", nargs="*", help="path prefixes of the files to plant errors in (default: all)"
    )
    parser.add_argument("--rest", action="store_true", help="skip errors that already have a result")
    parser.add_argument(
        "--in-place",
        type=Path,
        metavar="BUILD",
        help="plant in this checkout, and build in this folder of it",
    )
    parser.add_argument("--part", metavar="I/N", default="1/1", help="take every Nth error, from the Ith")
    parser.add_argument(
        "--work",
        type=Path,
        default=ROOT / "build" / "mutants",
        help="folder of the copy and of results (default: build/mutants)",
    )
    options = parser.parse_args()
    place = Place.of(options.work.resolve(), options.in_place and options.in_place.resolve())
    results = read_results(place)
    chosen = [m for m in MUTANTS if not options.paths or m.file.startswith(tuple(options.paths))]
    first, step = map(int, options.part.split("/"))
    chosen = chosen[first - 1 :: step]
    if options.rest:
        chosen = [m for m in chosen if key(m) not in results]
    if not chosen:
        parser.error("no mutants selected")
    n_native = sum(is_native(m.file) for m in chosen)
    expected = estimate_s(chosen, results)
    hint = (
        "no earlier result to estimate the time from"
        if expected is None
        else f"about {expected / 60:.0f} min"
    )
    print(f"{len(chosen)} errors, {n_native} in native files: {hint}", flush=True)
    start = time.monotonic()
    noticed: dict[str, Sequence[str]] = {}
    place.work.mkdir(parents=True, exist_ok=True)
    if not options.in_place:
        place.copy_sources()
    builds = n_native > 0 or options.in_place is not None
    if builds:
        place.configure()
        if said := place.compile():
            print(said)
            return 1
    place.make_package(built=builds)
    print(f"set up in {(time.monotonic() - start) / 60:.0f} min", flush=True)
    wrong = []
    for mutant in chosen:
        begin = time.monotonic()
        how, said = outcome(place, mutant)
        seconds = time.monotonic() - begin
        results[key(mutant)] = {
            "file": mutant.file,
            "reason": mutant.reason,
            "outcome": how,
            "seconds": seconds,
        }
        if how == CAUGHT:
            results[key(mutant)]["tests"] = noticed[key(mutant)] = failed_tests(place, mutant.tests)
        place.results.write_text(json.dumps(results, indent=1), encoding="utf-8")
        print(f"{how:9} {seconds:5.0f} s  {mutant.file}: {mutant.reason}", flush=True)
        if how != CAUGHT:
            wrong.append(mutant)
            (place.work / f"{key(mutant)}.log").write_text(said, encoding="utf-8")
            print(f"          {place.work / key(mutant)}.log", flush=True)
    for name in false_alarms(place, noticed):
        results[name]["outcome"] = FALSE
        wrong += [mutant for mutant in chosen if key(mutant) == name]
        print(f"{FALSE}: {results[name]['file']}: {results[name]['reason']}: {shlex.join(noticed[name])}")
    place.results.write_text(json.dumps(results, indent=1), encoding="utf-8")
    minutes = (time.monotonic() - start) / 60
    print(f"{len(chosen) - len(wrong)} of {len(chosen)} planted errors were caught, in {minutes:.0f} min")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
