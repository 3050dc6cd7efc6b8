"""Change single operators, numbers and conditions of sources, and print the changes that all tests pass.

    make mutants                                   # 20 mutants of the files that differ from main
    python tools/check/mutate.py cpp/cache -n 50   # of these files or folders
    python tools/check/mutate.py . --seed 7        # of the whole project

cosmic-ray mutates Python, universalmutator C++ and shaders. Each mutant is built in this checkout, in the
folder of `make test`, and tested by the tests of its part; afterwards the file is restored. Mutants that do
not compile are not counted. A survivor indicates a missing test, or does not change any result.
"""

import argparse
import contextlib
import difflib
import importlib
import importlib.util
import io
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build" / "mutants"
BIN = Path(sys.executable).parent  # cmake and ninja of the environment
BUILDS = ("build/emulator", "build/metal", "build/testing")
TIME_LIMIT_S = 600  # for the tests of a mutant; one that hangs is noticed
# Tests of each part of the project, by the prefix of its files; the first matching prefix applies.
PYTHON = "python/metal_prefill/"
_MODELS = "tests/engine/test_experts.py tests/engine/test_layered_models.py tests/engine/test_q8_cache.py"
_GPU = ("cost_model", "trace", "doctor", "fastest_decode", "kernel_checks", "first_contact")
PARTS = {
    "shaders/": "tests/metal",
    "cpp/metal/": f"tests/metal {_MODELS}",
    "cpp/cpu/": f"tests/cpu tests/engine/test_engine.py tests/engine/test_encoders.py {_MODELS}",
    "cpp/sampling/": "tests/generation",
    "cpp/": "tests/engine",
    "emulator/": "emulator/tests",
    **{
        PYTHON + room: f"tests/{room}"
        for room in ("files/", "text/", "conversion/", "generation/", "tasks/", "serve/", "bench/", "synth/")
    },
    f"{PYTHON}storage/": "tests/storage tests/files/test_replacing.py",
    f"{PYTHON}_support/": "tests/engine/test_arguments.py tests/engine/test_fork.py tests/files tests/cli",
    f"{PYTHON}hub/": "tests/hub tests/files/test_split_files.py tests/conversion/test_conversion.py",
    **{PYTHON + room: "tests/cli" for room in ("commands/", "cli", "chat")},
    f"{PYTHON}gpu/": " ".join(f"tests/metal/test_{name}.py" for name in _GPU),
    f"{PYTHON}integrations/": "tests/integrations tests/clients",
    f"{PYTHON}sentence_transformers/": "tests/tasks/test_sentence_transformers.py",
    PYTHON: "tests/engine tests/generation/test_generation.py",
}
Mutant = Callable[[], str]  # returns the changed text of a file


def python_mutants(text: str) -> list[Mutant]:
    """Return the mutants of a Python file."""
    mutating, plugins, trees = (
        importlib.import_module(f"cosmic_ray.{n}") for n in ("mutating", "plugins", "ast")
    )
    nodes = list(trees.ast_nodes(trees.get_ast(text)))
    found: list[Mutant] = []
    for name in plugins.operator_names():
        # Skips `|`, which is used in unevaluated annotations, and operators that need names of variables.
        if "BitOr_" not in name and not plugins.get_operator(name).arguments():
            operator = plugins.get_operator(name)()
            count = sum(1 for node in nodes for _ in operator.mutation_positions(node))
            found += [partial(mutating.mutate_code, text, operator, i) for i in range(count)]
    return found


def native_mutants(text: str) -> list[Mutant]:
    """Return the mutants of a C++ file or a shader; not all compile."""
    mutator: Any = importlib.import_module("universalmutator.mutator")
    lines = text.splitlines(keepends=True)
    rules = ["universal.rules", "c_like.rules", "cpp.rules"]
    with contextlib.redirect_stdout(io.StringIO()):
        found = mutator.mutants_regexp(lines, rules, ignorePatterns=[r"^\s*//"], ignoreStringOnly=True)
    return [partial("".join, [*lines[: n - 1], new, *lines[n:]]) for n, new, *_ in found]


def chosen_files(paths: Sequence[str], since: str) -> list[str]:
    """Return the sources among these paths, or those that differ from a revision."""
    command = ["git", "ls-files", "--", *paths] if paths else ["git", "diff", "--name-only", since]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    kinds = {"python/": (".py",), "cpp/": (".cpp", ".h", ".mm"), "shaders/": (".metal", ".h")}
    kinds["emulator/"] = kinds["cpp/"]
    return [f for f in listed if f.endswith(kinds.get(f.partition("/")[0] + "/", ())) and (ROOT / f).exists()]


def build(folder: Path) -> bool:
    """Build the native modules; return whether that succeeds."""
    return subprocess.run([BIN / "ninja", "-C", folder], capture_output=True, check=False).returncode == 0


def make_package(modules: Iterable[Path]) -> None:
    """Make a package of links to the Python files and to native modules."""
    shutil.rmtree(WORK, ignore_errors=True)
    (WORK / "metal_prefill").mkdir(parents=True)
    for path in (ROOT / PYTHON).iterdir():
        if path.suffix != ".so":
            (WORK / "metal_prefill" / path.name).symlink_to(path)
    for module in modules:
        home = WORK / "metal_prefill" if module.name.startswith("_core") else WORK
        (home / module.name).symlink_to(module)


def tests_pass(tests: Sequence[str]) -> bool:
    """Run tests until one fails."""
    command = [sys.executable, "-B", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    with contextlib.suppress(subprocess.TimeoutExpired):
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(WORK)},
            timeout=TIME_LIMIT_S,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode == 0
    return False


def main() -> int:
    """Run as a program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("paths", nargs="*", help="files and folders (default: those that differ)")
    parser.add_argument("--since", default="main", metavar="REVISION", help="default: %(default)s")
    parser.add_argument("-n", type=int, default=20, help="number of mutants (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--tests", nargs="+", help="arguments for pytest (default: by PARTS)")
    options = parser.parse_args()
    files = chosen_files(options.paths, options.since)
    native = any(not file.endswith(".py") for file in files)
    folder = next((f for f in map(ROOT.joinpath, BUILDS) if (f / "build.ninja").exists()), None)
    spec = importlib.util.find_spec("metal_prefill")
    if not files or (folder is None and native) or spec is None or spec.origin is None:
        parser.error("run `make test` first" if files else "no source differs")
    site = Path(spec.origin).parents[1]
    installed = [*site.glob("metal_prefill/_core*.so"), *site.glob("_*_testing*.so")]
    tests_of = {f: options.tests or next(PARTS[p] for p in PARTS if f.startswith(p)).split() for f in files}
    make_package(folder.rglob("_*.so") if native and folder else installed)
    for tests in {tuple(tests) for tests in tests_of.values()}:
        if not tests_pass(tests):
            parser.error(f"{' '.join(tests)}: fails without a mutant")
    texts = {file: (ROOT / file).read_text(encoding="utf-8") for file in files}
    mutants = [
        (file, mutant)
        for file, text in texts.items()
        for mutant in (python_mutants if file.endswith(".py") else native_mutants)(text)
    ]
    print(f"{len(mutants)} mutants of {len(files)} files, seed {options.seed}", flush=True)
    random.Random(options.seed).shuffle(mutants)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # restores the file, too
    tried = survived = 0
    for file, mutant in mutants:
        if tried == options.n:
            break
        text = mutant()
        try:
            (ROOT / file).write_text(text, encoding="utf-8")
            if folder and not file.endswith(".py") and not build(folder):
                continue
            tried += 1
            if tests_pass(tests_of[file]):
                survived += 1
                lines = difflib.unified_diff(
                    texts[file].splitlines(), text.splitlines(), file, "", "", "", 0, ""
                )
                print("\n".join(line for line in lines if not line.startswith("+++")), flush=True)
        finally:
            (ROOT / file).write_text(texts[file], encoding="utf-8")
    if native and folder:
        build(folder)
    print(f"{survived} of {tried} mutants survived")
    return 0


if __name__ == "__main__":
    sys.exit(main())
