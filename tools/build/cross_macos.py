#!/usr/bin/env python3
"""Build the wheel for macOS on Linux, and check it as far as possible without running it.

Compiler and C++ library come from the PyPI package ziglang; Foundation and Metal are declared by the
emulator's headers and linked against the stubs in tools/build/macos_stubs. The result is compiled, linked and
inspected, but not executed: neither a Metal device nor macOS is involved.
"""

import argparse
import hashlib
import importlib.util
import os
import re
import struct
import subprocess
import sys
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import zig

ROOT = Path(__file__).resolve().parents[2]
MINIMUM_MACOS = (13, 0)
PLATFORM_TAG = "macosx_13_0_arm64"
KERNEL_SETS = ("neon_i8mm", "neon_dotprod", "neon", "scalar")
DYLIBS = {
    "/System/Library/Frameworks/Foundation.framework/Versions/C/Foundation",
    "/System/Library/Frameworks/Metal.framework/Versions/A/Metal",
    "/usr/lib/libobjc.A.dylib",
    "/usr/lib/libSystem.B.dylib",
}

MAGIC_64, CPU_ARM64, FILE_DYLIB = 0xFEEDFACF, 0x0100000C, 6
LC_SYMTAB, LC_LOAD_DYLIB, LC_SEGMENT_64, LC_CODE_SIGNATURE, LC_BUILD_VERSION = 0x2, 0xC, 0x19, 0x1D, 0x32
SIGNATURES, CODE_DIRECTORY, SHA256 = 0xFADE0CC0, 0xFADE0C02, 2
N_EXT, N_TYPE, N_UNDEFINED = 0x01, 0x0E, 0x00
PLATFORM_MACOS = 1
DYNAMIC_LOOKUP = (0xFE, 0)  # as ordinal of a library: what dyld finds anywhere; zig writes 0


class CheckError(Exception):
    """The wheel is invalid."""


@dataclass
class MachO:
    """Facts from the load commands of a Mach-O file."""

    cpu: int = 0
    kind: int = 0
    platform: int = 0
    minimum: tuple[int, int] = (0, 0)
    signature_at: int = 0  # 0: there is none
    dylibs: set[str] = field(default_factory=set)
    sections: set[str] = field(default_factory=set)
    exported: set[str] = field(default_factory=set)
    undefined: set[str] = field(default_factory=set)
    looked_up: set[str] = field(default_factory=set)  # at load time, in whatever library has them


def read_macho(data: bytes) -> MachO:
    """Read a 64-bit little-endian Mach-O file; raises CheckError for anything else."""
    magic, cpu, _, kind, n_commands = struct.unpack_from("<5I", data)
    if magic != MAGIC_64:
        raise CheckError(f"no 64-bit Mach-O file: magic {magic:#x}")
    result = MachO(cpu=cpu, kind=kind)
    at = 32
    for _ in range(n_commands):
        command, size = struct.unpack_from("<2I", data, at)
        if command & 0x7FFFFFFF == LC_LOAD_DYLIB:
            (name_at,) = struct.unpack_from("<I", data, at + 8)
            result.dylibs.add(data[at + name_at : at + size].split(b"\0")[0].decode())
        elif command == LC_BUILD_VERSION:
            result.platform, minimum = struct.unpack_from("<2I", data, at + 8)
            result.minimum = (minimum >> 16, minimum >> 8 & 0xFF)
        elif command == LC_CODE_SIGNATURE:
            (result.signature_at,) = struct.unpack_from("<I", data, at + 8)
        elif command == LC_SEGMENT_64:
            (n_sections,) = struct.unpack_from("<I", data, at + 64)
            for i in range(n_sections):
                name = data[at + 72 + 80 * i : at + 88 + 80 * i]
                result.sections.add(name.split(b"\0")[0].decode())
        elif command == LC_SYMTAB:
            symbols_at, n_symbols, strings_at, _ = struct.unpack_from("<4I", data, at + 8)
            for i in range(n_symbols):
                name_at, flags, _, description, _ = struct.unpack_from("<IBBHQ", data, symbols_at + 16 * i)
                start = strings_at + name_at
                name_text = data[start : data.index(b"\0", start)].decode()
                if flags & N_EXT:
                    undefined = flags & N_TYPE == N_UNDEFINED
                    (result.undefined if undefined else result.exported).add(name_text)
                    if undefined and description >> 8 in DYNAMIC_LOOKUP:
                        result.looked_up.add(name_text)
        at += size
    return result


def check_signature(data: bytes, at: int) -> int:
    """Check the code signature at an offset, without which Apple Silicon loads no library; return its pages.

    The linker makes an ad-hoc signature: a hash of each page, without a certificate. A tool that changes the
    file afterwards invalidates it.
    """
    magic, _, count, kind, offset = struct.unpack_from(">5I", data, at) if at else (0, 0, 0, 0, 0)
    if magic != SIGNATURES or count != 1 or kind != 0:
        raise CheckError("no ad-hoc code signature")
    directory = at + offset
    magic, _, _, _, hashes, _, _, pages, limit, size, algorithm, _, shift = struct.unpack_from(
        ">9I4B", data, directory
    )
    if magic != CODE_DIRECTORY or algorithm != SHA256 or limit != at or pages != -(-limit >> shift):
        raise CheckError(
            f"the code signature has {pages} hashes of type {algorithm} for {limit} of {at} bytes"
        )
    for page in range(pages):
        content = data[page << shift : min(page + 1 << shift, limit)]
        stored = directory + hashes + size * page
        if hashlib.sha256(content).digest()[:size] != data[stored : stored + size]:
            raise CheckError(f"page {page} differs from its hash in the code signature")
    return int(pages)


def check_extension(data: bytes) -> list[str]:
    """Check the extension module, and return a report in lines."""
    found = read_macho(data)
    if found.cpu != CPU_ARM64 or found.kind != FILE_DYLIB:
        raise CheckError(f"expected an arm64 library, got cpu {found.cpu:#x}, file type {found.kind}")
    if found.platform != PLATFORM_MACOS or found.minimum != MINIMUM_MACOS:
        raise CheckError(f"built for platform {found.platform}, version {found.minimum}")
    if not found.dylibs <= DYLIBS or len(found.dylibs) < len(DYLIBS):
        raise CheckError(f"linked to {sorted(found.dylibs)}, expected {sorted(DYLIBS)}")
    if "_PyInit__core" not in found.exported:
        raise CheckError("PyInit__core is not exported")
    if "__objc_selrefs" not in found.sections:
        raise CheckError("no Objective-C in it")
    python = {name for name in found.undefined if re.match(r"__?Py", name)}
    objc = {n for n in found.undefined if n.startswith(("_OBJC_CLASS_$", "_objc_", "_MTL", "__objc"))}
    if "_MTLCreateSystemDefaultDevice" not in objc:
        raise CheckError("no Metal in it")
    for kernels in KERNEL_SETS:  # their names are strings in the library
        if kernels.encode() + b"\0" not in data:
            raise CheckError(f"the kernels {kernels} are missing")
    if found.looked_up != python:  # all others were found in a library when linking
        raise CheckError(f"symbols that nothing has: {sorted(found.looked_up ^ python)}")
    pages = check_signature(data, found.signature_at)
    return [
        f"arm64 library for macOS {found.minimum[0]}.{found.minimum[1]} and later",
        f"ad-hoc code signature of {pages} pages",
        "linked to " + ", ".join(sorted(Path(d).name for d in found.dylibs)),
        "kernels of the CPU engine: " + ", ".join(KERNEL_SETS),
        f"{len(python)} symbols of Python, {len(objc)} of Objective-C and Metal, "
        f"{len(found.undefined) - len(python) - len(objc)} of the system",
    ]


def write_tools(folder: Path) -> None:
    """Write the commands that CMake calls: zig's compiler and archiver under the names of Apple's."""
    target = "aarch64-macos.{}.{}".format(*MINIMUM_MACOS)
    # Zig's linker knows no response files and no bundles: Python's symbols are found at load time, and
    # Python loads a dynamic library as well. Architectures are versions of a generic processor to it. CMake
    # preprocesses with "-o -", which zig takes for the name of a file: without it, it prints as well.
    compiler = (
        "arguments=(); linking=-Wl,-undefined,dynamic_lookup\n"
        'for argument in "$@"; do\n'
        '  case "$argument" in\n'
        "    -Wl,@*|-Wl,-S|-Wl,-x) ;;\n"
        "    -bundle) arguments+=(-shared) ;;\n"
        '    -march=armv8.2-a+*) arguments+=("-mcpu=generic+v8_2a+${argument#-march=armv8.2-a+}") ;;\n'
        '    -c|-E|-M) linking=; arguments+=("$argument") ;;\n'
        '    -) if [ "${arguments[*]: -1}" = -o ]; then unset "arguments[-1]"; else arguments+=(-); fi ;;\n'
        '    *) arguments+=("$argument") ;;\n'
        "  esac\n"
        "done\n"
        f'{zig.command()} c++ -target {target} "${{arguments[@]}}" $linking\n'
    )
    zig.write_commands(folder, cxx=compiler, unused="exit 1\n")


def native_stub() -> Path:
    """Return the stub of the module as it was built for this machine: that of macOS cannot be imported."""
    spec = importlib.util.find_spec("metal_prefill")
    if spec is None or spec.origin is None:
        raise CheckError(
            "the stub of _core is made by a build for this machine: run `make build/.plain` first"
        )
    return Path(spec.origin).with_name("_core.pyi")


def build(folder: Path, stub: Path) -> Path:
    """Build the wheel and set the tag of its target system."""
    write_tools(folder / "tools")
    zig.forget_python(folder / "build")
    wheels = folder / "wheels"
    for old in wheels.glob("*.whl"):
        old.unlink()
    environment = os.environ | {"CROSS_MACOS_TOOLS": str(folder / "tools"), "CMAKE_GENERATOR": "Ninja"}
    soabi = f"cpython-{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}-darwin"
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        str(ROOT),
        "--no-build-isolation",
        "--no-deps",
        "-w",
        str(wheels),
    ]
    command += ["-C", f"build-dir={folder / 'build'}"]
    command += ["-C", f"cmake.define.CMAKE_TOOLCHAIN_FILE={ROOT / 'cmake/cross_macos.cmake'}"]
    command += ["-C", f"cmake.define.SKBUILD_SOABI={soabi}"]
    headers = zig.python_headers(folder / f"include-{sys.version_info.minor}")
    command += ["-C", f"cmake.define.Python_INCLUDE_DIR={headers}"]
    command += ["-C", f"cmake.define.METAL_PREFILL_STUB={stub}"]
    subprocess.run(command, check=True, env=environment, cwd=folder)
    (built,) = wheels.glob("*.whl")
    tag = ["--platform-tag", PLATFORM_TAG, "--remove"]
    subprocess.run(
        [sys.executable, "-m", "wheel", "tags", *tag, str(built)], check=True, stdout=subprocess.DEVNULL
    )
    (wheel,) = wheels.glob(f"*{PLATFORM_TAG}.whl")
    return wheel


def main() -> int:
    """Run the command line; see the module docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "build/cross-macos", help="folder for all output"
    )
    parser.add_argument("--check", type=Path, help="only check this wheel")
    parser.add_argument(
        "--stub", type=Path, help="_core.pyi of a build for this machine (default: installed)"
    )
    options = parser.parse_args()
    wheel = options.check or build(options.folder.resolve(), options.stub or native_stub())
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if re.search(r"/_core\..*so$", name)]
        if len(names) != 1:
            raise CheckError(f"expected one extension in {wheel.name}, got {names}")
        if "metal_prefill/_core.pyi" not in archive.namelist():
            raise CheckError(f"{wheel.name} lacks the stub _core.pyi")
        lines = check_extension(archive.read(names[0]))
    print(f"{wheel.name}: {names[0]}", *lines, "compiled and linked, not executed", sep="\n  ")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except CheckError as error:
        sys.exit(f"cross_macos: {error}")
