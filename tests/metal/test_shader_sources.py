"""The shaders as a whole fulfil the requirements of Apple's compiler."""

import re

from support.kernel_harness import SHADERS

SOURCES = sorted(SHADERS.glob("*.metal"))
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
