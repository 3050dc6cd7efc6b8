"""Check constraints before a worker process compiles them: size and depth."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from metal_prefill.errors import ConstraintError

MOST_CHARACTERS = 1 << 20  # of a source
# Rules or definitions in a chain, each naming the next. Compiling takes up to 9 KB of stack for each, so that
# 400 of them fit in the 4 MiB of a worker.
MOST_DEPTH = 128

_TEXT = re.compile(
    r'"(?:[^"\\\n]|\\.)*"|/(?:[^/\\\n]|\\.)+/|//[^\n]*'
)  # of a grammar: strings, patterns, comments
_RULE = re.compile(r"^[ \t]*[?!]*([A-Za-z_]\w*)(?!\w)[^\n:]*:", re.MULTILINE)
_NAME = re.compile(r"[A-Za-z_]\w*")


def check_source(kind: str, source: str) -> None:
    """Refuse a source that is too large or too deep.

    Raises
    ------
    ConstraintError
        It names the limit.
    """
    if len(source) > MOST_CHARACTERS:
        raise ConstraintError(f"{kind}: {len(source):,} characters exceed the limit of {MOST_CHARACTERS:,}")
    if kind == "json_schema":
        graph, what = _definitions(source), "definitions"
        depth = _depth(graph, next(iter(graph), ""))
    elif kind == "grammar":
        depth, what = _depth(_rules(source), "start"), "rules"
    else:
        return
    if depth > MOST_DEPTH:
        raise ConstraintError(
            f"{kind}: a chain of {depth:,} {what}, each naming the next, exceeds the limit of {MOST_DEPTH}"
        )


def _rules(grammar: str) -> dict[str, list[str]]:
    """Return the names in each rule and terminal of a Lark grammar."""
    plain = _TEXT.sub(" ", grammar)
    heads = list(_RULE.finditer(plain))
    ends = [*(head.start() for head in heads[1:]), len(plain)]
    return {head[1]: _NAME.findall(plain, head.end(), end) for head, end in zip(heads, ends, strict=False)}


def _definitions(schema: str) -> dict[str, list[str]]:
    """Return the parts of a JSON schema that are referred to, each with those that it names or contains.

    The whole schema comes first.
    """
    try:
        whole = json.loads(schema)
    except (ValueError, RecursionError):  # llguidance reports it
        return {}
    resolved: dict[str, Any] = {}
    todo = [whole]
    while todo:
        part = todo.pop()
        if isinstance(reference := _reference(part), str) and reference not in resolved:
            resolved[reference] = _resolve(whole, reference)
        todo += _inner(part)
    referred_to = {id(whole)} | {id(part) for part in resolved.values() if isinstance(part, (dict, list))}
    graph: dict[str, list[str]] = {str(part): [] for part in (id(whole), *sorted(referred_to))}
    parts: list[tuple[Any, list[str]]] = [(whole, [])]  # each with what the part around it refers to
    while parts:
        part, outer = parts.pop()
        if id(part) in referred_to:
            outer.append(str(id(part)))
            outer = graph[str(id(part))]
        if isinstance(reference := _reference(part), str):
            outer.append(str(id(resolved[reference])))
        for name in _DEFINITIONS if isinstance(part, dict) else ():
            # Compiled only where they are referred to.
            parts += [(inner, []) for inner in _inner(part.get(name))]
        parts += [(inner, outer) for inner in _inner(part, besides=_DEFINITIONS)]
    return graph


_DEFINITIONS = ("$defs", "definitions")


def _inner(part: Any, besides: Collection[str] = ()) -> list[Any]:
    """Return the objects and arrays in one, but for members of some names."""
    if isinstance(part, dict):
        values = [value for name, value in part.items() if name not in besides]
    else:
        values = part if isinstance(part, list) else []
    return [value for value in values if isinstance(value, (dict, list))]


def _reference(part: Any) -> str | None:
    """Return the local reference that a part of a schema is, or None."""
    reference = part.get("$ref") if isinstance(part, dict) else None
    return reference if isinstance(reference, str) and reference.startswith("#") else None


def _resolve(whole: Any, reference: str) -> Any:
    """Return the part of a document that a JSON pointer names, or None."""
    at = whole
    for step in reference.removeprefix("#").split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(at, dict):
            at = at.get(step)
        elif isinstance(at, list) and step.isdecimal() and len(step) < 8 and int(step) < len(at):
            at = at[int(step)]
        else:
            return None
    return at


def _depth(graph: Mapping[str, list[str]], first: str) -> int:
    """Return the length of the longest chain of names in a depth-first search, which visits each name once.

    A compiler that recurses goes the same way. Where it does not, a worker finds what is too deep.
    """
    deepest, seen = 0, set[str]()
    for start in (first, *graph):
        path = [iter((start,))]
        while path:
            name = next(path[-1], None)
            if name is None:
                path.pop()
            elif name in graph and name not in seen:
                seen.add(name)
                path.append(iter(graph[name]))
                deepest = max(deepest, len(path) - 1)
    return deepest
