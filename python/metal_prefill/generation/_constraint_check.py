"""Check constraints before a worker process compiles them, and rewrite JSON schemas for llguidance.

Imports no packages: NumPy and the engine would delay the start of the process.
"""

import functools
import itertools
import json
import math
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

# Of a grammar: strings, patterns, comments. A string or pattern without an end takes its line; otherwise each
# of its quotes would be tried as a beginning.
_TEXT = re.compile(r'"(?:[^"\\\n]|\\.)*"?|/(?:[^/\\\n]|\\.)+/?|//[^\n]*')
_RULE = re.compile(r"^[ \t]*[?!]*([A-Za-z_]\w*)(?!\w)[^\n:]*:", re.MULTILINE)
_NAME = re.compile(r"[A-Za-z_]\w*")


def check_source(kind: str, source: str, most_depth: int) -> None:
    """Raise ValueError if a chain of rules or definitions is too long, or llguidance would round a number."""
    if kind == "json_schema":
        try:
            whole = json.loads(source)
        except (ValueError, RecursionError):  # llguidance reports it
            return
        _check_numbers(whole)
        graph, what = _definitions(whole), "definitions"
        depth = _depth(graph, next(iter(graph), ""))
    elif kind == "grammar":
        depth, what = _depth(_rules(source), "start"), "rules"
    else:
        return
    if depth > most_depth:
        raise ValueError(
            f"a chain of {depth:,} {what}, each naming the next, exceeds the limit of {most_depth}"
        )


def _rules(grammar: str) -> dict[str, list[str]]:
    """Return the names in each rule and terminal of a Lark grammar."""
    plain = _TEXT.sub(" ", grammar)
    heads = list(_RULE.finditer(plain))
    ends = [*(head.start() for head in heads[1:]), len(plain)]
    return {head[1]: _NAME.findall(plain, head.end(), end) for head, end in zip(heads, ends, strict=False)}


# JSON Schema keywords whose value maps names to schemas, and keywords whose value is not a schema.
NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
VALUES = frozenset({"const", "enum", "default", "examples"})
_MAXIMA = frozenset({"maximum", "exclusiveMaximum"})
_BOUNDS = _MAXIMA | {"minimum", "exclusiveMinimum", "multipleOf"}
_LARGEST = 2**63 - 1  # llguidance's largest integer, to which it lowers larger bounds


def _check_numbers(whole: Any) -> None:
    """Raise `ValueError` if llguidance, which reads numbers as float64, would change an integer."""
    todo: list[Any] = []
    for schema in _schemas(whole):
        for key in schema.keys() & {"const", "enum", *_BOUNDS}:
            # A larger maximum excludes nothing that can be written.
            if not (key in _MAXIMA and isinstance(schema[key], int) and schema[key] >= _LARGEST):
                todo.append(schema[key])
    while todo:
        part = todo.pop()
        if isinstance(part, int) and (abs(part) > _LARGEST or int(float(part)) != part):
            raise ValueError(f"the number {part} has too many digits: integers beyond 2^53 would be rounded")
        todo += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()


def _definitions(whole: Any) -> dict[str, list[str]]:
    """Return the parts of a JSON schema that are referred to, each with those that it names or contains.

    The whole schema comes first.
    """
    resolved: dict[str, Any] = {}
    todo = [whole]
    while todo:
        part = todo.pop()
        if isinstance(reference := _reference(part), str) and reference not in resolved:
            resolved[reference] = resolve(whole, reference)
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
    reference = part.get("$ref") if isinstance(part, dict) else None
    return reference if isinstance(reference, str) and reference.startswith("#") else None


def resolve(whole: Any, reference: str) -> Any:
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

    A recursive compiler visits names in the same order. If it does not, a worker finds sources that are too
    deep.
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


MOST_LISTS = 2000  # of distinct items; they take llguidance 0.15 s


def rewrite_schema(source: str) -> str:
    """Return a schema with the same meaning, without unknown formats and `uniqueItems`.

    A format that llguidance does not know is an annotation, as JSON Schema has it by default. Raises
    ValueError if items that must be unique are not those of an enumeration, or have too many orders.
    """
    try:
        whole = json.loads(source)
    except (ValueError, RecursionError):  # llguidance reports it
        return source
    changed = False
    for schema in list(_schemas(whole)):
        if isinstance(name := schema.get("format"), str) and not _is_known(name):
            del schema["format"]
            changed = True
        if isinstance(unique := schema.get("uniqueItems"), bool):
            del schema["uniqueItems"]
            if unique:
                _enumerate_lists(schema, whole)
            changed = True
    return json.dumps(whole) if changed else source


def _schemas(whole: Any) -> Iterator[dict[str, Any]]:
    """Yield the objects of a schema that are schemas themselves."""
    todo = [whole]
    while todo:
        part = todo.pop()
        if isinstance(part, list):
            todo += part
        elif isinstance(part, dict):
            yield part
            for key, item in part.items():
                if key in NAMED and isinstance(item, dict):
                    todo += item.values()
                elif key not in VALUES:
                    todo.append(item)


@functools.cache
def _is_known(format_: str) -> bool:
    from llguidance import LLMatcher

    grammar = LLMatcher.grammar_from_json_schema(json.dumps({"type": "string", "format": format_}))
    return not LLMatcher.validate_grammar(grammar, None)


def _enumerate_lists(schema: dict[str, Any], whole: Any) -> None:
    """Replace the items of an array by all lists of distinct ones."""
    items, values = schema.pop("items", None), None
    if isinstance(items, dict) and isinstance(reference := items.get("$ref"), str):
        items = resolve(whole, reference)
    if isinstance(items, dict):
        values = [items["const"]] if "const" in items else items.get("enum")
    if not isinstance(values, list) or schema.pop("type", None) != "array":
        raise ValueError("uniqueItems is supported for arrays whose items are those of an enumeration")
    distinct = list({json.dumps(value, sort_keys=True): value for value in values}.values())
    least, most = schema.pop("minItems", 0), min(schema.pop("maxItems", len(distinct)), len(distinct))
    count = sum(math.perm(len(distinct), n) for n in range(least, most + 1))
    if count > MOST_LISTS:
        raise ValueError(
            f"uniqueItems: {len(distinct)} items have {count:,} orders; the limit is {MOST_LISTS:,}; "
            "maxItems lowers their number"
        )
    sizes = range(least, most + 1)
    schema["enum"] = [list(one) for n in sizes for one in itertools.permutations(distinct, n)]
