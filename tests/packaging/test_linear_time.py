"""Regular expressions of the package take time linear in the text that they are applied to.

The sources are searched for patterns. Each is applied, as in its module, to repetitions of its parts.
"""

import ast
import gc
import importlib
import itertools
import re
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest

import metal_prefill

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import sre_parse

PACKAGE = Path(metal_prefill.__file__).parent
METHODS: dict[str, Callable[[re.Pattern[Any], Any], object]] = {
    "match": re.Pattern.match,
    "fullmatch": re.Pattern.fullmatch,
    "search": re.Pattern.search,
    **dict.fromkeys(("finditer", "findall", "sub", "split"), re.Pattern.findall),
}
# Exponential time shows at the first length, cubic time at the second, and quadratic time at the last.
LENGTHS = (24, 32, 512, 4096)  # a fast machine tries 24 in time, whose cost grows by 1.6 for each character
SECONDS = 0.005
MOST_PARTS = 7


@pytest.fixture(autouse=True)
def without_collections() -> Iterator[None]:
    """Collect no garbage meanwhile: it would count towards the time of a pattern that finds many parts."""
    gc.disable()
    yield
    gc.enable()


class Made(NamedTuple):
    """An example of a pattern that a function makes of other strings, and the longest text for it."""

    example: str
    longest: int = LENGTHS[-1]


MADE = {
    "conversion/_source.py: pattern": Made(r"cls\.(predictions|seq_relationship)\..*"),
    "conversion/_source.py: self.made": Made(r"attn_rel_row\.weight|blk\.\d+\.attn_rel_[kq]\.weight"),
    "conversion/_writing.py: f{pattern}.bias": Made(r"blk\.\d+\.attn_(q|k|v|output)\.bias"),
    "conversion/_writing.py: pattern": Made(r"blk\.\d+\.attn_[qk]\.(weight|bias)"),
    "tasks/_prompts.py: pattern": Made(r"\be5-.*instruct|\bbge-.*\bzh\b", 200),
    "tasks/_reranking.py: |.join((re.escape(f{{{name}}}) for name in values))": Made(r"\{query\}|\{a\}"),
    "text/_chat_template.py: ( + |.join(map(re.escape, self._special)) + )": Made(r"(<\|end\|>|<\|a\|>)"),
    "text/_chat_template.py: f({words})|[{re.escape(.join(sorted(firsts)))}]": Made("(</think>|<a>)|[<]"),
    "text/_written_calls.py: f|{quote}": Made(r'\\|"'),
}


class Use(NamedTuple):
    """A pattern, and how its module applies it to texts of at most `longest` characters."""

    name: str
    pattern: re.Pattern[Any]
    methods: frozenset[str]
    longest: int = LENGTHS[-1]


def uses() -> Iterator[Use]:
    """Yield the patterns of the package's sources, with the values of names that their modules define."""
    trees = {
        path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text())
        for path in sorted(PACKAGE.rglob("*.py"))
        if "bench" not in path.parts
    }
    applied = {place: _applied(tree) for place, tree in trees.items()}
    for place, tree in trees.items():
        names = _assigned(tree)
        calls: list[Any] = [node for node in ast.walk(tree) if _is_call(node)]
        for node in calls:
            name = f"{place}: {_unquoted(ast.unparse(node.args[0]))}"
            method, longest = node.func.attr, LENGTHS[-1]
            module = importlib.import_module("metal_prefill." + place[:-3].replace("/", "."))
            given = node.args if method == "compile" else node.args[:1]
            try:
                pattern = re.compile(*(eval(ast.unparse(value), vars(module)) for value in given))
            except NameError:
                assert name in MADE, f"line {node.lineno}: add an example of the pattern {name!r} to MADE"
                pattern, longest = re.compile(MADE[name].example), MADE[name].longest
            methods = {method}
            if method == "compile":
                variable = names.get(node, "")
                found = (methods.get(variable) for methods in (applied[place], *applied.values()))
                methods = next(filter(None, found), {"search", "findall"})
            yield Use(name, pattern, frozenset(methods), longest)


def _assigned(tree: ast.AST) -> dict[ast.AST, str]:
    """Return the variable or attribute that each compiled pattern is assigned to."""
    found: dict[ast.AST, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            name = getattr(node.targets[0], "id", getattr(node.targets[0], "attr", ""))
            found |= {call: name for call in ast.walk(node.value) if _is_call(call)}
    return found


def _unquoted(source: str) -> str:
    """Drop quotes and backslashes, in which versions of Python differ."""
    return re.sub(r"[\"'\\]", "", source)


def _applied(tree: ast.AST) -> dict[str, set[str]]:
    """Return the methods of patterns that a module calls, by the names of variables or attributes."""
    found: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in METHODS:
            name = getattr(node.value, "id", getattr(node.value, "attr", ""))
            found.setdefault(name, set()).add(node.attr)
    return found


def _is_call(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name(id="re"), attr=name)):
            return name == "compile" or name in METHODS
    return False


def parts_of(pattern: re.Pattern[Any]) -> list[str]:
    """Return characters and words that a pattern contains, and some that others have in common."""
    words = [""]

    def visit(node: Any) -> None:
        match node:
            case (name, int(code)) if str(name) in ("LITERAL", "NOT_LITERAL"):
                words[-1] += chr(code)
                return
            case (name, (int(code), int())) if str(name) == "RANGE":
                words.append(chr(code))
            case (name, category) if str(name) == "CATEGORY":
                words.append({"DIGIT": "0", "SPACE": " "}.get(str(category).split("_")[-1], "a"))
            case tuple() | list() | sre_parse.SubPattern():
                for inner in cast(Any, node):
                    visit(inner)
        words.append("")

    source = pattern.pattern if isinstance(pattern.pattern, str) else pattern.pattern.decode("latin-1")
    visit(sre_parse.parse(source, pattern.flags))
    parts = dict.fromkeys(word for word in words if word and len(word) < 40)
    return list(dict.fromkeys((*itertools.islice(parts, MOST_PARTS), *'a \n"')))


def slow_text(
    apply: Callable[[Any], object], parts: list[str], longest: int = LENGTHS[-1], as_bytes: bool = False
) -> str | None:
    """Return a description of a text for which a function takes more than linear time."""

    def is_slow(text: str) -> bool:
        content: Any = text.encode() if as_bytes else text
        for _ in range(3):  # another program may interrupt one
            begin = time.thread_time()
            apply(content)
            taken = time.thread_time() - begin
            if taken < SECONDS:
                return False
            if taken > 10 * SECONDS:  # no interruption takes so much of the thread's time
                return True
        return True

    pumps = ["".join(pump) for n in (1, 2) for pump in itertools.product(parts, repeat=n)]
    for pump, prefix, length in itertools.product(pumps, ("", parts[0]), LENGTHS):
        count = min(length, longest) // len(pump)
        if is_slow(prefix + pump * count + "\0"):
            return f"{prefix!r} + {pump!r} * {count} + '\\0'"
    return None


def test_every_pattern_takes_linear_time() -> None:
    found = list(uses())
    assert len(found) > 50
    assert MADE.keys() <= {use.name for use in found}
    slow = []
    for name, pattern, methods, longest in found:
        for apply in {METHODS[method] for method in methods}:
            as_bytes = isinstance(pattern.pattern, bytes)
            text = slow_text(partial(apply, pattern), parts_of(pattern), longest, as_bytes)
            slow += [f"{name}: {pattern.pattern!r}.{apply.__name__} of {text}"] * (text is not None)
    assert slow == []


@pytest.mark.parametrize("pattern", [r"\s+$", r'"(?:[^"\\]|\\.)*"', "(a|aa)+b", "<a>.*?</a>"])
def test_a_slow_pattern_is_found(pattern: str) -> None:
    compiled = re.compile(pattern)
    assert slow_text(compiled.findall, parts_of(compiled)) is not None
