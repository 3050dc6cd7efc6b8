"""Compare the tag of a release with the version of the package and with the changelog.

``python tools/check/release.py v1.2.3`` fails unless all three name the same version. Without a tag it lists
the files of a release and a maintainer's manual steps; that is the last step of ``make release-check``.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "build/wheels/dist"
BY_HAND = """\
on a Mac: make test, and metal-prefill doctor
on processors with AMX and with AVX-VNNI: make test-processor; list in CHANGELOG.md where it passed
git tag -a v{version} -m {version} && git push origin v{version}: then approve the workflow, which publishes
in an empty environment: pip install metal_prefill=={version} && metal-prefill run -p "ROMEO:"
"""


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


def steps() -> str:
    """Return a list of the files of a release, and of the remaining steps."""
    pyproject = (ROOT / "pyproject.toml").read_text()
    version = stated_version(pyproject)
    files = [f"{path.stat().st_size / 1e6:5.1f} MB  {path.name}" for path in sorted(FILES.iterdir())]
    left = problems(f"v{version}", pyproject, (ROOT / "CHANGELOG.md").read_text())
    left += BY_HAND.format(version=version).splitlines()
    return "\n".join([*files, "Left to do by hand:", *(f"{i}. {step}" for i, step in enumerate(left, 1))])


def main(argv: Sequence[str] | None = None) -> int:
    """Print the problems of the tag and return 1, or return 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("tag", nargs="?", help="tag of the release, such as v1.2.3")
    tag: str | None = parser.parse_args(argv).tag
    if tag is None:
        print(steps())
        return 0
    found = problems(tag, (ROOT / "pyproject.toml").read_text(), (ROOT / "CHANGELOG.md").read_text())
    for problem in found:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
