"""Builds with a compiler that cannot build the kernels of an instruction set."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

CPU_ENGINE = Path(__file__).parents[1] / "cpp/cpu"
PROJECT = f"""
cmake_minimum_required(VERSION 3.21)
project(engine LANGUAGES CXX)
set(CMAKE_CXX_STANDARD 20)
add_library(engine STATIC)
set(cpu_engine_target engine)
add_subdirectory({CPU_ENGINE} cpu)
"""
# Dies as a compiler does that crashes, on whatever is built for AMX.
CRASHING_COMPILER = """#!/bin/sh
case "$*" in *-mamx-int8*) kill -SEGV $$ ;; esac
exec {compiler} "$@"
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the kernels that are left out are for x86")
def test_kernels_that_crash_the_compiler_are_left_out(tmp_path: Path) -> None:
    cmake, compiler = shutil.which("cmake"), shutil.which("c++")
    generator = shutil.which("ninja") or shutil.which("make")
    if cmake is None or compiler is None or generator is None:
        pytest.skip("there is no cmake, no C++ compiler, or neither ninja nor make")
    (tmp_path / "CMakeLists.txt").write_text(PROJECT)
    crashing = tmp_path / "c++"
    crashing.write_text(CRASHING_COMPILER.format(compiler=compiler))
    crashing.chmod(0o755)
    build = tmp_path / "build"
    done = subprocess.run(
        [cmake, "-S", tmp_path, "-B", build, f"-DCMAKE_CXX_COMPILER={crashing}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "Kernels for amx are left out" in done.stderr
    sets = (build / "cpu/kernel_sets.inc").read_text()
    assert "(amx)" not in sets
    assert "(avx512bf16)" in sets
    sources = subprocess.run(
        [cmake, "--build", build, "--", "-n"], capture_output=True, text=True, check=True
    ).stdout
    assert "gemm_amx" not in sources
    assert "gemm_avx512bf16" in sources
