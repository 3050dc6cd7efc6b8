"""Errors to plant, one at a time: each must be noticed by the tests that its file's owner names.

`tools/run_mutants.py` plants them; `tests/test_mutants.py` holds that the list fits the sources.
"""

from __future__ import annotations

from mutants import emulator, engines, package, server, shaders
from mutants.mutant import Mutant

MUTANTS: tuple[Mutant, ...] = (
    *package.FILES,
    *package.TEXT,
    *package.FIGURES,
    *package.COMMANDS,
    *server.MUTANTS,
    *package.BUILD,
    *package.CHECKS,
    *engines.SHARED,
    *engines.CPU,
    *engines.METAL,
    *shaders.MUTANTS,
    *emulator.MUTANTS,
)
__all__ = ["MUTANTS", "Mutant"]
