"""The commands that replace Apple's compiler when the extension is built for macOS without a Mac."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import cross_macos


@pytest.mark.skipif(sys.platform == "win32", reason="the commands are shell scripts")
@pytest.mark.parametrize(
    ("given", "passed"),
    [
        pytest.param("-E a.cpp -o -", "-E a.cpp", id="prints"),  # else zig writes a file of that name
        pytest.param("-x c++ -E - -DA", "-x c++ -E - -DA", id="reads"),
        pytest.param("-c a.cpp -o a.o", "-c a.cpp -o a.o", id="compiles"),
        pytest.param(
            "-bundle a.o -Wl,-x -o a.so", "-shared a.o -o a.so -Wl,-undefined,dynamic_lookup", id="links"
        ),
    ],
)
def test_compiler_arguments_are_translated_for_zig(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, passed: str
) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/bash\necho "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    cross_macos.write_tools(tmp_path / "tools")
    done = subprocess.run(
        [tmp_path / "tools" / "c++", *given.split()], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == f"-m ziglang c++ -target aarch64-macos.13.0 {passed}".split()
