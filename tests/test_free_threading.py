"""Python without its global lock: refused when the package is imported, with the reason."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("enabled", [True, False])
def test_the_package_requires_the_gil(enabled: bool) -> None:
    program = f"import sys; sys._is_gil_enabled = lambda: {enabled}; import metal_prefill; print('imported')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    if enabled:
        assert (done.returncode, done.stdout) == (0, "imported\n"), done.stderr
    else:
        assert done.returncode == 1
        last = done.stderr.splitlines()[-1]
        assert last.startswith("ImportError: metal_prefill requires Python's global interpreter lock")
        assert "PYTHON_GIL=1" in last
