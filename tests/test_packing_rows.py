"""Rows of `METAL_PREFILL_PACKED` that would lose weights are errors of the compiler."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "cpp/cpu/packing.cpp"
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")


def check(source: str) -> subprocess.CompletedProcess[str]:
    """Compile a variant of `packing.cpp` without code generation."""
    assert COMPILER is not None
    folder = str(SOURCE.parent)
    command = [COMPILER, "-std=c++20", "-fsyntax-only", "-iquote", folder, "-x", "c++", "-"]
    return subprocess.run(command, input=source, capture_output=True, text=True, check=False)


def test_the_rows_compile() -> None:
    result = check(SOURCE.read_text(encoding="utf-8"))
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("row", "wrong", "message"),
    [
        ("(MXFP4, MXFP4Block)", "(MXFP4, IQ4_XSBlock)", "must fill whole packed blocks"),
        ("(NVFP4, NVFP4Block)", "(NVFP4, IQ2_XSBlock)", "must fill whole packed blocks"),
        ("(NVFP4, NVFP4Block)", "(NVFP4, IQ4_NLBlock)", "as many scales for 32 columns"),
        ("(NVFP4, NVFP4Block)", "(NVFP4, ByteHalvesBlock)", "indices only in narrow blocks"),
        ("(IQ2_XS, IQ2_XSBlock)", "(IQ2_XS, IQ2_XXSBlock)", "as many scales for 32 columns"),
        ("(Q5_K, Q5_KBlock)", "(Q5_K, Q4_KBlock)", "codes of as many bits"),
        ("(Q5_0, Q5_0Block)", "(Q5_0, Q5_1Block)", "a minimum exactly if the format has one"),
    ],
)
def test_a_row_that_loses_weights_does_not_compile(row: str, wrong: str, message: str) -> None:
    text = SOURCE.read_text(encoding="utf-8")
    assert text.count(row) == 1
    result = check(text.replace(row, wrong))
    assert result.returncode != 0
    assert message in result.stderr


@pytest.mark.parametrize(
    ("block", "limit"), [("IQ4_XS", "scales are int8"), ("Q2_K", "scales and minima are nibbles")]
)
def test_scales_that_do_not_fit_the_packed_block_do_not_compile(block: str, limit: str) -> None:
    """The format declares a scale of 300; the headers are pasted, since one of them changes."""
    formats = (ROOT / "cpp/formats.h").read_text(encoding="utf-8").replace("#pragma once", "")
    at = formats.index(f"struct {block} :")
    changed = formats[:at] + formats[at:].replace("kMaxScale = ", "kMaxScale = 10 * ", 1)
    text = SOURCE.read_text(encoding="utf-8").replace('#include "../formats.h"', changed)
    result = check(text.replace('"../shaders/', '"../../shaders/').replace('"quants.h"', '"../quants.h"'))
    assert result.returncode != 0
    assert limit in result.stderr
