"""Run clang-tidy over the project's sources that a build compiled, on all cores.

Checks are those of ``.clang-tidy``; any finding fails the run::

    make tidy
    .venv/bin/python tools/check/tidy.py build/emulator cpp/cpu cpp/model/model.cpp    # only what begins so
"""

import argparse
import json
import os
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def sources(build: Path, wanted: list[str]) -> list[str]:
    """Return the project's own sources in a build's compilation database, relative to its root."""
    entries = json.loads((build / "compile_commands.json").read_text(encoding="utf-8"))
    files = {os.path.relpath(entry["file"], ROOT) for entry in entries}
    prefixes = tuple(wanted) or ("cpp/", "emulator/", "tests/")
    return sorted(file for file in files if file.startswith(prefixes))


def check(build: Path, file: str) -> str:
    """Return the findings of clang-tidy in a file; empty without findings."""
    tidy = Path(sysconfig.get_path("scripts")) / "clang-tidy"
    command = [str(tidy), "-p", str(build), "--quiet", file]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stdout or done.stderr


def main() -> int:
    """Check all files, print findings as they come, and return 1 if there were any."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build", type=Path, help="folder of a configured build")
    parser.add_argument("sources", nargs="*", help="path prefixes of sources (default: all)")
    arguments = parser.parse_args()
    files = sources(arguments.build.resolve(), arguments.sources)
    if not files:
        parser.error(f"{arguments.build} compiles no source that begins so")
    jobs = int(os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL") or os.cpu_count() or 1)
    found = 0
    with ThreadPoolExecutor(jobs) as pool:
        for report in pool.map(lambda file: check(arguments.build.resolve(), file), files):
            found += bool(report)
            print(report, end="", flush=True)
    print(f"clang-tidy: {len(files)} files, {found} with findings", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
