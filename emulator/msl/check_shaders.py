#!/usr/bin/env python3
"""Check Metal sources for errors that Apple's compiler would report, as far as clang can find them.

Scans a source for words and literals that Metal does not support, then compiles it as C++ for OpenCL, which
shares Metal's address spaces and vector types, and searches clang's syntax tree for pointers without address
space. Generates no code. A source that passes may still be rejected by Apple's compiler.

Example
-------
``check_shaders.py shaders/*.metal -I shaders``
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from scanner.ast_check import Checker
from scanner.preprocess import add_options, find_clang, flags_of
from scanner.program import translate_for_check
from scanner.tokens import SourceError

SHIM = Path(__file__).resolve().parent / "shim"
PROLOGUE = '#define MSL_CHECK 1\n#include "msl.h"\n'
# x86-64 rather than a GPU target, since it supports half.
FLAGS = ["-x", "clcpp", "-target", "x86_64-unknown-linux-gnu", "-cl-std=clc++2021", "-Xclang",
         "-cl-ext=-all,+cl_khr_fp16,+__cl_clang_function_pointers,+__opencl_c_int64,"
         "+__opencl_c_generic_address_space", "-cl-no-stdinc", "-fsyntax-only", "-ferror-limit=0",
         "-fsigned-char", "-I", str(SHIM)]  # fmt: skip
WARNINGS = ["-Wall", "-Wextra", "-Wconversion", "-Wno-sign-conversion", "-Wno-sign-compare",
            "-Wno-implicit-int-conversion", "-Wno-implicit-int-float-conversion", "-Wno-unknown-attributes",
            "-Wno-unused", "-Wno-unused-parameter", "-Wno-undefined-internal", "-Wno-undefined-inline",
            "-Wno-duplicate-decl-specifier", "-Wno-return-type", "-Wno-unknown-pragmas",
            "-Wno-missing-braces",
            "-Wno-missing-field-initializers", "-Wno-invalid-constexpr", "-Wno-constant-conversion",
            "-Wno-implicit-float-conversion", "-Wno-implicit-const-int-float-conversion"]  # fmt: skip


def diagnostics(lines: list[str]) -> list[str]:
    """Return clang's errors and warnings; those inside the shim name the source line that caused them."""
    found = []
    for index, line in enumerate(lines):
        match = re.match(r"(?P<file>.*):\d+:\d+: (?P<text>(?:fatal error|error|warning): .*)", line)
        if match is None:
            continue
        if match["file"].startswith(str(SHIM)):
            notes = (re.match(r"(.*:\d+:\d+): note: in instantiation", later) for later in lines[index + 1 :])
            places = (note[1] for note in notes if note and not note[1].startswith(str(SHIM)))
            line = f"{next(places, match['file'])}: {match['text']}"
        found.append(line)
    return found


def precompile(folder: Path, metal_version: int) -> list[str]:
    """Compile the shim, once for all sources, and return the command that checks a source after it.

    The syntax tree of such a source contains only the parts of the shim that it uses.
    """
    header, compiled = folder / "prologue.h", folder / "prologue.pch"
    header.write_text(PROLOGUE, encoding="utf-8")
    flags = [find_clang(), *FLAGS, f"-D__METAL_VERSION__={metal_version}"]
    with open(compiled, "wb") as output:  # together with -fsyntax-only, -o has no effect
        subprocess.run([*flags, "-Xclang", "-emit-pch", str(header)], stdout=output, check=True)
    return [*flags, "-Xclang", "-include-pch", "-Xclang", str(compiled)]


def check(source: Path, metal_version: int, flags: list[str], compiler: list[str], folder: Path) -> list[str]:
    """Return messages, each with file and line; empty for a valid source.

    Parameters
    ----------
    source, metal_version, flags
        Source, and options of its preprocessing.
    compiler
        Command that `precompile` returned.
    folder
        Folder for files.
    """
    try:
        text, errors = translate_for_check(source, metal_version, flags)
    except SourceError as error:
        return [str(error)]
    cpp = folder / (source.stem + ".check.cpp")
    cpp.write_text(text, encoding="utf-8")
    command = [*compiler, *WARNINGS, "-Xclang", "-ast-dump=json", str(cpp)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    messages = [str(error) for error in errors]
    messages += diagnostics(result.stderr.splitlines())
    if any(": error: " in message or "fatal error" in message for message in messages):
        return messages
    tree = json.loads(result.stdout)
    messages += [f"{file}:{line}: error: {message}" for file, line, message in Checker(str(SHIM)).check(tree)]
    return messages


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; see the module docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sources", nargs="+", type=Path)
    add_options(parser)
    options = parser.parse_args(arguments)
    flags = flags_of(options)
    failed = 0
    sys.setrecursionlimit(20000)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        compiler = precompile(folder, options.metal_version)
        for source in options.sources:
            messages = check(source, options.metal_version, flags, compiler, folder)
            failed += bool(messages)
            for message in messages:
                print(message, file=sys.stderr)
            print(f"{source}: {'refused' if messages else 'ok'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
