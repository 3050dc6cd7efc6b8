"""Report phrases that stop a native reader, in documents, docstrings and comments.

    python tools/check_prose.py            # part of make lint
    python tools/check_prose.py --prune    # removes clean files from the list

``tools/prose_to_edit.txt`` lists the files that still contain such phrases. They are not checked, and the
list can only shrink: a listed file without a finding is an error. Text in backticks is not checked, so that a
document can quote a phrase.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
TO_EDIT = ROOT / "tools" / "prose_to_edit.txt"
PATTERNS = ("*.md", "*.py", "*.h", "*.cpp", "*.mm", "*.metal", "*.inc", "Makefile")
PHRASES = {  # each has no good use in this project, whatever the sentence
    r"\bto be had\b": "available",
    r"\bat hand\b": "available, or name the thing",
    r"\blet(s|ting)? go of\b": "release",
    r"\bin the box\b": "bundled",
    r"\bon (its|their) way\b": "in flight, pending",
    r"\bwho asks\b": "the caller, the client",
    r"\bwhoever\b": "anyone who, the thread that",
    r"\bnobody else\b": "no other thread, no other client",
    r"\bnobody's\b": "discarded, unowned",
    r"\bstands? for\b": "means, selects, represents",
    r"\bone behind (the other|another)\b": "one after another",
    r"\bbehind the (prompt|last)\b": "after",
    r"\bbeside\b": "next to, together with, compared with",
    r"\bbegin(s|ning)? like\b": "shares a prefix with",
    r"\bbegins? alike\b": "share a prefix",
    r"\bbeginnings? of (prompts|texts)\b": "prefix",
    r"\b(told|reported) apart\b": "distinguished, reported separately",
    r"\bguess(es)? at\b": "draft",
    r"\bis (its|their) turn\b": "in time",
    r"\bis not (yours|ours)\b": "is reserved",
    r"\bsisters?\b": "related",
    r"\bfor want of\b": "for lack of",
    r"(?<!there )\bis no (file|integer|number|text|JSON|power|name|token|multiple|str)\b": "is not a ...",
    r'"""(What|Who) ': "begin with a verb or a noun phrase",
    r'"""Of (them|it)\b': "name the thing",
    r"\bmend(s|ed|ing)?\b": "fix",
    r"\bsince then\b": "describe the present; history belongs to the changelog",
}


class Finding(NamedTuple):
    """A phrase in a file.

    Attributes
    ----------
    path : str
        Path from the root.
    line : int
        Counted from 1.
    phrase : str
        The text that was found.
    hint : str
        What to write instead.
    """

    path: str
    line: int
    phrase: str
    hint: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: '{self.phrase.strip()}': write {self.hint}"


def find(path: str, text: str) -> Iterator[Finding]:
    """Yield each phrase to avoid in the text of a file."""
    for number, line in enumerate(text.splitlines(), 1):
        prose = re.sub(r"`[^`]*`", "", line)
        for phrase, hint in PHRASES.items():
            for match in re.finditer(phrase, prose, flags=re.IGNORECASE):
                yield Finding(path, number, match[0], hint)


def check(texts: dict[str, str], to_edit: Iterable[str]) -> tuple[list[Finding], list[str]]:
    """Return the findings in unlisted files, and the listed files that have none or do not exist."""
    listed = set(to_edit)
    findings = {path: list(find(path, text)) for path, text in texts.items()}
    clean = sorted(path for path in listed if not findings.get(path))
    return [finding for path, found in findings.items() if path not in listed for finding in found], clean


def main() -> int:
    """Print what is wrong and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--prune", action="store_true", help="remove files that are clean from the list of files to edit"
    )
    prune = parser.parse_args().prune
    names = subprocess.run(
        ["git", "ls-files", "--", *PATTERNS], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    texts = {
        name: (ROOT / name).read_text(encoding="utf-8")
        for name in names
        if name != "tools/check_prose.py" and (ROOT / name).is_file()
    }
    to_edit = TO_EDIT.read_text(encoding="utf-8").splitlines()
    findings, clean = check(texts, to_edit)
    if prune:
        TO_EDIT.write_text("".join(f"{path}\n" for path in to_edit if path not in clean), encoding="utf-8")
        clean = []
    for finding in findings:
        print(finding, file=sys.stderr)
    for path in clean:
        print(f"{path}: no findings; remove it from {TO_EDIT.relative_to(ROOT)} (--prune)", file=sys.stderr)
    return 1 if findings or clean else 0


if __name__ == "__main__":
    sys.exit(main())
