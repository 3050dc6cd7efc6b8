"""Check the subjects of commits: at most 72 characters, and no final period.

    python tools/check/commits.py            # part of make lint

Only commits that the upstream branch lacks are checked: the subjects of the others cannot be changed.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LONGEST = 72


def problem(subject: str) -> str:
    """Return what is wrong with a subject; empty if nothing is."""
    if len(subject) > LONGEST:
        return f"{len(subject)} characters, at most {LONGEST} are allowed"
    return "a final period" if subject.endswith(".") else ""


def main() -> int:
    """Print the findings and return the exit code."""
    log = subprocess.run(
        ["git", "log", "--no-merges", "--format=%h %s", "@{upstream}..HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    found = 0
    for line in log.stdout.splitlines() if log.returncode == 0 else ():
        commit, _, subject = line.partition(" ")
        if what := problem(subject):
            print(f"{commit}: {what}: {subject}", file=sys.stderr)
            found += 1
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
