"""A shader library of more than 10,000 lines compiles and runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from shader_library import ShaderLibrary

pytestmark = pytest.mark.emulator
SOURCE = Path(__file__).parent / "shaders" / "algorithms.metal"
LINES = 10_000


def large_library() -> tuple[str, int]:
    """Return renamed copies of the tests' algorithms, and the number of copies."""
    text = SOURCE.read_text()
    head, body = text[: text.index("using namespace")], text[text.index("using namespace") :]
    names = re.findall(r"kernel void (\w+)", body) + re.findall(r'host_name\("(\w+)"', body)
    kernels = re.compile(rf"\b({'|'.join(sorted(set(names)))})\b")
    copies = LINES // body.count("\n") + 1
    parts = [kernels.sub(rf"\1_{n}", body).replace("using namespace metal;", "") for n in range(copies)]
    spaces = [f"namespace part_{n} {{{part}}}\n" for n, part in enumerate(parts)]
    return f"{head}using namespace metal;\n{''.join(spaces)}", copies


def test_ten_thousand_lines_compile_and_run(
    build_shaders: Callable[..., ShaderLibrary], tmp_path: Path
) -> None:
    text, copies = large_library()
    assert text.count("\n") >= LINES
    source = tmp_path / "large.metal"
    source.write_text(text)
    # Not optimized, to save time: the test is about the translation of a large source.
    library = build_shaders(source, variants=("plain",), flags=("-O0", "-g0"))
    x = np.arange(1024, dtype=np.int32)
    for n in (0, copies - 1):
        out = np.zeros_like(x)
        library.run(f"scan_{n}", (1,), (1024,), [x, out])
        np.testing.assert_array_equal(out, np.cumsum(x) - x)
