"""The example program builds and runs on its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "vector_add"
# Not optimized, and all files of a language in one. Most of the time goes into the standard library's
# headers, for which GCC, which builds the package that is tested, takes twice as long as clang.
QUICK = ("-DCMAKE_BUILD_TYPE=", "-DCMAKE_UNITY_BUILD=ON", "-DCMAKE_UNITY_BUILD_BATCH_SIZE=0")


@pytest.mark.timeout(900)
def test_vector_add(metal_testing: Any, clang: str, tmp_path: Path) -> None:
    assert metal_testing  # the emulator can be built here
    kept = os.environ.get("METAL_EMULATOR_LIBRARIES")
    build = Path(kept) / "example" if kept else tmp_path / "build"
    beside_python = str(Path(sys.executable).parent)
    cmake = shutil.which("cmake", path=beside_python) or shutil.which("cmake")
    assert cmake
    for command in (
        [cmake, "-S", str(EXAMPLE), "-B", str(build), f"-DCMAKE_CXX_COMPILER={clang}", *QUICK],
        [cmake, "--build", str(build), "--parallel", "2"],
        [str(build / "vector_add")],
    ):
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout + result.stderr
    assert "65536 sums are right, computed on: " in result.stderr
    assert "emulator" in result.stderr
