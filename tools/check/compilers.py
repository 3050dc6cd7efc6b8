"""Check that the oldest supported compilers accept every source of the package that a build compiled.

Checks only the syntax, and only of files that changed since the last time; with GCC, only of C++::

    make lint
    .venv/bin/python tools/check/compilers.py build/emulator g++-11 clang++-14

A compiler that is not installed is skipped with a note, or is an error if ``METAL_PREFILL_REQUIRE_COMPILERS``
is set.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CHECKED = ("cpp/", "emulator/", "tests/native/")
# Options that affect the meaning of a source.
KEPT = re.compile(r"-[DIm].+|-std=.+|-fblocks|-f(no-)?objc-(arc|runtime=.+)")
RULES = """
rule check
  command = $compiler $options -w -fsyntax-only -MMD -MT $out -MF $out.d $in && touch $out
  depfile = $out.d
  deps = gcc
"""


def rules_of(build: Path, folder: Path, compiler: str) -> str:
    """Return ninja's rules that check the sources of a build."""
    clang = compiler.startswith("clang")
    lines = [RULES, f"compiler = {compiler}"]
    entries = json.loads((build / "compile_commands.json").read_text(encoding="utf-8"))
    for file, entry in {os.path.relpath(entry["file"], ROOT): entry for entry in entries}.items():
        # GCC checks only the plan of a pass among .mm files: builds without Metal compile it as C++.
        is_plan = file.startswith("cpp/metal/plan/")
        if not file.startswith(CHECKED) or (file.endswith(".mm") and not is_plan and not clang):
            continue
        language = "objective-c++" if clang and file.endswith(".mm") else "c++"
        options = [option for option in shlex.split(entry["command"]) if KEPT.fullmatch(option)]
        if language == "c++":
            options = [option for option in options if not option.startswith("-f")]
        lines += [f"build {folder / file}.ok: check {ROOT / file}"]
        lines += [f"  options = {shlex.join(options)} -x {language}"]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Check all sources with each compiler; return 1 if one is rejected or a required compiler is missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build", type=Path, help="folder of a build")
    parser.add_argument("compilers", nargs="+", help="names of compilers")
    arguments = parser.parse_args()
    jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL") or str(os.cpu_count() or 1)
    ninja = Path(sysconfig.get_path("scripts")) / "ninja"
    failed = False
    for compiler in arguments.compilers:
        if not shutil.which(compiler):
            print(
                f"{compiler} is not installed: nothing checked (tools/build/setup_packages.sh compilers)",
                file=sys.stderr,
            )
            failed |= bool(os.environ.get("METAL_PREFILL_REQUIRE_COMPILERS"))
            continue
        folder = ROOT / "build" / "compilers" / compiler
        folder.mkdir(parents=True, exist_ok=True)
        rules = rules_of(arguments.build.resolve(), folder, compiler)
        (folder / "build.ninja").write_text(rules, encoding="utf-8")
        done = subprocess.run([ninja, "--quiet", "-k", "0", "-j", jobs, "-C", folder], check=False)
        failed |= done.returncode != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
