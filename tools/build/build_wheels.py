#!/usr/bin/env python3
"""Build the wheels of a release on Linux, for Linux (glibc and musl) and macOS, and check each.

    python tools/build/build_wheels.py                                              # all of them: make wheels
    python tools/build/build_wheels.py --platforms manylinux_x86_64 --pythons 3.12  # one

The compiler of the PyPI package ziglang builds for an old glibc or for musl and links its own C++ library, so
the wheels only need glibc 2.28 or musl 1.2. Python 3.12 and later share one wheel, for the stable ABI.
Free-threaded Python has no stable ABI: 3.14t has a separate wheel, built if that interpreter is installed.
Wheels for other systems are only inspected; `make test-wheels` also installs and runs those for this machine.
"""

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TOOLS = Path(__file__).resolve().parent
sys.path.insert(0, str(TOOLS))
import cross_macos  # noqa: E402
import zig  # noqa: E402
from zig import WheelError  # noqa: E402

ROOT = TOOLS.parents[1]
# By kind of wheel: oldest C library, its name in zig's targets, and libraries that it provides.
C_LIBRARIES = {
    "manylinux": ((2, 28), "gnu.2.28", r"(libc|libm|libpthread|libdl|librt|ld-linux.*)\.so"),
    "musllinux": ((1, 2), "musl", r"libc\.so$"),
}
PYTHONS = ("3.10", "3.11", "3.12")  # the last one also covers all later versions
FREE_THREADED = ("3.14t",)
MAX_MEGABYTES = 12
KERNELS = {
    "x86_64": ("amx", "avx512bf16", "avx512vnni", "avxvnni", "avx2", "scalar"),
    "aarch64": ("neon_i8mm", "neon_dotprod", "neon", "scalar"),
}
PLATFORMS = (*(f"{kind}_{processor}" for kind in C_LIBRARIES for processor in KERNELS), "macos")
NATIVE = f"manylinux_{platform.machine()}"
# Clang 18 has a separate feature for registers of 512 bits, which zig switches off.
CASES = '    -mavx512f) arguments+=("$argument" -mevex512) ;;'


def find_python(version: str) -> Path:
    """Return an interpreter of a version, such as 3.12 or 3.14t: on PATH, or one that pyenv installed."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = shutil.which(f"python{version}")
    candidates = [Path(found)] if found else []
    threads = "t" if version.endswith("t") else "[0-9]"
    candidates += sorted(pyenv.glob(f"{version.rstrip('t')}.*{threads}/bin/python"), reverse=True)
    code = (
        "import sys, sysconfig; "
        "print('%d.%d' % sys.version_info[:2] + 't' * bool(sysconfig.get_config_var('Py_GIL_DISABLED')))"
    )
    for candidate in candidates:
        done = subprocess.run([candidate, "-c", code], capture_output=True, text=True, check=False)
        if done.returncode == 0 and done.stdout.strip() == version:
            return candidate
    raise WheelError(f"there is no Python {version}, neither on PATH nor in {pyenv}")


def _is_installed(version: str) -> bool:
    try:
        find_python(version)
    except WheelError:
        print(f"no wheel for Python {version}, which is not installed")
        return False
    return True


def tools_of(version: str, folder: Path) -> Path:
    """Return the Python of an environment with the build tools, and create it on first use."""
    environment = folder / f"python-{version}"
    python = environment / "bin" / "python"
    if not (environment / ".ready").exists():
        subprocess.run([find_python(version), "-m", "venv", environment], check=True)
        pip: list[str | Path] = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "--upgrade", "pip"], check=True)
        subprocess.run([*pip, "--group", "build", "--group", "cross"], check=True, cwd=ROOT)
        (environment / ".ready").touch()
    return python


def build_linux(version: str, target: str, folder: Path, stub: Path) -> Path:
    """Build a wheel for Linux and return its path; for this machine, the stub is written."""
    kind, processor = target.split("_", 1)
    least, libc, _ = C_LIBRARIES[kind]
    python, work = tools_of(version, folder), folder / target
    native = target == NATIVE
    suffix = "gnu" if version == "3.10" else libc.partition(".")[0]  # 3.10 has one for both C libraries
    zig.write_commands(work / "tools", cxx=zig.compiler(f"{processor}-linux-{libc}", CASES))
    wheel = zig.build_wheel(
        python,
        work,
        f"{kind}_{least[0]}_{least[1]}_{processor}",
        system=None if native else ("Linux", processor),
        soabi=f"cpython-{version.replace('.', '')}-{processor}-linux-{suffix}",
        stub=None if native else stub,
    )
    if native:
        with zipfile.ZipFile(wheel) as archive:
            stub.write_bytes(archive.read("metal_prefill/_core.pyi"))
    return wheel


def check_contents(wheel: Path, kernels: Sequence[str]) -> bytes:
    """Check the required contents of a wheel, and its size; return the extension."""
    size = wheel.stat().st_size
    if size > MAX_MEGABYTES * 10**6:
        raise WheelError(f"{wheel.name} has {size / 1e6:.1f} MB, more than {MAX_MEGABYTES}")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        extensions = [name for name in names if name.endswith(".so")]
        if len(extensions) != 1 or not extensions[0].startswith("metal_prefill/_core."):
            raise WheelError(f"{wheel.name}: expected one extension, got {extensions}")
        library = archive.read(extensions[0])
    wanted = ["metal_prefill/_core.pyi", "metal_prefill/py.typed"]
    if missing := [name for name in wanted if name not in names]:
        raise WheelError(f"{wheel.name} lacks {', '.join(missing)}")
    if not any(re.fullmatch(r"metal_prefill/data/.*\.gguf", name) for name in names):
        raise WheelError(f"{wheel.name} lacks the bundled model")
    for name in kernels:
        if name.encode() + b"\0" not in library:  # kernel names are strings in the library
            raise WheelError(f"{wheel.name}: the kernels {name} are missing")
    return library


def check_linux(wheel: Path, library: bytes, kind: str) -> list[str]:
    """Check libraries and symbols of a wheel for Linux; return a report in lines."""
    import lief

    least, _, provided = C_LIBRARIES[kind]
    file: Any = lief.ELF.parse(library)
    if unknown := [name for name in file.libraries if not re.match(provided, name)]:
        raise WheelError(f"{wheel.name} needs {', '.join(unknown)}, which its platform does not promise")
    lines = [f"needs {', '.join(file.libraries)}"]
    if kind == "musllinux":  # auditwheel recognizes musl only on a machine that has it
        if versions := [symbol.name for symbol in file.symbols_version_requirement]:
            raise WheelError(f"{wheel.name} needs versions of {', '.join(versions)}; musl has none")
        return lines
    command: list[str | Path] = [sys.executable, "-m", "auditwheel", "show", "--json", wheel]
    shown = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    policy = re.match(r"manylinux_(\d+)_(\d+)_", shown["overall_tag"])
    if policy is None or (int(policy[1]), int(policy[2])) > least:
        raise WheelError(f"{wheel.name}: auditwheel finds it consistent only with {shown['overall_tag']}")
    return [f"consistent with {shown['overall_tag']}", *lines]


def main() -> int:
    """Run the command line; see the module docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--platforms", nargs="+", choices=PLATFORMS, default=PLATFORMS)
    parser.add_argument(
        "--pythons",
        nargs="+",
        choices=(*PYTHONS, *FREE_THREADED),
        help=f"default: {', '.join(PYTHONS)}, and of {', '.join(FREE_THREADED)} what is installed",
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "build/wheels", help="folder for all output")
    options = parser.parse_args()
    pythons = options.pythons or (*PYTHONS, *(version for version in FREE_THREADED if _is_installed(version)))
    folder = options.folder.resolve()
    finished = folder / "dist"
    finished.mkdir(parents=True, exist_ok=True)
    stub = folder / "_core.pyi"
    # The wheel for this machine comes first: the others use its stub.
    platforms = sorted(options.platforms, key=lambda name: name != NATIVE)
    if platforms[0] != NATIVE and not stub.exists():
        raise WheelError(
            f"there is no {stub}, which the build for this machine writes: add {NATIVE} to --platforms"
        )
    for name in platforms:
        for version in pythons:
            kind, _, processor = name.partition("_")
            if name == "macos":
                wheel = cross_macos.build(tools_of(version, folder), version, folder / name, stub)
            else:
                wheel = build_linux(version, name, folder, stub)
            kernels = KERNELS[processor or "aarch64"]
            library = check_contents(wheel, kernels)
            lines = check_linux(wheel, library, kind) if processor else cross_macos.check_extension(library)
            shutil.copy(wheel, finished)
            size = f"{wheel.stat().st_size / 1e6:.1f} MB"
            print(f"{wheel.name}: {size}", *lines, f"kernels: {', '.join(kernels)}", sep="\n  ", flush=True)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except WheelError as error:
        sys.exit(f"build_wheels: {error}")
