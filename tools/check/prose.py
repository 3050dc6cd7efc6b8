"""Report phrases that stop a native reader, in documents, docstrings and comments.

    python tools/check/prose.py            # part of make lint

Text in backticks is not checked, so that a document can quote a phrase.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATTERNS = ["*.md", "*.py", "*.h", "*.cpp", "*.mm", "*.metal", "*.inc", "*.cmake", "*.sh"]
PATTERNS += ["*CMakeLists.txt", "Makefile", ".ci/run", "*.yml"]
PHRASES = {  # none has a good use in this project
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
    r"(?<!her )\bsisters?\b": "related",
    r"\bfor want of\b": "for lack of",
    r"(?<!there )\b(is|are) no (?!(longer|faster|larger|smaller|better|more|less)\b)\w+": "is not a ...",
    r'"""(What|Who|Also|Even|Except|Nor|Not|So|And|Or|As|Of)\b': "begin with a verb or a noun phrase",
    r"(?<!#)(#|//) (?-i:What|Who|(That|Those) (of|for|that))\b": "name the thing",
    r"(#|//) Else\b": "Otherwise",
    r"\bwhere (one is missing|nothing|none|there (is|are) no)\b": "if",
    r"\b(lies?|stands?|has (its|their) place) in\b": "is in",
    r"\bgo(es)? on\b": "continue",
    r"\bmend(s|ed|ing)?\b": "fix",
    r"\bin any company\b": "in any batch",
    r"\b(brought|bring|brings) into nfc\b": "normalize to NFC",
    r"\bsince then\b": "describe the present; history belongs to the changelog",
}


def find(path: str, text: str) -> Iterator[str]:
    """Yield a message for each phrase to avoid in the text of a file."""
    prose = re.sub(r"`[^`\n]*`", "", text)
    for phrase, hint in PHRASES.items():
        for match in re.finditer(phrase, prose, flags=re.IGNORECASE):
            line = prose.count("\n", 0, match.start()) + 1
            yield f"{path}:{line}: '{match[0].strip()}': write {hint}"


def main() -> int:
    """Print the findings and return the exit code."""
    names = subprocess.run(
        ["git", "ls-files", "--", *PATTERNS], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    findings = [
        finding
        for name in names
        if name != "tools/check/prose.py" and (ROOT / name).is_file()
        for finding in find(name, (ROOT / name).read_text(encoding="utf-8"))
    ]
    for finding in findings:
        print(finding, file=sys.stderr)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
