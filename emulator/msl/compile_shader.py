#!/usr/bin/env python3
"""Compile a Metal source for an executor: to an object, or to assembly for NVIDIA GPUs.

Examples
--------
``compile_shader.py rope.metal -o rope.o`` makes an object with code for CPU threads, ``--ptx`` one with code
for NVIDIA GPUs; a program that links both finds them by the source's text. ``--ptx -o rope.ptx`` only
compiles.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from scanner import ptx
from scanner.emit import raw_string
from scanner.preprocess import add_options, find_clang, flags_of
from scanner.program import translate
from scanner.selection import Macros
from scanner.tokens import SourceError

HERE = Path(__file__).resolve().parent
LANGUAGE = ["-std=c++17", "-fsigned-char", "-fno-exceptions", "-fno-rtti", "-ffp-contract=fast",
            "-fno-math-errno", "-ffreestanding", "-fno-strict-aliasing",
            "-Wall", "-Wextra", "-Wno-unused", "-Wno-unknown-pragmas", "-Wno-duplicate-decl-specifier",
            "-Wno-psabi", "-Wno-missing-field-initializers", "-Wno-missing-braces", "-Wno-sign-compare",
            "-Wno-constant-conversion", "-Wno-ignored-attributes", "-Wno-invalid-constexpr"]  # fmt: skip
FLAGS = [*LANGUAGE, "-O2", "-g1", "-fPIC", "-fvisibility=hidden", "-Xclang",
         "-ffloat16-excess-precision=none"]  # fmt: skip
# Everything is inlined: calls would pass arguments through memory. Simdgroup operations and barriers
# must not move into branches: functions are convergent.
PTX_FLAGS = [*LANGUAGE, "-O3", "--target=nvptx64-nvidia-cuda", "-march=sm_80", "-Xclang", "-target-feature",
             "-Xclang", "+ptx78", "--cuda-path=/dev/null", "-nostdinc", "-fconvergent-functions",
             "-mllvm", "-inline-threshold=100000", "-Wno-unknown-cuda-version", "-S"]  # fmt: skip
# Without the last option, only the load of "+=" would be counted, not its store.
CHECKED = ["-fsanitize=kernel-address", "-mllvm", "-asan-instrumentation-with-call-threshold=0",
           "-mllvm", "-asan-stack=0", "-mllvm", "-asan-globals=0", "-mllvm",
           "-asan-kernel-mem-intrinsic-prefix=1", "-mllvm", "-asan-opt-same-temp=0"]  # fmt: skip


def architecture_flags(clang: str) -> list[str]:
    """Return the flags of the instruction set that shaders may use: 2013's on x86-64, the base elsewhere."""
    target = subprocess.run([clang, "-dumpmachine"], capture_output=True, text=True, check=True).stdout
    return ["-march=x86-64-v3"] if target.startswith("x86_64") else []


def sanitizer_flags(sanitizers: str) -> list[str]:
    """Return the flags for a list such as 'address,undefined', with the macros that the executor shares."""
    if not sanitizers:
        return []
    names = sanitizers.split(",")
    # Optimized less, since large kernels take minutes otherwise, and without checks that shaders cannot fail
    # or that AddressSanitizer performs better.
    omitted = "null,object-size,pointer-overflow,vptr,function" if "undefined" in names else ""
    return [f"-fsanitize={sanitizers}", f"-fno-sanitize={omitted}", "-O1", "-fno-omit-frame-pointer",
            f"-DMETAL_EMULATOR_ASAN={int('address' in names)}",
            f"-DMETAL_EMULATOR_TSAN={int('thread' in names)}"]  # fmt: skip


def run(command: list[str]) -> str:
    """Run a compiler, print its warnings and return its output; raises SourceError with its messages."""
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise SourceError(result.stderr.strip())
    if result.stderr.strip():
        print(result.stderr.strip(), file=sys.stderr)
    return result.stdout


def compile_unit(cpp: Path, output: Path, metal_version: int, checked: bool, flags: list[str]) -> None:
    """Compile a translated source to an object."""
    clang = find_clang()
    command = [clang, *FLAGS, *architecture_flags(clang), f"-D__METAL_VERSION__={metal_version}",
               f"-DMSL_CHECKED={int(checked)}", *(CHECKED if checked else []), "-I", str(HERE / "shim"),
               "-I", str(HERE.parent / "cpu"), *flags, "-c", str(cpp), "-o", str(output)]  # fmt: skip
    run(command)


def compile_ptx(cpp: Path, metal_version: int, name: str) -> dict[str, str]:
    """Return the modules of a translated source for NVIDIA GPUs by the names of their entries."""
    command = [find_clang(), *PTX_FLAGS, f"-D__METAL_VERSION__={metal_version}", "-I", str(HERE / "shim"),
               "-I", str(HERE.parent / "cuda"), str(cpp), "-o", "-"]  # fmt: skip
    return ptx.split(run(command), name)


def embed_ptx(modules: dict[str, str], source: Path, output: Path) -> None:
    """Write an object that registers the modules of a source."""
    rows = [f'  {{"{name}", {raw_string(text)}}},' for name, text in modules.items()]
    text = source.read_text(encoding="utf-8")
    lines = ['#include "image.h"', "namespace {", f"const char kSource[] = {raw_string(text)};"]
    lines += ["const metal_emulator::cuda::Module kModules[] = {", *rows, "  {}};"]
    members = f'"{source.name}", {{kSource, sizeof kSource - 1}}, {{kModules, {len(modules)}}}'
    lines += [f"const metal_emulator::cuda::Image kImage = {{{members}}};"]
    lines += ["const bool kRegistered = metal_emulator::cuda::register_image(&kImage);", "}  // namespace"]
    command = [find_clang(), "-std=c++20", "-fPIC", "-fvisibility=hidden", "-x", "c++", "-I",
               str(HERE.parent / "cuda"), "-c", "-", "-o", str(output)]  # fmt: skip
    subprocess.run(command, input="\n".join(lines), text=True, check=True)


def without_unrolling(translated: str) -> str:
    """Prevent unrolling of loops, which makes instrumented kernels too large. Keeps the embedded source."""
    code, source, table = translated.partition("const char kSource[]")
    unrolling = r"^[ \t]*#[ \t]*pragma[ \t]+unroll[^\n]*$|_Pragma\(\"unroll\"\)"
    return re.sub(unrolling, "", code, flags=re.MULTILINE) + source + table


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; see the module docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--ptx", action="store_true", help="for NVIDIA GPUs; -o .ptx: only compile")
    add_options(parser)
    parser.add_argument("--guard", help="macro that omits all kernels that no --select restores")
    parser.add_argument(
        "--select", action="append", default=[], metavar="MACRO", help="macro that restores kernels"
    )
    parser.add_argument("--depfile", help="write a Make rule with the files that are read")
    parser.add_argument("--checked", action="store_true", help="let every memory access call the executor")
    parser.add_argument("--sanitize", default="", metavar="LIST", help="such as address,undefined or thread")
    options = parser.parse_args(arguments)
    macros = flags_of(options)
    if options.depfile:
        macros += ["-MD", "-MF", options.depfile, "-MT", str(options.output)]
    try:
        text = translate(
            options.source,
            "ptx" if options.ptx else "cpu",
            options.metal_version,
            macros,
            Macros(options.guard, tuple(options.select)),
        )
        if options.sanitize:
            text = without_unrolling(text)
        # A fixed path, since compilers' caches compare paths.
        cpp = options.output.with_name(f"{options.output.name}.cpp")
        cpp.write_text(text, encoding="utf-8")
        if options.ptx:
            modules = compile_ptx(cpp, options.metal_version, options.source.name)
            if options.output.suffix == ".ptx":
                options.output.write_text("".join(modules.values()), encoding="utf-8")
            else:
                embed_ptx(modules, options.source, options.output)
            return 0
        flags = sanitizer_flags(options.sanitize)
        compile_unit(cpp, options.output, options.metal_version, options.checked, flags)
    except SourceError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
