"""Compilation of a Metal source with the fiber executor and sanitizers, to run its kernels on NumPy arrays.

Without the Metal classes and the rest of the emulator, whose build may have no sanitizers.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

EMULATOR = Path(__file__).resolve().parents[1]
PLANTED = EMULATOR / "tests" / "shaders" / "planted.metal"
SANITIZERS = {"address": "address,undefined", "thread": "thread"}


def find_clang() -> str | None:
    """Return the clang that the emulator is built with, if there is one."""
    names = (os.environ.get("METAL_EMULATOR_CLANG", ""), "clang++-19", "clang++-20", "clang++-18")
    return next((path for name in names if name and (path := shutil.which(name))), None)


class KernelError(Exception):
    """The executor's report of a dispatch that failed."""


def _compile_executor(clang: str, folder: Path, sanitize: str, environment: dict[str, str]) -> list[Path]:
    """Compile the executor and return its object files.

    Files are compiled together: each takes longer to include the standard library than for its own code.
    """
    sources = [
        *sorted((EMULATOR / "cpu").glob("*.cpp")),
        EMULATOR / "metal/memory.cpp",
        EMULATOR / "testing/kernel_runner.cpp",
    ]
    # The switching code itself annotates the order of accesses for ThreadSanitizer.
    switching = ("context", "report", "threadgroup") if sanitize == "thread" else ()
    units = {
        "executor": [source for source in sources if source.stem not in switching],
        "switching": [source for source in sources if source.stem in switching],
    }
    # Tests run kernels so short that optimizing the executor costs more than it gains. With ThreadSanitizer
    # it is optimized, which gives the switching code inlined copies of the standard library's functions.
    flags = ["-std=c++20", "-O2" if sanitize == "thread" else "-O0", f"-I{EMULATOR}",
             f"-I{EMULATOR / 'cpu'}", "-g1", "-fPIC", "-fvisibility=hidden",
             f"-DMETAL_EMULATOR_{'TSAN' if sanitize == 'thread' else 'ASAN'}=1"]  # fmt: skip
    objects = []
    for name, unit in units.items():
        if not unit:
            continue
        objects.append(folder / f"{name}.o")
        instrument = [f"-fsanitize={sanitize}"] if name == "executor" else []
        text = "".join(f'#include "{source}"\n' for source in unit)
        command = [clang, *flags, *instrument, "-x", "c++", "-c", "-", "-o", str(objects[-1])]
        subprocess.run(command, input=text, text=True, check=True, env=environment)
    return objects


def _digest(clang: str, source: Path, sanitize: str) -> str:
    """Return a digest of all that a library depends on: the emulator's sources, the shader, and clang."""
    version = subprocess.run([clang, "--version"], capture_output=True, check=True).stdout
    digest = hashlib.sha256(version + sanitize.encode() + source.read_bytes())
    for path in sorted(EMULATOR.rglob("*")):
        if path.suffix in (".cpp", ".h", ".py") and "tests" not in path.relative_to(EMULATOR).parts:
            digest.update(f"{path} {path.stat().st_size}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:32]


def build(source: Path, folder: Path, sanitize: str) -> Path:
    """Compile a source and the executor into one shared library, and return its path.

    If the environment variable METAL_EMULATOR_LIBRARIES names a folder, it keeps libraries; one of the same
    sources is not compiled again.

    Parameters
    ----------
    source
        Metal source.
    folder
        Folder for the object files and the library.
    sanitize
        Sanitizers: one of SANITIZERS.
    """
    clang = find_clang()
    assert clang is not None
    if kept := os.environ.get("METAL_EMULATOR_LIBRARIES"):
        folder = Path(kept, _digest(clang, source, sanitize))
    library = folder / f"lib{source.stem}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    # A sanitizer's runtime that this process may have preloaded is not for compilers.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    output = folder / f"{source.stem}.o"
    command: list[str | Path] = [sys.executable, EMULATOR / "msl/compile_shader.py", source, "-o", output]
    command += ["--metal-version", "300", "--sanitize", sanitize]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if result.returncode or result.stderr:
        raise KernelError(f"{source.name} does not compile:\n{result.stderr}")
    objects = [output, *_compile_executor(clang, folder, sanitize, environment)]
    made = folder / f"{os.getpid()}.so"  # other processes may look for the library
    link = [f"-fsanitize={sanitize}", "-shared-libsan", "-lpthread", "-ldl"]
    subprocess.run([clang, "-shared", *objects, *link, "-o", made], check=True, env=environment)
    return made.rename(library)


class ShaderLibrary:
    """Kernels of a built library."""

    def __init__(self, path: Path) -> None:
        self._run = ctypes.CDLL(str(path)).runner_run
        self._run.restype = ctypes.c_char_p

    def run(self, kernel: str, threads: int, arrays: list[np.ndarray[Any, Any]], seed: int = 0) -> None:
        """Run one threadgroup of a kernel on arrays, which are read and written in place.

        Raises
        ------
        KernelError
            With the executor's message.
        """
        data = (ctypes.c_void_p * len(arrays))(*(array.ctypes.data for array in arrays))
        sizes = (ctypes.c_uint64 * len(arrays))(*(array.nbytes for array in arrays))
        if error := self._run(kernel.encode(), threads, ctypes.c_uint64(seed), len(arrays), data, sizes):
            raise KernelError(error.decode())


def main() -> None:
    """Compile the libraries of the emulator's own tests in the folder METAL_EMULATOR_LIBRARIES."""
    folder = Path(os.environ["METAL_EMULATOR_LIBRARIES"])
    shutil.rmtree(folder, ignore_errors=True)
    if find_clang():
        for sanitizers in SANITIZERS.values():
            build(PLANTED, folder, sanitizers)


if __name__ == "__main__":
    main()
