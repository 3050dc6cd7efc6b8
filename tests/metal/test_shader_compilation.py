"""Messages of the emulator's compilers about the shaders, without running them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from shader_library import EMULATOR, find_clang
from support.kernel_harness import SHADERS, flat_source
from support.programs import finished

from metal_prefill import _core

MISSING = "there is no clang: apt-get install clang-19"
SOURCES = sorted(SHADERS.glob("*.metal"))

pytestmark = pytest.mark.emulator


def run_compiler(script: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run one of the emulator's compilers."""
    if find_clang() is None:
        if os.environ.get("METAL_PREFILL_REQUIRE_EMULATOR"):
            pytest.fail(MISSING)
        pytest.skip(MISSING)
    command = [sys.executable, EMULATOR / "msl" / script, *arguments]
    return finished(command)


def metal_version(source: Path) -> str:
    """Return the language that the engine compiles a source as, as ``__METAL_VERSION__``."""
    major, minor = _core.shader_options(source.name)[1]
    return str(100 * major + 10 * minor)


def test_every_shader_passes_the_static_checks() -> None:
    assert len(SOURCES) >= 12
    for version in {metal_version(source) for source in SOURCES}:
        sources = [source for source in SOURCES if metal_version(source) == version]
        result = run_compiler("check_shaders.py", "--metal-version", version, "-I", SHADERS, *sources)
        assert result.returncode == 0, result.stderr
        assert result.stdout.count(": ok") == len(sources)


@pytest.mark.parametrize("name", ["argmax", "rope", "rmsnorm", "embed", "log_prob"])
def test_kernels_on_nvidia_gpus_need_only_the_driver(name: str, tmp_path: Path) -> None:
    flat, assembly = tmp_path / f"{name}.metal", tmp_path / f"{name}.ptx"
    flat.write_text(flat_source(SHADERS / f"{name}.metal"))
    result = run_compiler("compile_shader.py", "--ptx", "--metal-version", "300", flat, "-o", assembly)
    assert result.returncode == 0, result.stderr
    modules = assembly.read_text().split(".version ")[1:]
    assert modules
    for module in modules:
        assert ".extern .func" not in module
        assert "call" not in re.sub(r"//.*", "", module), "everything is inlined"
        if name != "argmax":  # which moves two-word structures as one word
            assert ".local" not in module, "nothing is kept in memory"
        assert module.count("// await") == 1
        assert module.count(".visible .entry") == 1
