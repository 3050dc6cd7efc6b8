"""On a Mac, whose test module calls Apple's Metal without an emulator, these tests are skipped."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent
# One file for each fixture that provides the emulator. This file must not be one of them.
FILES = ("test_algorithms.py", "test_hazards.py", "test_metal_validation.py", "test_objective_c.py")
PYTEST = (
    "-m",
    "pytest",
    "-q",
    "--tb=no",
    "-p",
    "no:cacheprovider",
    "-p",
    "pytest_timeout",
    "-c",
    "pytest.ini",
)


def run_without_emulator(folder: Path, **environment: str) -> dict[str, int]:
    """Run the tests with a test module as on a Mac and without clang; return how many had each outcome."""
    (folder / "_metal_testing.py").write_text("class Device: pass\n")
    (folder / "programs").mkdir()
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("METAL_EMULATOR")}
    inherited["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # others take most of the time to start
    path = os.pathsep.join([str(folder), *filter(None, [inherited.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, *PYTEST, *(f"tests/{name}" for name in FILES)],
        cwd=TESTS.parent,
        env=inherited | {"PYTHONPATH": path, "PATH": str(folder / "programs")} | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    summary = done.stdout.splitlines()[-1]
    return {outcome.rstrip("s"): int(n) for n, outcome in re.findall(r"(\d+) (\w+)", summary)}


def test_tests_are_skipped_without_the_emulator(tmp_path: Path) -> None:
    outcomes = run_without_emulator(tmp_path)
    assert outcomes["skipped"] > 60
    assert not outcomes.keys() & {"failed", "error"}, outcomes


def test_tests_fail_if_the_required_emulator_is_missing(tmp_path: Path) -> None:
    outcomes = run_without_emulator(tmp_path, METAL_EMULATOR_REQUIRED="1")
    assert "skipped" not in outcomes, outcomes
    assert outcomes["error"] > 60
