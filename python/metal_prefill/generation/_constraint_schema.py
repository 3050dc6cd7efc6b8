"""Keywords of JSON schemas that llguidance does not know, rewritten in the worker process that compiles them.

Imports nothing of the package but :mod:`metal_prefill.generation._constraint_check`.
"""

import functools
import itertools
import json
import math
from collections.abc import Iterator
from typing import Any

from metal_prefill.generation._constraint_check import NAMED, VALUES, resolve

MOST_LISTS = 2000  # of distinct items; they take llguidance 0.15 s


def rewrite_schema(source: str) -> str:
    """Return a schema with the same meaning, without unknown formats and `uniqueItems`.

    A format that llguidance does not know is an annotation, as JSON Schema has it by default.

    Raises
    ------
    ValueError
        Items that must be unique are not those of an enumeration, or have too many orders.
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
