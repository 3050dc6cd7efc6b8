"""The example program builds by itself and runs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "vector_add"


@pytest.mark.timeout(900)
def test_vector_add(metal_testing: Any, tmp_path: Path) -> None:
    assert metal_testing  # the emulator can be built here
    build = tmp_path / "build"
    beside_python = str(Path(sys.executable).parent)
    cmake = shutil.which("cmake", path=beside_python) or shutil.which("cmake")
    assert cmake
    for command in (
        # The emulator's files in a few large ones, which takes a third of the time, and no debug information.
        [cmake, "-S", str(EXAMPLE), "-B", str(build), "-DCMAKE_BUILD_TYPE=", "-DCMAKE_UNITY_BUILD=ON"],
        [cmake, "--build", str(build), "--parallel", "2"],
        [str(build / "vector_add")],
    ):
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout + result.stderr
    assert "65536 sums are right, computed on: " in result.stderr
    assert "emulator" in result.stderr
