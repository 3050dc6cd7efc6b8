"""Rows of `METAL_PREFILL_PACKED` that would lose weights are errors of the compiler."""

import re
import shutil

import pytest
from support.places import ROOT
from support.programs import finished

SOURCE = ROOT / "cpp/cpu/kernels/packing.cpp"
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
OPENED, CHECKED = "namespace metal_prefill::cpu {", "#undef METAL_PREFILL_CHECK\n"
ROWS = [
    ("(MXFP4, MXFP4Block)", "(MXFP4, IQ4_XSBlock)", "must fill whole packed blocks"),
    ("(NVFP4, NVFP4Block)", "(NVFP4, IQ2_XSBlock)", "must fill whole packed blocks"),
    ("(NVFP4, NVFP4Block)", "(NVFP4, IQ4_NLBlock)", "as many scales for 32 columns"),
    ("(NVFP4, NVFP4Block)", "(NVFP4, ByteHalvesBlock)", "indices only in narrow blocks"),
    ("(IQ2_XS, IQ2_XSBlock)", "(IQ2_XS, IQ2_XXSBlock)", "as many scales for 32 columns"),
    ("(Q5_K, Q5_KBlock)", "(Q5_K, Q4_KBlock)", "codes of as many bits"),
    ("(Q5_0, Q5_0Block)", "(Q5_0, Q5_1Block)", "a minimum exactly if the format has one"),
]
SCALES = [("IQ4_XS", "scales are int8"), ("Q2_K", "scales and minima are nibbles")]

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")


@pytest.fixture(scope="module")
def errors() -> dict[str, str]:
    """Errors of each variant of the rows by its name, compiled together: headers take most of the time."""
    text = SOURCE.read_text(encoding="utf-8")
    headers, rest = text.split(OPENED)
    rows = rest[: rest.index(CHECKED) + len(CHECKED)]
    variants = {"unchanged": rows}
    for i, (row, wrong, _) in enumerate(ROWS):
        assert rows.count(row) == 1
        variants[f"row_{i}"] = rows.replace(row, wrong)
    for block, _ in SCALES:
        scale = f"static constexpr int kMaxScale = 10 * formats::{block}::kMaxScale;"
        variants[f"scale_{block}"] = f"struct {block} : formats::{block} {{ {scale} }};\n{rows}"
    parts = [
        f'#line 1 "{name}"\nnamespace metal_prefill::cpu::{name} {{{body}}}}}'
        for name, body in variants.items()
    ]
    assert COMPILER is not None
    result = finished(
        [COMPILER, "-std=c++20", "-fsyntax-only", "-iquote", str(SOURCE.parent), "-x", "c++", "-"],
        input="\n".join([headers, *parts]),
    )
    lines = result.stderr.splitlines()
    found = {name: "\n".join(x for x in lines if re.match(rf"{name}:.*error:", x)) for name in variants}
    assert sum(" error: " in line for line in lines) == sum(each.count(" error: ") for each in found.values())
    return found


def test_the_rows_compile(errors: dict[str, str]) -> None:
    assert errors["unchanged"] == ""


@pytest.mark.parametrize("number", range(len(ROWS)), ids=[wrong for _, wrong, _ in ROWS])
def test_a_row_that_loses_weights_does_not_compile(errors: dict[str, str], number: int) -> None:
    assert ROWS[number][2] in errors[f"row_{number}"]


@pytest.mark.parametrize(("block", "limit"), SCALES)
def test_scales_that_do_not_fit_the_packed_block_do_not_compile(
    errors: dict[str, str], block: str, limit: str
) -> None:
    """The format declares a scale of more than 127, or of more than 15."""
    assert limit in errors[f"scale_{block}"]
