"""Products on tensors of Metal 4: values as NumPy computes them, and mistakes that are found."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import check_shaders
import numpy as np
import pytest
from compile_shader import compile_ptx
from metal_kernels import KernelLibrary
from scanner.program import translate

HERE = Path(__file__).resolve().parent
SOURCE = HERE / "shaders" / "tensor.metal"

pytestmark = pytest.mark.emulator


@pytest.fixture
def kernels(emulator: Any) -> Iterator[KernelLibrary]:
    library = KernelLibrary(SOURCE.read_text(), language=(4, 0))
    yield library
    library.close()


def multiply(
    kernels: KernelLibrary, kernel: str, m: int = 32, n: int = 32, k: int = 96, threads: int = 128
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the product of random halves that a kernel computes, and that in float64."""
    rng = np.random.default_rng(k)
    a, b = (rng.standard_normal((rows, k)).astype(np.float16) for rows in (m, n))
    c = np.full((m, n), np.nan, np.float32)
    kernels.dispatch(kernel, [a, b, c, np.uint32(k)], groups=(1,), threads=(threads,))
    return c, a.astype(np.float64) @ b.T.astype(np.float64)


@pytest.mark.parametrize("options", [{}, {"seed": 3}, {"seed": 4, "checked": True}], ids=str)
def test_products_agree_with_numpy(kernels: KernelLibrary, emulator: Any, options: dict[str, Any]) -> None:
    if options.get("checked") and emulator.sanitizer:
        pytest.skip("builds with a sanitizer have no checked mode")
    emulator.set_options(emulator.Options(**options))
    for kernel, shape in (("square", {}), ("wide", {"m": 16, "n": 64, "k": 64, "threads": 64})):
        got, expected = multiply(kernels, kernel, **shape)
        np.testing.assert_allclose(got, expected, atol=2e-5)


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        ("unwritten_sum", r"tensor\.metal:\d+: what is added to has elements that were never written"),
        ("unwritten_store", r"tensor\.metal:\d+: what is stored has elements that were never written"),
        ("wrong_size", "the right tensor has 16 rows of 32 elements, not 32 of 32"),
        ("one_simdgroup", "simdgroups execute different operations .*simdgroup 0 1, .*simdgroup 1 0"),
        ("one_lane", "lanes 0 at matmul2d .*lanes 1-31 at threadgroup_barrier"),
    ],
)
def test_a_mistake_fails_the_command_buffer(kernels: KernelLibrary, kernel: str, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        multiply(kernels, kernel)


def test_the_threadgroup_has_the_simdgroups_of_the_scope(kernels: KernelLibrary) -> None:
    with pytest.raises(RuntimeError, match="matmul2d is for 4 simdgroups; the threadgroup has 2"):
        multiply(kernels, "square", threads=64)


def test_a_product_is_no_barrier(kernels: KernelLibrary, emulator: Any) -> None:
    emulator.set_options(emulator.Options(seed=5))
    got, _ = multiply(kernels, "no_barrier")
    assert np.isnan(got).any(), "it reads what other threads have not staged"


@pytest.mark.parametrize(
    ("limits", "language", "message"),
    [
        ({"metal_tensor": False}, (4, 0), "'metal_tensor' file not found"),
        ({}, (3, 2), "Metal 3.2, which has no"),
    ],
)
def test_older_systems_and_languages_have_no_tensors(
    emulator: Any, limits: dict[str, Any], language: tuple[int, int], message: str
) -> None:
    emulator.set_limits(emulator.Limits(**limits))
    with pytest.raises(RuntimeError, match=message):
        KernelLibrary(SOURCE.read_text(), language=language)


HEAD = """#include <metal_stdlib>
#include <metal_tensor>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
using namespace metal;
using namespace mpp::tensor_ops;
typedef tensor<threadgroup half, dextents<int32_t, 2>, tensor_inline> Staged;
"""
PRODUCT = """kernel void k(device float* c [[buffer(0)]]) {{
  threadgroup half staged[1024];
  constexpr auto descriptor = matmul2d_descriptor({descriptor});
  matmul2d<descriptor, execution_simdgroups<4>> product;
  {operand} a(staged, dextents<int32_t, 2>(32, 32));
  auto sum = product.get_destination_cooperative_tensor<{operand}, {operand}, {result}>();
  product.run(a, a, sum);
  tensor<device float, dextents<int32_t, 2>, tensor_inline> out({target}, dextents<int32_t, 2>(32, 32));
  sum.store(out);
}}
"""
RIGHT = {"descriptor": "32, 32, 32, false, true", "operand": "Staged", "result": "float", "target": "c"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tensors")


@pytest.fixture(scope="module")
def compiler(clang: str, folder: Path) -> list[str]:
    """Return the command that checks sources in Metal 4.0, whose headers it has compiled."""
    return check_shaders.precompile(folder, 400)


def check(folder: Path, compiler: list[str], changed: dict[str, str], metal_version: int = 400) -> list[str]:
    """Return the messages of the static check about the product above."""
    source = folder / "k.metal"
    source.write_text(HEAD + PRODUCT.format(**RIGHT | changed))
    return check_shaders.check(source, metal_version, [], compiler, folder)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({}, None),
        ({"target": "staged"}, "no matching constructor"),
        ({"descriptor": "8, 8, 32, false, true"}, "multiples of 16"),
        ({"descriptor": "32, 32, 32, true, true"}, "the left tensor not transposed"),
        ({"result": "half"}, "summed in floats"),
    ],
)
def test_the_static_check_accepts_only_modelled_features(
    folder: Path, compiler: list[str], changed: dict[str, str], message: str | None
) -> None:
    messages = check(folder, compiler, changed)
    assert any(message in line for line in messages) if message else not messages, messages


def test_tensors_require_the_language_version_that_introduced_them(folder: Path, compiler: list[str]) -> None:
    messages = check(folder, compiler, {}, metal_version=320)
    assert any("metal_tensor needs Metal 4.0" in line for line in messages)


@pytest.mark.usefixtures("clang")
def test_products_compile_for_nvidia_gpus(tmp_path: Path) -> None:
    cpp = tmp_path / "unit.cpp"
    source = tmp_path / "k.metal"
    source.write_text(HEAD + PRODUCT.format(**RIGHT))
    cpp.write_text(translate(source, "ptx", 400, []))
    modules = compile_ptx(cpp, 400, source.name)
    assert [".visible .entry" in module for module in modules.values()] == [True, True]
