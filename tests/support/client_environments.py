"""Environments of other projects' packages, which ``make test-clients`` creates."""

import os
import subprocess
from pathlib import Path

import pytest

import metal_prefill
from support.places import ROOT
from support.programs import output


def environment(client: str) -> Path:
    """Return the Python of an environment; without one, the test is skipped."""
    folder = ROOT / "build" / "clients" / client
    if not (folder / ".ready").exists():
        pytest.skip("needs an environment: make test-clients")
    return folder / "bin" / "python"


def within(client: str, code: str, *arguments: str | Path, **variables: str) -> str:
    """Return what code prints in an environment that finds this installation of the package, too."""
    python = environment(client)
    packages = str(Path(metal_prefill.__file__).parents[1])
    code = f"import sys; sys.path.append({packages!r}); {code}"
    env = {**os.environ, **variables}
    return output([python, "-c", code, *arguments], env=env, stdin=subprocess.DEVNULL)
