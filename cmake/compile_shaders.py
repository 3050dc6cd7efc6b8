#!/usr/bin/env python3
"""Compile Metal sources into one library with Apple's compiler, if it is installed and accepts all of them.

Every source is compiled, so that all messages appear at once. If anything fails there is no library, which
is an error only with ``--required``: the package also contains the sources, which it then compiles when a
model is opened.

Examples
--------
Options after ``--`` are those of the compiler::

    compile_shaders.py --library build/shaders.metallib shaders/*.metal -- -std=metal3.0
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


def xcrun(*command: str | Path) -> tuple[bool, str]:
    """Run one of Apple's tools; return whether it succeeded, and its messages."""
    try:
        done = subprocess.run(["xcrun", "-sdk", "macosx", *command], capture_output=True, text=True)
    except OSError as error:
        return False, str(error)
    text = (done.stdout + done.stderr).strip()
    return done.returncode == 0, text if text or done.returncode == 0 else f"exit code {done.returncode}"


def main() -> int:
    """Run the command line; see the module's text."""
    arguments = sys.argv[1:]
    end = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shaders", nargs="+", type=Path)
    parser.add_argument("--library", type=Path, required=True, help="file to write")
    parser.add_argument("--required", action="store_true", help="fail if there is no library")
    options = parser.parse_args(arguments[:end])

    library: Path = options.library
    library.unlink(missing_ok=True)

    def compile_one(shader: Path) -> tuple[bool, str]:
        air = library.with_name(shader.stem + ".air")
        return xcrun("metal", *arguments[end + 1 :], "-c", shader, "-o", air)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(compile_one, options.shaders))
    if all(compiled for compiled, _ in results):
        airs = [library.with_name(shader.stem + ".air") for shader in options.shaders]
        results.append(xcrun("metallib", *airs, "-o", library))
    for text in dict.fromkeys(text for _, text in results):  # without a compiler, all are the same
        print(text, end="\n" if text else "")
    if library.exists():
        return 0
    print("The shaders are not compiled with the package, but when a model is first opened.")
    return 1 if options.required else 0


if __name__ == "__main__":
    sys.exit(main())
