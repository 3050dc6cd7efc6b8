"""Build the wheel for macOS on Linux, and check it as far as possible without running it.

Compiler and C++ library come from the PyPI package ziglang; Foundation and Metal are declared by the
emulator's headers and linked against the stubs in tools/build/macos_stubs. The result is compiled, linked and
inspected, but not executed: neither a Metal device nor macOS is involved.
"""

import hashlib
import re
import struct
from pathlib import Path
from typing import Any

import zig
from zig import WheelError

MINIMUM_MACOS = [13, 0, 0]
PLATFORM_TAG = "macosx_13_0_arm64"
DYLIBS = {
    "/System/Library/Frameworks/Foundation.framework/Versions/C/Foundation",
    "/System/Library/Frameworks/Metal.framework/Versions/A/Metal",
    "/usr/lib/libobjc.A.dylib",
    "/usr/lib/libSystem.B.dylib",
}

SIGNATURES, CODE_DIRECTORY, SHA256 = 0xFADE0CC0, 0xFADE0C02, 2
N_EXT, N_TYPE, N_UNDEFINED = 0x01, 0x0E, 0x00  # of a symbol
DYNAMIC_LOOKUP = (0xFE, 0)  # as ordinal of a library: dyld searches all libraries; zig writes 0


def check_signature(data: bytes, at: int) -> int:
    """Check the code signature at an offset, without which Apple Silicon loads no library; return its pages.

    The linker makes an ad-hoc signature: a hash of each page, without a certificate. A tool that changes the
    file afterwards invalidates it.
    """
    magic, _, count, kind, offset = struct.unpack_from(">5I", data, at) if at else (0, 0, 0, 0, 0)
    if magic != SIGNATURES or count != 1 or kind != 0:
        raise WheelError("no ad-hoc code signature")
    directory = at + offset
    magic, _, _, _, hashes, _, _, pages, limit, size, algorithm, _, shift = struct.unpack_from(
        ">9I4B", data, directory
    )
    if magic != CODE_DIRECTORY or algorithm != SHA256 or limit != at or pages != -(-limit >> shift):
        raise WheelError(
            f"the code signature has {pages} hashes of type {algorithm} for {limit} of {at} bytes"
        )
    for page in range(pages):
        content = data[page << shift : min(page + 1 << shift, limit)]
        stored = directory + hashes + size * page
        if hashlib.sha256(content).digest()[:size] != data[stored : stored + size]:
            raise WheelError(f"page {page} differs from its hash in the code signature")
    return int(pages)


def check_extension(data: bytes) -> list[str]:
    """Check the extension module, and return a report in lines."""
    import lief

    file = lief.MachO.parse(data)
    if file is None:
        raise WheelError("no Mach-O file")
    found: Any = file.at(0)
    header, built = found.header, found.build_version
    if header.cpu_type != header.CPU_TYPE.ARM64 or header.file_type != header.FILE_TYPE.DYLIB:
        raise WheelError(f"expected an arm64 library, got {header.cpu_type}, {header.file_type}")
    if built.platform != built.PLATFORMS.MACOS or built.minos != MINIMUM_MACOS:
        raise WheelError(f"built for {built.platform}, version {built.minos}")
    own_name = lief.MachO.LoadCommand.TYPE.ID_DYLIB
    dylibs = {library.name for library in found.libraries if library.command != own_name}
    if dylibs != DYLIBS:
        raise WheelError(f"linked to {sorted(dylibs)}, expected {sorted(DYLIBS)}")
    symbols = [symbol for symbol in found.symbols if symbol.raw_type & N_EXT]
    undefined = {symbol.name: symbol for symbol in symbols if symbol.raw_type & N_TYPE == N_UNDEFINED}
    if "_PyInit__core" not in {symbol.name for symbol in symbols} - undefined.keys():
        raise WheelError("PyInit__core is not exported")
    if found.get_section("__objc_selrefs") is None:
        raise WheelError("no Objective-C in it")
    python = {name for name in undefined if re.match(r"__?Py", name)}
    objc = {name for name in undefined if name.startswith(("_OBJC_CLASS_$", "_objc_", "_MTL", "__objc"))}
    if "_MTLCreateSystemDefaultDevice" not in objc:
        raise WheelError("no Metal in it")
    looked_up = {name for name, symbol in undefined.items() if symbol.library_ordinal in DYNAMIC_LOOKUP}
    if looked_up != python:  # the linker found all others in a library
        raise WheelError(f"symbols that nothing has: {sorted(looked_up ^ python)}")
    pages = check_signature(data, found.code_signature.data_offset if found.has_code_signature else 0)
    return [
        f"arm64 library for macOS {built.minos[0]}.{built.minos[1]} and later",
        f"ad-hoc code signature of {pages} pages",
        "linked to " + ", ".join(sorted(Path(dylib).name for dylib in dylibs)),
        f"{len(python)} symbols of Python, {len(objc)} of Objective-C and Metal, "
        f"{len(undefined) - len(python) - len(objc)} of the system",
        "compiled and linked, not executed",
    ]


# Zig's linker supports neither response files nor bundles. Python also loads a dynamic library, whose Python
# symbols are found at load time.
CASES = """\
    -Wl,@*|-Wl,-S|-Wl,-x) ;;
    -bundle) arguments+=(-shared -Wl,-undefined,dynamic_lookup) ;;"""


def build(python: Path, version: str, folder: Path, stub: Path) -> Path:
    """Build the wheel of a version of Python and set the tag of its target system; return its path."""
    target = "aarch64-macos.{}.{}".format(*MINIMUM_MACOS)
    zig.write_commands(folder / "tools", cxx=zig.compiler(target, CASES), unused="exit 1\n")
    soabi = f"cpython-{version.replace('.', '')}-darwin"
    return zig.build_wheel(python, folder, PLATFORM_TAG, system=("Darwin", "arm64"), soabi=soabi, stub=stub)
