"""The shaders as a whole: requirements of Apple's compiler, and messages of the emulator's compilers."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from scanner.preprocess import find_clang
from scanner.tokens import SourceError
from support.kernels.kernel_harness import SHADERS, flat_source, language_of
from support.missing import fail_or_skip
from support.programs import finished

EMULATOR = Path(__file__).parents[2] / "emulator"
SOURCES = sorted(SHADERS.glob("*.metal"))


def run_compiler(script: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run one of the emulator's compilers."""
    try:
        find_clang()
    except SourceError as error:
        fail_or_skip(str(error), "METAL_PREFILL_REQUIRE_EMULATOR")
    command = [sys.executable, EMULATOR / "msl" / script, *arguments]
    return finished(command)


def metal_version(source: Path) -> str:
    """Return the language that the engine compiles a source as, as ``__METAL_VERSION__``."""
    major, minor = language_of(source)
    return str(100 * major + 10 * minor)


@pytest.mark.emulator
def test_every_shader_passes_the_static_checks() -> None:
    assert len(SOURCES) >= 12
    for version in {metal_version(source) for source in SOURCES}:
        sources = [source for source in SOURCES if metal_version(source) == version]
        result = run_compiler("check_shaders.py", "--metal-version", version, "-I", SHADERS, *sources)
        assert result.returncode == 0, result.stderr
        assert result.stdout.count(": ok") == len(sources)


@pytest.mark.emulator
@pytest.mark.parametrize("name", ["argmax", "rope", "log_prob"])
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


# Attributes that may be scalars or vectors; those of one kernel must have the same number of components.
GRID_ATTRIBUTES = (
    "thread_position_in_grid|threads_per_grid|threadgroup_position_in_grid|threadgroups_per_grid"
    "|thread_position_in_threadgroup|threads_per_threadgroup"
)


def test_positions_in_a_kernel_have_the_same_number_of_components() -> None:
    for path in SOURCES:
        for kernel in re.split(r"\nkernel void ", path.read_text())[1:]:
            parameters = kernel[: kernel.index("{")]
            sizes = set(re.findall(rf"u(?:int|short)([23]?) \w+\s*\[\[(?:{GRID_ATTRIBUTES})\]\]", parameters))
            assert len(sizes) <= 1, kernel.split("(")[0]


# Functions of single precision that Metal has in a fast and in a precise form.
TWO_FORMS = (
    "exp|exp2|exp10|log|log2|log10|sin|cos|tan|sincos|asin|acos|atan|atan2|sinh|cosh|tanh|asinh|acosh|atanh"
    "|pow|powr|sqrt|rsqrt"
)


def test_functions_with_a_fast_variant_name_it_explicitly() -> None:
    """Which one a bare name means depends on the compiler's options, and on the macOS that reads them."""
    for path in sorted(SHADERS.glob("*.[hm]*")):
        code = re.sub(r"//.*", "", path.read_text())
        assert re.findall(rf"(?<![\w:.])(?:{TWO_FORMS})\(.*", code) == []


def test_every_source_includes_what_it_needs_by_itself() -> None:
    for path in SOURCES:
        text = path.read_text()
        assert "#include <metal_stdlib>" in text
        assert "using namespace metal;" in text
        assert "bfloat" not in re.sub(r"//.*", "", text), "needs Metal 3.1; the minimum is 3.0"


def test_loops_over_a_cooperative_tensor_are_unrolled() -> None:
    """Apple's header calls that imperative: its elements are registers, which have no index at run time."""
    loops = []
    for path in SOURCES:
        lines = path.read_text().splitlines()
        loops += [lines[i - 1].strip() for i, line in enumerate(lines) if "get_capacity()" in line]
    assert set(loops) == {"#pragma unroll"}
