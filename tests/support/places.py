"""Folders of this checkout."""

from pathlib import Path

TESTS = Path(__file__).parents[1]
DATA = TESTS / "data"  # recorded results
ROOT = TESTS.parent
