"""Keywords of JSON schemas beyond those of llguidance: annotations, distinct items, refusals by name."""

import itertools
import json
from typing import Any

import pytest

from metal_prefill import ConstraintError, Model
from metal_prefill.generation._constraint import Constraint
from metal_prefill.generation._constraint_worker import _compile_source

llguidance = pytest.importorskip("llguidance", reason="needs the extra guide")

COLORS = ["red", "green", "blue"]


def allows(schema: dict[str, Any], value: Any) -> bool:
    """Return whether llguidance, as the worker calls it, accepts a value and an end after it."""
    vocabulary = llguidance.LLTokenizer("byte")
    matcher = _compile_source(vocabulary, "json_schema", json.dumps(schema))
    assert not matcher.is_error(), matcher.get_error()
    tokens = vocabulary.tokenize_str(json.dumps(value))
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


@pytest.mark.parametrize("name", ["uuid4", "password", "binary", "file-path", "ipvanyaddress", "json-string"])
def test_formats_of_pydantic_are_annotations(name: str) -> None:
    schema = {"properties": {"format": {"type": "string", "format": name, "maxLength": 3}}, "type": "object"}
    assert allows(schema, {"format": "a b"})
    assert not allows(schema, {"format": "abcd"})


def test_known_formats_are_followed() -> None:
    assert allows({"type": "string", "format": "date"}, "2026-03-01")
    assert not allows({"type": "string", "format": "date"}, "March")


COLOR_SET: dict[str, Any] = {"type": "array", "uniqueItems": True, "items": {"enum": COLORS}}
NAMED = {"$defs": {"Color": {"enum": [*COLORS, "red"], "type": "string"}}}
SETS: dict[str, tuple[dict[str, Any], int, int]] = {
    "enum": (COLOR_SET, 0, 3),
    "bounds": ({**COLOR_SET, "minItems": 1, "maxItems": 2}, 1, 2),
    "a reference": ({**NAMED, **COLOR_SET, "items": {"$ref": "#/$defs/Color"}}, 0, 3),
    "an optional set": ({"anyOf": [COLOR_SET, {"type": "null"}]}, 0, 3),
}


@pytest.mark.parametrize("case", SETS)
def test_sets_have_distinct_items_in_any_order(case: str) -> None:
    schema, least, most = SETS[case]
    for n in range(4):
        for items in itertools.product(COLORS, repeat=n):
            is_set = least <= n <= most and len(set(items)) == n
            assert allows(schema, list(items)) is is_set, items


def test_lists_may_repeat_items() -> None:
    assert allows({**COLOR_SET, "uniqueItems": False}, ["red", "red"])


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({**COLOR_SET, "items": {"type": "integer"}}, "uniqueItems is supported for"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems is supported for"),
        (
            {**COLOR_SET, "items": {"enum": list(range(9))}},
            "uniqueItems: 9 items have 986,410 orders; the limit is 2,000; maxItems",
        ),
        ({"if": {"type": "string"}, "then": {"maxLength": 3}}, '"if"'),
        ({"not": {"type": "string"}}, '"not"'),
        ({"type": "array", "contains": {"type": "string"}}, '"contains"'),
        (
            {"type": "object", "patternProperties": {"^a": {"type": "integer"}, "a$": {"type": "string"}}},
            "/\\^a/ and /a\\$/ are not disjoint",
        ),
    ],
)
def test_keywords_that_are_not_followed_are_named(model: Model, schema: dict[str, Any], message: str) -> None:
    with pytest.raises(ConstraintError, match=f"json_schema: .*{message}"):
        Constraint(model.tokenizer, json_schema=schema)
