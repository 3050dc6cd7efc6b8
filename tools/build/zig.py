"""Commands that CMake calls to compile for another system, made of the PyPI package ziglang."""

import shutil
import subprocess
import sys
from pathlib import Path


def command() -> str:
    """Return the shell command that runs zig."""
    return f'exec "{sys.executable}" -m ziglang'


def write_commands(folder: Path, **scripts: str) -> None:
    """Write an archiver, and commands with the given names and bodies."""
    folder.mkdir(parents=True, exist_ok=True)
    tools = {name: f'{command()} {name} "$@"\n' for name in ("ar", "ranlib")}
    for name, body in (tools | scripts).items():
        path = folder / name.replace("cxx", "c++")
        path.write_text(f"#!/bin/bash\n{body}")
        path.chmod(0o755)


def forget_python(build: Path) -> None:
    """Let CMake find Python again in a build folder, whose objects stay: most of them do not use Python.

    With its own record of the folder, scikit-build-core would delete the objects for another environment.
    """
    for name in ("CMakeCache.txt", ".skbuild-info.json"):
        (build / name).unlink(missing_ok=True)


def python_headers(copy: Path, python: str | Path = sys.executable) -> Path:
    """Return the folder of the headers of a Python.

    On Debian, Python's pyconfig.h only includes that of the host's processor, from a folder that zig does not
    search. A copy replaces it with that one.
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
