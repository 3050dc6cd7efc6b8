"""Shaders compiled for NVIDIA GPUs: tests of the assembly, which need no GPU."""

import re
import subprocess
from pathlib import Path

import pytest
from compile_shader import compile_ptx
from scanner import ptx
from scanner.program import translate
from scanner.tokens import SourceError

HERE = Path(__file__).resolve().parent
EMULATOR = HERE.parent

pytestmark = [pytest.mark.emulator, pytest.mark.usefixtures("clang")]


def compile_source(path: Path, folder: Path) -> dict[str, str]:
    """Return the modules of a Metal source."""
    cpp = folder / "unit.cpp"
    cpp.write_text(translate(path, "ptx", 300, []))
    return compile_ptx(cpp, 300, path.name)


def write(folder: Path, body: str) -> Path:
    """Write a source with the given kernels."""
    path = folder / "kernels.metal"
    path.write_text(
        f"#include <metal_stdlib>\n#include <metal_simdgroup_matrix>\nusing namespace metal;\n{body}"
    )
    return path


def test_each_entry_has_a_module_with_its_variables_alone(tmp_path: Path) -> None:
    modules = compile_source(
        write(tmp_path, """
constant uint table[5] = {3, 1, 4, 1, 5};
kernel void first(device uint* x [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  x[i] = table[x[i]];
}
kernel void second(device uint* x [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  threadgroup uint staged[64];
  staged[i] = x[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  x[i] = staged[63 - i];
}"""), tmp_path,
    )  # fmt: skip
    for entry, variable, other in (
        ("kernel_0_values", "table", "staged"),
        ("kernel_1_values", "staged", "table"),
    ):
        assert re.search(rf"^\.(global|shared) .*{variable}\w*\[", modules[entry], re.M)
        assert modules[entry].count(variable) > 1, "it is used"
        assert other not in modules[entry]


def test_functions_are_rejected() -> None:
    """Only functions without a definition remain: all others are inlined."""
    with pytest.raises(SourceError, match=r"some.metal: neither a kernel nor .*: \.extern \.func expf"):
        ptx.split(".extern .func expf\n;\n.visible .entry first(\n)\n{\n\tcall expf;\n}\n", "some.metal")


def test_parameters_have_the_offsets_that_the_executor_uses(tmp_path: Path) -> None:
    modules = compile_source(
        write(tmp_path, """
struct Given { uint before; uint4 values; };
struct Large { uint values[1000]; };
kernel void place(device float* out [[buffer(5)]], uint i [[thread_position_in_grid]],
                  constant Given& given [[buffer(1)]], constant Large& large [[buffer(2)]],
                  constant uint& last [[buffer(0)]], threadgroup float* shared [[threadgroup(0)]]) {
  shared[i] = out[i];
  out[i] = shared[0] + float(given.before + given.values.w + large.values[999] + last);
}"""), tmp_path,
    )  # fmt: skip
    assert list(modules) == ["kernel_0_values", "kernel_0_addresses"]
    # Five slots of eight bytes, then Given and the uint at multiples of 16. Large is too large.
    for name, module in modules.items():
        assert f".param .align 16 .b8 {name}_param_0[96]" in module
    values, addresses = (
        {int(n or 0) for n in re.findall(r"ld\.param[.\w]*\s+[^\n]*\[%rd\d+(?:\+(\d+))?\]", module)}
        for module in modules.values()
    )
    assert {0, 16, 32, 48, 80} <= values  # out, large, shared; the values of given.before and last
    assert 80 not in addresses


def test_half_matrices_run_on_tensor_cores(tmp_path: Path) -> None:
    body = """
kernel void products(device const half* a [[buffer(0)]], device const half* b [[buffer(1)]],
                     device float* c [[buffer(2)]]) {
  simdgroup_half8x8 left, right;
  simdgroup_float8x8 sum = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  simdgroup_load(left, a, 8);
  simdgroup_load(right, b, 8, ulong2(0), TRANSPOSE);
  simdgroup_multiply_accumulate(sum, left, right, sum);
  simdgroup_store(sum, c, 8);
}"""
    transposed, straight = (
        compile_source(write(tmp_path, body.replace("TRANSPOSE", word)), tmp_path)["kernel_0_values"]
        for word in ("true", "false")
    )
    assert transposed.count("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32") == 1
    assert "movmatrix" not in transposed  # the operand has the order that tensor cores require
    assert straight.count("movmatrix") == 1


def test_kernels_need_only_the_driver(tmp_path: Path) -> None:
    modules = compile_source(HERE / "kernels/host_api.metal", tmp_path)
    assert len(modules) >= 5
    for entry, module in modules.items():
        assert ".extern .func" not in module, entry
        assert "call" not in re.sub(r"//.*", "", module), f"{entry}: everything is inlined"
        assert ".local" not in module, f"{entry}: nothing is kept in memory"
        assert module.count("// await") == 1
        assert module.count(".visible .entry") == 1


def test_the_executor_compiles(clang: str, tmp_path: Path) -> None:
    """Builds omit the executor by default, so its code could miss changes of the interface."""
    folder = EMULATOR / "cuda"
    unit = tmp_path / "executor.cpp"
    unit.write_text("".join(f'#include "{path}"\n' for path in sorted(folder.glob("*.cpp"))))
    command = [clang, "-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", f"-I{folder}",
               f"-I{folder.parent}", str(unit)]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
