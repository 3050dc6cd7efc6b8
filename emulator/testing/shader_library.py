"""Compilation of Metal sources for the fiber executor, to run their kernels on NumPy arrays.

Without the Metal classes, with any sanitizer, and with faults of a dispatch as exceptions: for tests of the
shader compiler and the executor themselves.
"""

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

EMULATOR = Path(__file__).resolve().parents[1]
SHADERS = EMULATOR / "tests" / "shaders"
METAL_VERSION = "300"
# Libraries that the tests load, with their sanitizers: those that `main` compiles.
LIBRARIES = (
    *(("algorithms", ""), ("language", "")),
    *(("planted", "address,undefined"), ("planted", "thread")),
)


def find_clang() -> str | None:
    """Return the clang that the emulator is built with, if there is one."""
    names = (os.environ.get("METAL_EMULATOR_CLANG", ""), "clang++-19", "clang++-20", "clang++-18")
    return next((path for name in names if name and (path := shutil.which(name))), None)


class KernelError(Exception):
    """The executor's report of a dispatch that failed."""


class _Buffer(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("is_bytes", ctypes.c_int32),
    )


class _Dispatch(ctypes.Structure):
    _fields_ = (
        ("kernel", ctypes.c_char_p),
        ("grid", ctypes.c_uint32 * 3), ("group", ctypes.c_uint32 * 3),
        ("buffers", ctypes.POINTER(_Buffer)), ("buffer_count", ctypes.c_uint32),
        ("threadgroup_bytes", ctypes.POINTER(ctypes.c_uint64)), ("threadgroup_count", ctypes.c_uint32),
        ("seed", ctypes.c_uint64), ("workers", ctypes.c_uint32), ("checked", ctypes.c_uint32),
        ("threads_run", ctypes.c_uint64), ("barriers", ctypes.c_uint64),
        ("static_threadgroup_bytes", ctypes.c_uint64), ("max_threads", ctypes.c_uint64),
        ("error", ctypes.c_char * 4096),
    )  # fmt: skip


@dataclass
class Run:
    """Report of a dispatch."""

    threads: int
    barriers: int
    static_threadgroup_bytes: int
    max_threads: int


def _compile_executor(clang: str, folder: Path, sanitize: str, environment: dict[str, str]) -> list[Path]:
    """Return the executor's object files in a folder, compiling those that are missing.

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
             f"-DMETAL_EMULATOR_ASAN={int('address' in sanitize)}",
             f"-DMETAL_EMULATOR_TSAN={int('thread' in sanitize)}"]  # fmt: skip
    objects = []
    for name, unit in units.items():
        if not unit:
            continue
        output = folder / f"{name}.executor.o"
        objects.append(output)
        if not output.exists():
            instrument = [f"-fsanitize={sanitize}"] if sanitize and name == "executor" else []
            text = "".join(f'#include "{source}"\n' for source in unit)
            command = [clang, *flags, *instrument, "-x", "c++", "-c", "-", "-o", str(output)]
            subprocess.run(command, input=text, text=True, check=True, env=environment)
    return objects


@cache
def compiler_digest(clang: str) -> str:
    """Return a digest of the inputs of a compilation except the shaders: the emulator's sources and clang."""
    digest = hashlib.sha256(subprocess.run([clang, "--version"], capture_output=True, check=True).stdout)
    for path in sorted(EMULATOR.rglob("*")):
        if path.suffix in (".cpp", ".h", ".py") and "tests" not in path.relative_to(EMULATOR).parts:
            digest.update(f"{path} {path.stat().st_size}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def kept_in(root: Path, clang: str, source: Path, sanitize: str) -> tuple[Path, Path]:
    """Return the folders of a library and of its executor, whose names depend on all that is compiled."""
    common = (compiler_digest(clang), sanitize)
    keys = ((common, source.name, source.read_bytes()), common)
    names = (hashlib.sha256(repr(key).encode()).hexdigest()[:32] for key in keys)
    return root / next(names), root / next(names)


def build(source: Path, folder: Path, sanitize: str = "", executor: Path | None = None) -> Path:
    """Compile a source and the executor into one shared library.

    If the environment variable METAL_EMULATOR_LIBRARIES names a folder, it keeps object files and libraries;
    a library of the same source is not compiled again.

    Parameters
    ----------
    source
        Metal source.
    folder
        Folder for the object files and the library.
    sanitize
        Sanitizers such as 'address,undefined' or 'thread'. Such builds have the plain variant only.
    executor
        Folder for the executor's object files, if different. Processes may share it; the first one compiles.
    """
    clang = find_clang()
    assert clang is not None
    if kept := os.environ.get("METAL_EMULATOR_LIBRARIES"):
        folder, executor = kept_in(Path(kept), clang, source, sanitize)
    library = folder / f"lib{source.stem}.so"
    if kept and library.exists():
        return library
    executor = executor or folder
    for path in (folder, executor):
        path.mkdir(parents=True, exist_ok=True)
    # A sanitizer's runtime that this process may have preloaded is not for compilers.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    with open(executor / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        objects = _compile_executor(clang, executor, sanitize, environment)
    link = [f"-fsanitize={sanitize}", "-shared-libsan"] if sanitize else []
    for variant in ("plain",) if sanitize else ("plain", "checked"):
        output = folder / f"{source.stem}.{variant}.o"
        command: list[str | Path] = [sys.executable, EMULATOR / "msl/compile_shader.py", source, "-o", output]
        command += ["--metal-version", METAL_VERSION]
        command += ["--checked"] if variant == "checked" else []
        command += ["--sanitize", sanitize] if sanitize else []
        result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        if result.returncode or result.stderr:
            raise KernelError(f"{source.name} does not compile:\n{result.stderr}")
        objects.append(output)
    made = folder / f"{os.getpid()}.so"  # other processes may look for the library
    command = [clang, "-shared", *link, *objects, "-o", made, "-lpthread", "-ldl"]
    subprocess.run(command, check=True, env=environment)
    return made.rename(library)


class ShaderLibrary:
    """Kernels of a built library."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))

    def run(
        self,
        kernel: str,
        grid: tuple[int, ...],
        group: tuple[int, ...],
        buffers: list[Any],
        *,
        threadgroup: tuple[int, ...] = (),
        seed: int = 0,
        workers: int = 2,
        checked: bool = False,
    ) -> Run:
        """Run a kernel; arrays are read and written in place, scalars and bytes are bound as setBytes does.

        Raises
        ------
        KernelError
            With the executor's message.
        """
        dispatch = _Dispatch(kernel=kernel.encode(), seed=seed, workers=workers, checked=checked)
        for name, value in (("grid", grid), ("group", group)):
            getattr(dispatch, name)[:] = (*value, *(1,) * (3 - len(value)))
        kept: list[Any] = []
        rows = (_Buffer * max(len(buffers), 1))()
        for row, value in zip(rows, buffers, strict=False):
            if value is None:
                continue
            array, is_bytes = value, not isinstance(value, np.ndarray)
            if is_bytes:
                array = np.frombuffer(value, np.uint8) if isinstance(value, bytes) else np.asarray(value)
            assert array.flags.c_contiguous
            kept.append(array)
            row.data, row.bytes, row.is_bytes = array.ctypes.data, array.nbytes, is_bytes
        dispatch.buffers, dispatch.buffer_count = rows, len(buffers)
        lengths = (ctypes.c_uint64 * max(len(threadgroup), 1))(*threadgroup)
        dispatch.threadgroup_bytes, dispatch.threadgroup_count = lengths, len(threadgroup)
        self._library.runner_run(ctypes.byref(dispatch))
        if dispatch.error:
            raise KernelError(dispatch.error.decode())
        return Run(
            dispatch.threads_run,
            dispatch.barriers,
            dispatch.static_threadgroup_bytes,
            dispatch.max_threads,
        )


def main() -> None:
    """Compile the libraries of the emulator's own tests in the folder METAL_EMULATOR_LIBRARIES."""
    folder = Path(os.environ["METAL_EMULATOR_LIBRARIES"])
    shutil.rmtree(folder, ignore_errors=True)
    if find_clang():
        for name, sanitizers in LIBRARIES:
            build(SHADERS / f"{name}.metal", folder, sanitizers)


if __name__ == "__main__":
    main()
