"""Rewriting of JSON schemas for llguidance, in the process that compiles them."""

import functools
import itertools
import json
import math
from collections.abc import Iterator
from typing import Any

# JSON Schema keywords whose value maps names to schemas, and keywords whose value is not a schema.
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_VALUES = frozenset({"const", "enum", "default", "examples"})
_MAXIMA = frozenset({"maximum", "exclusiveMaximum"})
_BOUNDS = _MAXIMA | {"minimum", "exclusiveMinimum", "multipleOf"}
_LARGEST = 2**63 - 1  # llguidance's largest integer, to which it lowers larger bounds


def _check_numbers(whole: Any) -> None:
    """Raise `ValueError` if llguidance, which reads numbers as float64, would change an integer."""
    todo: list[Any] = []
    for schema in schemas_in(whole):
        for key in schema.keys() & {"const", "enum", *_BOUNDS}:
            # A larger maximum excludes no number that llguidance can write.
            if not (key in _MAXIMA and isinstance(schema[key], int) and schema[key] >= _LARGEST):
                todo.append(schema[key])
    while todo:
        part = todo.pop()
        if isinstance(part, int) and (abs(part) > _LARGEST or int(float(part)) != part):
            raise ValueError(f"the number {part} has too many digits: integers beyond 2^53 would be rounded")
        todo += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()


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


MOST_LISTS = 2000  # of distinct items; llguidance takes 0.15 s for them


def rewrite_schema(source: str) -> str:
    """Return a schema with the same meaning, without unknown formats and `uniqueItems`.

    A format that llguidance does not know is an annotation, the default in JSON Schema. Raises
    ValueError if llguidance would round a number, or if items that must be unique are not from an
    enumeration or have too many orders.
    """
    try:
        whole = json.loads(source)
    except (ValueError, RecursionError):  # llguidance reports it
        return source
    _check_numbers(whole)
    changed = False
    for schema in list(schemas_in(whole)):
        if isinstance(name := schema.get("format"), str) and not _is_known(name):
            del schema["format"]
            changed = True
        if isinstance(unique := schema.get("uniqueItems"), bool):
            del schema["uniqueItems"]
            if unique:
                _enumerate_lists(schema, whole)
            changed = True
    return json.dumps(whole) if changed else source


def schemas_in(whole: Any) -> Iterator[dict[str, Any]]:
    """Yield the objects of a schema that are schemas themselves."""
    todo = [whole]
    while todo:
        part = todo.pop()
        if isinstance(part, list):
            todo += part
        elif isinstance(part, dict):
            yield part
            for key, item in part.items():
                if key in _NAMED and isinstance(item, dict):
                    todo += item.values()
                elif key not in _VALUES:
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
        items = _resolve(whole, reference)
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
