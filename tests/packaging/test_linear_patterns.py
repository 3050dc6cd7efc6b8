"""Each regular expression of the package takes time linear in the text that it is applied to."""

from __future__ import annotations

import ast
import importlib
import itertools
import re
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

import metal_prefill

ROOT = Path(metal_prefill.__file__).parent
SOURCES = {path: path.read_text() for path in sorted(ROOT.rglob("*.py"))}
CALLS = ("compile", "match", "fullmatch", "search", "sub", "split", "findall", "finditer")
ANCHORED = ("match", "fullmatch")
LENGTH = 20_000
# A search that takes a nanosecond for each pair of characters takes 0.2 s; a linear one takes up to 0.005 s.
SECONDS = 0.08

# Patterns that functions build: those for typical values.
BUILT = {
    "text/_written_calls.py": [r"\\|'", r'\\|"'],
    "text/_spelled_tokens.py": [r"<\|a\|>|<\|a|(?<=\s)<b>"],
    "text/_chat_template.py": [
        r"(<\|im_start\|>|<\|im_end\|>|<s>)",
        r"(</think>|<tool>)|[<]",
        r"\A(\s*)(im_end\|>|end\|>|>|s>)",
    ],
    "conversion/_sources.py": [r"(.+?)(ForMaskedLM|Model)", r"encoder\.\d+\.bias"],
    "conversion/_writing.py": [r"layers\.(\d+)\.(q|k)_proj\.bias", r"layers\.(\d+)\.weight"],
    "tasks/_reranking.py": [r"\{query\}|\{document\}"],
    "tasks/_prompts.py": [r"nomic-embed", r"^e5-(small|base)"],
}


class Use(NamedTuple):
    """A pattern, and the methods that are called with it."""

    place: str
    pattern: re.Pattern[Any]
    anchored: bool


def scopes(module: ModuleType) -> Iterator[dict[str, Any]]:
    yield vars(module)
    for value in list(vars(module).values()):
        if isinstance(value, type) and value.__module__ == module.__name__:
            yield {**vars(module), **vars(value)}


def uses() -> Iterator[Use]:
    for path, source in SOURCES.items():
        place = path.relative_to(ROOT).as_posix()
        tree = ast.parse(source)
        names = {}  # of compiled patterns
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                names.update({id(inner): node.targets[0].id for inner in ast.walk(node.value)})
        for node in ast.walk(tree):
            call = node.func if isinstance(node, ast.Call) else None
            if (
                not isinstance(call, ast.Attribute)
                or ast.unparse(call.value) != "re"
                or call.attr not in CALLS
            ):
                continue
            assert isinstance(node, ast.Call)
            anchored = call.attr in ANCHORED
            if call.attr == "compile" and (name := names.get(id(node))) is not None:
                users = source if name.startswith("_") else "".join(SOURCES.values())
                called = set(re.findall(rf"\b{name}(?:\[[^]]*\])?\.(\w+)\(", users))
                anchored = bool(called) and called <= set(ANCHORED)
            for pattern in patterns(path, node):
                yield Use(f"{place}: {pattern.pattern!r:.80}", pattern, anchored)


def patterns(path: Path, call: ast.Call) -> Iterator[re.Pattern[Any]]:
    module = ".".join(["metal_prefill", *path.relative_to(ROOT).with_suffix("").parts])
    flags = next((keyword.value for keyword in call.keywords if keyword.arg == "flags"), None)
    if ast.unparse(call.func) == "re.compile" and len(call.args) > 1:
        flags = call.args[1]
    for scope in scopes(importlib.import_module(module)):
        try:
            value = eval(ast.unparse(call.args[0]), dict(scope))
        except NameError:
            continue
        yield re.compile(value, 0 if flags is None else eval(ast.unparse(flags), dict(scope)))
        return
    place = path.relative_to(ROOT).as_posix()
    assert place in BUILT, f"{place} builds the pattern {ast.unparse(call.args[0])}: add an example to BUILT"
    yield from map(re.compile, BUILT[place])


def attacks(pattern: re.Pattern[Any]) -> Iterator[str]:
    """Yield texts that repeat one or two characters of a pattern, after its first literals or nothing."""
    source = pattern.pattern if isinstance(pattern.pattern, str) else pattern.pattern.decode("latin-1")
    plain = re.sub(r"\\[wWdDsSAbnrt]|\[\^?|\]|\{\d*,?\d*\}|\(\?[:=!<P]*|[()|?*+^$]", "\0", source)
    plain = plain.replace("\\", "")
    letters = [*list(dict.fromkeys(plain.replace("\0", "")))[:5], "\\", " ", "1", "\n"]
    first = next(filter(None, plain.split("\0")), "")
    pumps = {*letters, *map("".join, itertools.permutations(letters[:6], 2)), '\\"', "a\\", first}
    for begin, pump in itertools.product({"", first}, filter(None, pumps)):
        yield begin + pump * (LENGTH // len(pump))


@pytest.mark.parametrize("use", [pytest.param(use, id=use.place) for use in uses()])
def test_a_pattern_takes_linear_time(use: Use) -> None:
    for text in attacks(use.pattern):
        value = text if isinstance(use.pattern.pattern, str) else text.encode("latin-1", "replace")
        begin = time.thread_time()
        if use.anchored:
            use.pattern.match(value)
            use.pattern.fullmatch(value)
        else:
            deque(use.pattern.finditer(value), maxlen=0)
        assert time.thread_time() - begin < SECONDS, f"{text[:60]!r} ..."
