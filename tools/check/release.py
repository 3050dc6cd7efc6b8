"""Compare the tag of a release with the version of the package and with the changelog.

``python tools/check/release.py v1.2.3`` fails where the three do not name the same version.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def stated_version(pyproject: str) -> str:
    """Return the version in the text of a ``pyproject.toml``; raises ValueError without one."""
    found = re.search(r'^\[project\]$.*?^version = "([^"]+)"$', pyproject, re.MULTILINE | re.DOTALL)
    if not found:
        raise ValueError("pyproject.toml states no version")
    return found[1]


def problems(tag: str, pyproject: str, changelog: str) -> list[str]:
    """Return the problems of a tag, given the texts of ``pyproject.toml`` and ``CHANGELOG.md``."""
    version = stated_version(pyproject)
    found = []
    if tag != f"v{version}":
        found.append(f"the tag is {tag}, but pyproject.toml states version {version}")
    if not re.search(rf"^## {re.escape(version)} - \d{{4}}-\d\d-\d\d$", changelog, re.MULTILINE):
        found.append(f"CHANGELOG.md has no heading '## {version} - <year>-<month>-<day>'")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Print the problems of the tag and return 1, or return 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("tag", help="tag of the release, such as v1.2.3")
    tag: str = parser.parse_args(argv).tag
    found = problems(tag, (ROOT / "pyproject.toml").read_text(), (ROOT / "CHANGELOG.md").read_text())
    for problem in found:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
