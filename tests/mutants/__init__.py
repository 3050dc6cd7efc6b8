"""Errors to plant one at a time, each with the tests that must notice it.

Each module lists the errors in one part of the project, sorted by file. `tools/run_mutants.py` plants them.
`tests/test_mutants.py` checks that each entry matches the sources.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from mutants.mutant import Mutant

# Modules are found, not listed, so that none can be left out.
MUTANTS: tuple[Mutant, ...] = tuple(
    mutant
    for found in iter_modules(__path__)
    for mutant in getattr(import_module(f"{__name__}.{found.name}"), "MUTANTS", ())
)
__all__ = ["MUTANTS", "Mutant"]
