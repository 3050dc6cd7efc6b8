"""The list of planted errors fits the sources. That tests catch them, `make mutants` shows."""

from __future__ import annotations

import functools
import re
from collections import Counter
from pathlib import Path

import pytest
from mutants import MUTANTS, Mutant

ROOT = Path(__file__).parents[1]


OPERATORS = {"and", "or", "not"}


@functools.cache
def text_of(path: str) -> str:
    """Return the text of a Python file, or of all those in a folder."""
    found = ROOT / path
    files = [found] if found.is_file() else sorted(found.rglob("*.py"))
    return "".join(f"{file.stem}\n{file.read_text(encoding='utf-8')}" for file in files)


def problems(mutant: Mutant) -> list[str]:
    """List the mistakes in an entry."""
    path = ROOT / mutant.file
    if not path.is_file():
        return [f"{mutant.file}: there is no such file"]
    found = []
    count = path.read_text(encoding="utf-8").count(mutant.old)
    if count != 1:
        found.append(f"{mutant.file}: {mutant.old!r} occurs {count} times")
    if mutant.old == mutant.new:
        found.append(f"{mutant.file}: nothing changes")
    if not mutant.reason or "\n" in mutant.reason:
        found.append(f"{mutant.file}: the error is not named in a line")
    options = mutant.tests[mutant.tests.index("-k") :] if "-k" in mutant.tests else ()
    tests = ""
    for test in mutant.tests[: len(mutant.tests) - len(options)]:
        if test.startswith("-"):
            continue
        file, _, name = test.partition("::")
        if not (ROOT / file).exists():
            found.append(f"{mutant.file}: there is no {file}")
            continue
        tests += text_of(file)
        if name and ((ROOT / file).is_dir() or f"def {name}(" not in tests):
            found.append(f"{mutant.file}: {file} has no {name}")
    # Words that start with a digit are values of parameters.
    words = {word for option in options[1:2] for word in re.findall(r"\b[a-z]\w*", option)} - OPERATORS
    found += [
        f"{mutant.file}: -k selects nothing by {word}"
        for word in sorted(words)
        if word not in tests.lower() + text_of("tests/support").lower()
    ]
    if not any("tests" in test for test in mutant.tests):
        found.append(f"{mutant.file}: no test is named")
    return found


def test_every_mutant_matches_its_file_and_tests() -> None:
    assert [problem for mutant in MUTANTS for problem in problems(mutant)] == []
    assert [m for m, count in Counter((m.file, m.old, m.new) for m in MUTANTS).items() if count > 1] == []


def test_each_part_of_the_project_has_mutants() -> None:
    assert len(MUTANTS) >= 60
    files = {mutant.file for mutant in MUTANTS}
    shaders = {f"shaders/{path.name}" for path in (ROOT / "shaders").glob("*.metal")}
    assert shaders <= files
    for part in (
        r"cpp/\w+\.cpp",
        r"cpp/cpu/",
        r"cpp/metal/",
        r"emulator/(metal|cpu)/",
        r"emulator/msl/scanner/",
        *(
            rf"python/metal_prefill/{name}"
            for name in (
                *(
                    r"files/_gguf_\w+\.py",
                    r"files/_session_file\.py",
                    r"text/_tokenizer\.py",
                    r"text/_(template_\w+|chat_template)\.py",
                ),
                *(
                    r"generation/_sampling\.py",
                    r"tasks/_scoring\.py",
                    r"bench/_rows\.py",
                    r"gpu/_cost_model/",
                    r"_commands/",
                ),
            )
        ),
    ):
        assert any(re.match(part, file) for file in files), part


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"file": "cpp/none.cpp"}, "there is no such file"),
        ({"old": "no such text"}, "occurs 0 times"),
        ({"old": "  "}, "occurs "),
        ({"new": MUTANTS[0].old}, "nothing changes"),
        ({"reason": ""}, "not named"),
        ({"tests": ()}, "no test"),
        ({"tests": ("tests/test_none.py",)}, "there is no tests/test_none.py"),
        ({"tests": ("tests/test_mutants.py::test_none",)}, "has no test_none"),
        (
            {"tests": ("tests/test_mutants.py", "-k", "tests and no_such" + "_test")},
            "selects nothing by no_such",
        ),
    ],
)
def test_an_entry_that_does_not_match_is_reported(change: dict[str, object], said: str) -> None:
    entry = Mutant(**{**vars(MUTANTS[0]), **change})
    assert any(said in problem for problem in problems(entry))
