"""The static check accepts every shader of the project and rejects what Metal does not support."""

import subprocess
import sys
from pathlib import Path

import pytest

CHECK = Path(__file__).resolve().parents[1] / "msl" / "check_shaders.py"
HERE = Path(__file__).parent

pytestmark = [pytest.mark.emulator, pytest.mark.usefixtures("clang")]

KERNEL = "kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {{ {} }}"
# By name: the source, whose faulty line ends in a comment, and words of the message.
WRONG: dict[str, tuple[str, str]] = {
    "pointer without address space": ("static float f(float* p) { return *p; }  // !", "no address space"),
    "reference without address space": ("static void f(float& r) { r = 1; }  // !", "no address space"),
    "device pointer as a thread pointer": (
        "static float f(thread float* p) { return *p; }\n" + KERNEL.format("x[i] = f(x);") + "  // !",
        "no matching function",
    ),
    "write to constant memory": (
        "kernel void k(constant float* x [[buffer(0)]]) { x[0] = 1; }  // !",
        "not assignable|const",
    ),
    "cast between address spaces": (KERNEL.format("x[i] = *(threadgroup float*)x;") + "  // !", "cast"),
    "double": (KERNEL.format("double d = 1; x[i] = d;") + "  // !", "use of type 'double'"),
    "long double literal": (KERNEL.format("x[i] = 1.0L;") + "  // !", "no long double"),
    "goto": (KERNEL.format("again: if (x[i] > 0) goto again;") + "  // !", "no goto"),
    "new": (KERNEL.format("x[i] = *new float;") + "  // !", "'default new' is not supported"),
    "exception": (KERNEL.format("throw 1;") + "  // !", "exceptions disabled"),
    "virtual function": ("struct A { virtual void f(); };  // !", "no virtual functions"),
    "recursion": ("static int f(int n) { return n ? f(n - 1) : 0; }  // !", "no recursion"),
    "lambda": (KERNEL.format("auto f = [](float v) { return v; }; x[i] = f(1);") + "  // !", "lambda"),
    "standard library": (KERNEL.format("x[i] = std::max(1, 2);") + "  // !", "undeclared identifier 'std'"),
    "function of C": (KERNEL.format("x[i] = expf(x[i]);") + "  // !", "undeclared identifier 'expf'"),
    "global variable": ("float counter;  // !", "constant address space"),
    "function constant": ("constant bool b [[function_constant(0)]];  // !", "must be initialized"),
    "static variable": (KERNEL.format("static int n = 0; x[i] = n++;") + "  // !", "constant address space"),
    "threadgroup variable outside of a kernel": (
        "static void f() { threadgroup float t[4]; t[0] = 1; }  // !",
        "declared in a kernel",
    ),
    "initialized threadgroup variable": (
        KERNEL.format("threadgroup float t[2] = {1, 2}; x[i] = t[0];") + "  // !",
        "initializer",
    ),
    "half from float without a cast": (
        "kernel void k(device half4* h [[buffer(0)]], device float4* x [[buffer(1)]]) { h[0] = x[0]; }  // !",
        "incompatible type",
    ),
    "number where a function of Metal takes a vector": (
        "kernel void k(device float4* x [[buffer(0)]]) { x[0] = fma(2.0f, x[1], x[2]); }  // !",
        "'fma' is given a number and a vector",
    ),
    "elements of a matrix as a pair": (
        "#include <metal_simdgroup_matrix>\nkernel void k(device float2* x [[buffer(0)]]) "
        "{ simdgroup_float8x8 a; x[0] = a.thread_elements(); }  // !",
        "incompatible type",
    ),
    "member function of an address space": (
        "struct A { float x; float f() const device { return x; } };  // !",
        "not modelled",
    ),
    "buffer without an attribute": (
        "kernel void k(device float* x) { x[0] = 1; }  // !",
        "needs an attribute",
    ),
    "cast to a vector": (
        "kernel void k(device float4* x [[buffer(0)]]) { x[0] += float4((int4)x[0]); }  // !",
        "write int4(...)",
    ),
    "static cast to a template parameter": (
        "template <typename T> static T f(float4 x) { return static_cast<T>(x); }  // !",
        "write T(...)",
    ),
    "buffer index beyond the last": (
        "kernel void k(device float* x [[buffer(31)]]) { x[0] = 1; }  // !",
        "31",
    ),
    "two buffers at one index": (
        "kernel void k(device float* x [[buffer(1)]], device float* y [[buffer(1)]]) { *x = *y; }  // !",
        "buffer",
    ),
    "signed position": (
        "kernel void k(device float* x [[buffer(0)]], int i [[thread_position_in_grid]]) { x[i] = 1; }  // !",
        "a position is a uint or ushort",
    ),
    "kernel that returns a value": (
        "kernel float k(device float* x [[buffer(0)]]) { return x[0]; }  // !",
        "must return void",
    ),
    "two kernels of one name": (
        "template <typename T> kernel void k(device T* x [[buffer(0)]]) { x[0] = T(1); }\n"
        'template [[host_name("same")]] kernel void k<int>(device int*);\n'
        'template [[host_name("same")]] kernel void k<float>(device float*);',
        "two kernels named 'same'",
    ),
}


def check(*sources: Path, version: int = 300) -> subprocess.CompletedProcess[str]:
    command: list[str | Path] = [sys.executable, CHECK, "--metal-version", str(version), *sources]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_shaders_of_these_tests_pass() -> None:
    sources = {*HERE.glob("shaders/*.metal"), *HERE.glob("kernels/*.metal")}
    tensors = {HERE / "shaders" / "tensor.metal"}
    for some, version in ((sources - tensors, 300), (tensors, 400)):
        result = check(*some, version=version)
        assert result.returncode == 0, result.stderr
        assert result.stdout.count(": ok") == len(some)
    assert len(sources) >= 6


def source_of(name: str) -> str:
    return f"#include <metal_stdlib>\nusing namespace metal;\n{WRONG[name][0]}\n"


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Messages about each invalid source, all checked by one command."""
    folder = tmp_path_factory.mktemp("wrong")
    files = {name: folder / f"{number}.metal" for number, name in enumerate(WRONG)}
    for name, file in files.items():
        file.write_text(source_of(name))
    result = check(*files.values())
    assert result.returncode == 1
    lines = result.stderr.splitlines()
    return {name: [line for line in lines if line.startswith(f"{file}:")] for name, file in files.items()}


@pytest.mark.parametrize("name", WRONG)
def test_an_invalid_shader_is_rejected(refused: dict[str, list[str]], name: str) -> None:
    messages, words = refused[name], WRONG[name][1]
    assert any(word in message for message in messages for word in words.split("|")), messages
    for number, line in enumerate(source_of(name).splitlines(), 1):
        if line.endswith("// !"):
            assert any(f".metal:{number}:" in message for message in messages), messages


def test_a_source_without_the_standard_library_is_rejected(tmp_path: Path) -> None:
    source = tmp_path / "bare.metal"
    source.write_text("kernel void k(device float* x [[buffer(0)]]) { x[0] = 1; }\n")
    result = check(source)
    assert result.returncode == 1
    assert "#include <metal_stdlib> is missing" in result.stderr
    assert result.stdout == f"{source}: refused\n"
