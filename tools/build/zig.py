"""Build wheels for other systems, with commands for CMake based on the PyPI package ziglang."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_ZIG = f'exec "{sys.executable}" -m ziglang'
# Zig reads architectures as versions of a processor, and the "-" of CMake's "-o -" as a file name;
# without this option, it prints preprocessed text.
_COMPILER = """arguments=()
for argument in "$@"; do
  case "$argument" in
%s
    -march=armv8.2-a+*) arguments+=("-mcpu=generic+v8_2a+${argument#-march=armv8.2-a+}") ;;
    -) if [ "${arguments[*]: -1}" = -o ]; then unset "arguments[-1]"; else arguments+=(-); fi ;;
    *) arguments+=("$argument") ;;
  esac
done
%s c++ -target %s "${arguments[@]}"
"""


class WheelError(Exception):
    """A wheel cannot be built, or is invalid."""


def compiler(target: str, cases: str) -> str:
    """Return the bash body of a C++ compiler; further cases handle some arguments."""
    return _COMPILER % (cases, _ZIG, target)


def write_commands(folder: Path, **scripts: str) -> None:
    """Write an archiver, and commands with the given names and bodies."""
    folder.mkdir(parents=True, exist_ok=True)
    tools = {name: f'{_ZIG} {name} "$@"\n' for name in ("ar", "ranlib")}
    for name, body in (tools | scripts).items():
        path = folder / name.replace("cxx", "c++")
        path.write_text(f"#!/bin/bash\n{body}")
        path.chmod(0o755)


def build_wheel(
    python: Path,
    work: Path,  # folder for all output, with the commands in its subfolder tools
    tag: str,  # of the platform
    *,
    system: tuple[str, str] | None,  # name and processor for CMake; None for this machine
    soabi: str,  # end of the extension's name
    stub: Path | None,  # _core.pyi of a build for this machine; None to write one
) -> Path:
    """Build the wheel of a Python for a platform; return its path."""
    shutil.rmtree(work / "wheels", ignore_errors=True)
    _forget_python(work / "build")
    definitions: dict[str, object] = {
        "CMAKE_TOOLCHAIN_FILE": ROOT / "cmake/cross_zig.cmake",
        "SKBUILD_SOABI": soabi,
        "Python_INCLUDE_DIR": _python_headers(work / f"include-{soabi}", python),
        **({} if stub is None else {"METAL_PREFILL_STUB": stub}),
    }
    name, processor = system or ("", "")
    environment = {
        "CMAKE_GENERATOR": "Ninja",
        "CROSS_TOOLS": str(work / "tools"),
        "CROSS_SYSTEM": name,
        "CROSS_PROCESSOR": processor,
        "PATH": f"{python.parent}:{os.environ['PATH']}",
    }
    command: list[str | Path] = [
        python, "-m", "pip", "wheel", ROOT, "--quiet", "--no-build-isolation", "--no-deps",
    ]  # fmt: skip
    command += ["-w", work / "wheels", "-C", f"build-dir={work / 'build'}"]
    for definition, value in definitions.items():
        command += ["-C", f"cmake.define.{definition}={value}"]
    subprocess.run(command, check=True, env=os.environ | environment, cwd=work)
    (built,) = (work / "wheels").glob("*.whl")
    retag: list[str | Path] = [python, "-m", "wheel", "tags", "--platform-tag", tag, "--remove", built]
    subprocess.run(retag, check=True, stdout=subprocess.DEVNULL)
    (wheel,) = (work / "wheels").glob(f"*{tag}.whl")
    return wheel


def _forget_python(build: Path) -> None:
    """Make CMake find Python again in a build folder, but keep the objects: most do not use Python.

    Given its own record of the folder, scikit-build-core would delete the objects for another environment.
    """
    for name in ("CMakeCache.txt", ".skbuild-info.json"):
        (build / name).unlink(missing_ok=True)


def _python_headers(copy: Path, python: Path) -> Path:
    """Return the folder of the headers of a Python.

    On Debian, Python's pyconfig.h only includes the host processor's file, from a folder that zig does not
    search. Returns a copy that contains that file instead.
    """
    code = "import sysconfig as s; print(s.get_path('include'), s.get_config_var('MULTIARCH'), sep='\\n')"
    found = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout
    headers, multiarch = Path(found.splitlines()[0]), found.splitlines()[1]
    config = headers.parent / multiarch / headers.name / "pyconfig.h"
    if not config.exists():
        return headers
    shutil.copytree(headers, copy, dirs_exist_ok=True)
    shutil.copy(config, copy / "pyconfig.h")
    return copy
