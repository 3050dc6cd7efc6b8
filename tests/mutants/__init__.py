"""Errors to plant one at a time, each with the tests that must notice it.

`tools/run_mutants.py` plants them. `tests/test_mutants.py` checks that each entry matches the sources.
"""

from __future__ import annotations

from mutants import emulator, engines, package, server, shaders
from mutants.mutant import Mutant

# The lists of each module, found by their type so that none can be left out.
MUTANTS: tuple[Mutant, ...] = tuple(
    mutant
    for module in (package, server, engines, shaders, emulator)
    for listed in vars(module).values()
    if isinstance(listed, tuple)
    for mutant in listed
    if isinstance(mutant, Mutant)
)
__all__ = ["MUTANTS", "Mutant"]
