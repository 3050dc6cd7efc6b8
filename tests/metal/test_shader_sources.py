"""The shaders as a whole fulfil the requirements of Apple's compiler."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.kernel_harness import SHADERS

SOURCES = sorted(SHADERS.glob("*.metal"))
# Attributes that may be scalars or vectors; those of one kernel must have the same number of components.
GRID_ATTRIBUTES = (
    "thread_position_in_grid|threads_per_grid|threadgroup_position_in_grid|threadgroups_per_grid"
    "|thread_position_in_threadgroup|threads_per_threadgroup"
)


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.stem)
def test_positions_in_a_kernel_have_the_same_number_of_components(path: Path) -> None:
    for kernel in re.split(r"\nkernel void ", path.read_text())[1:]:
        parameters = kernel[: kernel.index("{")]
        sizes = set(re.findall(rf"u(?:int|short)([23]?) \w+\s*\[\[(?:{GRID_ATTRIBUTES})\]\]", parameters))
        assert len(sizes) <= 1, kernel.split("(")[0]


# Functions of single precision that Metal has in a fast and in a precise form.
TWO_FORMS = (
    "exp|exp2|exp10|log|log2|log10|sin|cos|tan|sincos|asin|acos|atan|atan2|sinh|cosh|tanh|asinh|acosh|atanh"
    "|pow|powr|sqrt|rsqrt"
)


@pytest.mark.parametrize("path", sorted(SHADERS.glob("*.[hm]*")), ids=lambda p: p.name)
def test_functions_with_a_fast_variant_name_it_explicitly(path: Path) -> None:
    """Which one a bare name means depends on the compiler's options, and on the macOS that reads them."""
    code = re.sub(r"//.*", "", path.read_text())
    assert re.findall(rf"(?<![\w:.])(?:{TWO_FORMS})\(.*", code) == []


def test_attention_decode_loads_the_next_keys_before_it_multiplies_the_current_ones() -> None:
    """A simdgroup then waits for memory while it multiplies."""
    code = (SHADERS / "attention_decode.metal").read_text()
    body = code[code.index("static inline void take_cached(") :]
    body = body[: body.index("\n}\n")]
    steps = re.findall(
        r"(if \((!?)kLoadsAhead &&.*\n?.*cached\.load\(|const .* current = cached|take<T>\()", body
    )
    order = [("load" if "load(" in text else text[-6:].strip(), bool(negated)) for text, negated in steps]
    assert order == [("cached", False), ("load", False), ("ke<T>(", False), ("load", True)]


def test_attention_decode_looks_up_a_page_two_steps_before_its_keys() -> None:
    """The loads of the next keys then wait for no load of the current ones."""
    code = (SHADERS / "attention_decode.metal").read_text()
    body = code[code.index("  void load(Cache<T> cache") : code.index("  // The first of keys [first, end)")]
    steps = re.findall(
        r"ulong\(page\)|page = page_after|page_after = page_of\(cache, first \+ 2 \* step", body
    )
    assert steps == ["ulong(page)", "page = page_after", "page_after = page_of(cache, first + 2 * step"]


def test_attention_prefill_loads_the_blocks_of_a_step_together() -> None:
    """Keys before their products, values before the softmax; the number of keys decides about no load."""
    code = (SHADERS / "attention_prefill.metal").read_text()
    step = code[code.index("for (uint key = rows.first_key()") : code.index("divisor(")]
    events = re.findall(
        r"if \(kAhead\)|if \(key \+ j|simdgroup_load\(loaded|if \(!kAhead\) simdgroup_load\((?:keys|values)"
        r"|multiply_accumulate\((?:score|output)|fast::exp2\(lane_scores|if \(kAhead && key",
        step,
    )
    together = ["if (kAhead)", "simdgroup_load(loaded"]
    scores = ["if (kAhead && key", "multiply_accumulate(score"]
    scores += ["if (key + j", "if (!kAhead) simdgroup_load(keys", "multiply_accumulate(score"]
    output = ["if (key + j", "if (!kAhead) simdgroup_load(values", "multiply_accumulate(output"]
    last = ["multiply_accumulate(output"]  # with zeros in place of rows after the last key
    softmax = ["fast::exp2(lane_scores", "if (key + j"]
    assert events == together + scores + together + softmax + output + last


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.stem)
def test_every_source_includes_what_it_needs_by_itself(path: Path) -> None:
    text = path.read_text()
    assert "#include <metal_stdlib>" in text
    assert "using namespace metal;" in text
    assert "bfloat" not in re.sub(r"//.*", "", text), "needs Metal 3.1; the minimum is 3.0"
