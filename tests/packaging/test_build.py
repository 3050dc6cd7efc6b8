"""Builds with compilers that cannot build all: kernels of an instruction set, or shaders."""

import json
import os
import platform
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from scanner.preprocess import CLANGS
from support.missing import fail_or_skip
from support.places import ROOT
from support.programs import finished

CPU_ENGINE = ROOT / "cpp/cpu"
PROJECT = f"""
cmake_minimum_required(VERSION 3.21)
project(engine LANGUAGES CXX)
set(CMAKE_CXX_STANDARD 20)
add_library(engine STATIC)
set(cpu_engine_target engine)
add_subdirectory({CPU_ENGINE} cpu)
"""
# Crashes, as a compiler may, on any source built for AMX.
CRASHING_COMPILER = """#!/bin/sh
case "$*" in *-mamx-int8*) kill -SEGV $$ ;; esac
exec {compiler} "$@"
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the kernels that are left out are for x86")
def test_kernels_that_crash_the_compiler_are_omitted(tmp_path: Path) -> None:
    cmake, compiler = shutil.which("cmake"), shutil.which("c++")
    generator = shutil.which("ninja") or shutil.which("make")
    if cmake is None or compiler is None or generator is None:
        pytest.skip("there is no cmake, no C++ compiler, or neither ninja nor make")
    (tmp_path / "CMakeLists.txt").write_text(PROJECT)
    crashing = tmp_path / "c++"
    crashing.write_text(CRASHING_COMPILER.format(compiler=compiler))
    crashing.chmod(0o755)
    build = tmp_path / "build"
    # One set that it builds is tried as well. The others count as known from an earlier configuration.
    known = [f"-DMETAL_PREFILL_BUILDS_{name}=ON" for name in ("avx512vnni", "avxvnni", "avx2", "scalar")]
    done = finished(
        [cmake, "-S", tmp_path, "-B", build, f"-DCMAKE_CXX_COMPILER={crashing}", *known], check=True
    )
    assert "Kernels for amx are left out" in done.stderr
    sets = (build / "cpu/kernel_sets.inc").read_text()
    assert "(amx)" not in sets
    assert "(avx512bf16)" in sets
    sources = finished([cmake, "--build", build, "--", "-n"], check=True).stdout
    assert "kernels_amx" not in sources
    assert "kernels_avx512bf16" in sources


def test_symbols_of_objective_c_are_hidden(tmp_path: Path) -> None:
    """Two copies of the engine in a process would else share functions."""
    cmake, generator = shutil.which("cmake"), shutil.which("ninja")
    if cmake is None or generator is None:
        pytest.skip("there is no cmake or no ninja")
    if platform.system() != "Darwin" and not any(map(shutil.which, CLANGS)):
        fail_or_skip("there is no clang for Objective-C++", "METAL_PREFILL_REQUIRE_EMULATOR")
    # Kernel sets count as known from an earlier configuration.
    sets = ("amx", "avx512bf16", "avx512vnni", "avxvnni", "avx2", "neon_i8mm", "neon_dotprod", "neon")
    variables = [f"-DMETAL_PREFILL_BUILDS_{name}=ON" for name in (*sets, "scalar")]
    variables += ["-DMETAL_PREFILL_EMULATOR=ON", "-DSKBUILD_PROJECT_NAME=metal_prefill"]
    variables += [f"-DPython_EXECUTABLE={sys.executable}"]
    subprocess.run(
        [cmake, "-S", ROOT, "-B", tmp_path, "-G", "Ninja", *variables], capture_output=True, check=True
    )
    commands = json.loads((tmp_path / "compile_commands.json").read_text())
    engine = {
        Path(entry["file"]).name: entry["command"]
        for entry in commands
        if Path(entry["file"]).is_relative_to(ROOT / "cpp") and entry["file"].endswith(".mm")
    }
    assert len(engine) > 10
    assert [name for name, command in engine.items() if "-fvisibility=hidden" not in command] == []


METAL_PROJECT = f"""
cmake_minimum_required(VERSION 3.21)
project(engine LANGUAGES CXX)
find_package(Python COMPONENTS Interpreter REQUIRED)
set(APPLE ON)
set(PROJECT_SOURCE_DIR {ROOT})
add_library(_core STATIC {ROOT}/cpp/model/rope.cpp)
add_subdirectory({ROOT}/cpp/metal metal)
"""
# Finds its tools and compiles nothing, as Xcode 26 does without the Metal toolchain.
WITHOUT_TOOLCHAIN = """#!/bin/sh
echo "error: cannot execute tool 'metal' due to missing Metal Toolchain" >&2; exit 1
"""
# Creates its outputs from existing inputs.
WITH_TOOLCHAIN = """#!/bin/sh
while [ $# -gt 0 ]; do
  case "$1" in -o) out=$2; shift ;; *.metal|*.air) [ -s "$1" ] || exit 1 ;; esac
  shift
done
echo compiled > "$out"
"""
LIBRARIAN_MISSING = WITH_TOOLCHAIN.replace("while", 'case "$3" in metallib) exit 72 ;; esac\nwhile', 1)
REJECTING = 'case "$9" in */scan.metal|*/rope.metal) echo "${9##*/}: error: no type"; exit 1 ;; esac\nwhile'
TWO_REJECTED = WITH_TOOLCHAIN.replace("while", REJECTING, 1)


XCRUNS: list[tuple[str | None, list[str]]] = [  # with the messages of the build
    (None, ["No such file or directory: 'xcrun'"]),
    (WITHOUT_TOOLCHAIN, ["error: cannot execute tool 'metal' due to missing Metal Toolchain"]),
    (LIBRARIAN_MISSING, ["exit code 72"]),
    (TWO_REJECTED, ["rope.metal: error: no type", "scan.metal: error: no type"]),
    (WITH_TOOLCHAIN, []),
]


def test_shaders_that_apples_compiler_rejects_stop_no_build_unless_required(tmp_path: Path) -> None:
    cmake, generator = shutil.which("cmake"), shutil.which("ninja")
    if cmake is None or generator is None or platform.system() == "Darwin":
        pytest.skip("there is no cmake or no ninja, or the Mac's own xcrun would be found")
    (tmp_path / "CMakeLists.txt").write_text(METAL_PROJECT)
    tools = tmp_path / "tools"
    tools.mkdir()
    build = tmp_path / "build"
    configure = [cmake, "-U*REQUIRE_METALLIB", "-S", str(tmp_path), "-B", str(build), "-G", "Ninja"]
    for required, (xcrun, messages) in [
        *product([False], XCRUNS),
        *product([True], [XCRUNS[0], *XCRUNS[-2:]]),
    ]:
        environment = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}"}
        if required:
            environment["METAL_PREFILL_REQUIRE_METALLIB"] = "ON"
        if xcrun is None:
            (tools / "xcrun").unlink(missing_ok=True)
            subprocess.run(configure, capture_output=True, check=True, env=environment)
        else:
            (tools / "xcrun").write_text(xcrun)
            (tools / "xcrun").chmod(0o755)
        finished([cmake, "--build", str(build), "--target", "clean"], env=environment, check=True)
        compile_all = [cmake, "--build", str(build), "--target", "metal_prefill_metallib"]
        done = finished(compile_all, env=environment)
        assert (done.returncode != 0) == (required and bool(messages)), done.stdout
        assert (build / "metal/metal_prefill.metallib").exists() == (not messages)
        assert ("when a model is first opened" in done.stdout) == bool(messages)
        assert [done.stdout.count(message) for message in messages] == [1] * len(messages)
    rules = (build / "build.ninja").read_text()
    assert "-std=metal3.0" in rules
    assert "metal_shader_sources" in rules, "the source text is in the extension in any case"
