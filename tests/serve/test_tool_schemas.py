"""The schema of a required call: definitions and references of each tool, closed objects."""

from typing import Any

import jsonschema
import msgspec
import pytest

from metal_prefill.serve._errors import ApiError
from metal_prefill.serve._forms import ChatForm
from metal_prefill.serve._tools import RequiredCalls, call_constraint

PLACE = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}


def schema_of(*parameters: Any) -> dict[str, Any]:
    """Return the schema of a call of one of the tools t0, t1 and so on."""
    tools = [{"function": {"name": f"t{i}", "parameters": p}} for i, p in enumerate(parameters)]
    body = {"messages": [{"role": "user"}], "tools": tools, "tool_choice": "required"}
    schema = call_constraint(msgspec.json.decode(msgspec.json.encode(body), type=ChatForm))
    assert schema is not None
    return schema


def allows(parameters: Any, arguments: Any) -> bool:
    """Whether the second of two tools may be called with these arguments; the first has other definitions."""
    other = {"$defs": {"Place": {"type": "string"}}, "properties": {"a": {"$ref": "#/$defs/Place"}}}
    schema = schema_of(other, parameters)
    jsonschema.Draft202012Validator.check_schema(schema)
    call = {"name": "t1", "arguments": arguments}
    return bool(jsonschema.Draft202012Validator(schema).is_valid(call))


@pytest.mark.parametrize(
    "parameters",
    [
        {"$defs": {"Place": PLACE}, "properties": {"a": {"$ref": "#/$defs/Place"}}},
        {"definitions": {"P/1": PLACE}, "properties": {"a": {"$ref": "#/definitions/P~11"}}},
        {"properties": {"b": PLACE, "a": {"$ref": "#/properties/b"}}},
        {"properties": {"a": {"anyOf": [{"$ref": "#/$defs/Place"}]}}, "$defs": {"Place": PLACE}},
        {"$defs": {"A": {"$ref": "#/$defs/B"}, "B": PLACE}, "properties": {"a": {"$ref": "#/$defs/A"}}},
        {"$id": "https://x/y", "$defs": {"Place": PLACE}, "properties": {"a": {"$ref": "#/$defs/Place"}}},
    ],
)
def test_references_resolve_to_the_same_definitions(parameters: Any) -> None:
    assert allows(parameters, {"a": {"x": 1}})
    assert not allows(parameters, {"a": {"x": "1"}})
    assert not allows(parameters, {"a": {}})


def test_a_schema_may_be_recursive() -> None:
    tree = {"type": "object", "properties": {"v": {"type": "integer"}, "left": {"$ref": "#"}}}
    assert allows(tree, {"left": {"left": {"v": 1}}})
    assert not allows(tree, {"left": {"left": {"v": "1"}}})


def test_values_and_names_are_not_references() -> None:
    value = {"$ref": "#/$defs/Place"}
    parameters = {
        "properties": {"$ref": {"const": value}, "enum": {"enum": [value]}, "const": {"$ref": "#/$defs/P"}},
        "$defs": {"P": PLACE},
    }
    assert allows(parameters, {"$ref": value, "enum": value, "const": {"x": 1}})
    assert not allows(parameters, {"const": {"x": "1"}})


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"properties": {"a": {"$ref": "#place"}}}, "$ref '#place' is not supported"),
        ({"properties": {"a": {"$ref": "https://x/y"}}}, "$ref 'https://x/y' is not supported"),
        ({"properties": {"a": {"$id": "p", **PLACE}}}, "$id 'p' is supported at the top only"),
        ("text", 'must be a JSON schema, got "text"'),
    ],
)
def test_other_references_are_rejected(parameters: Any, message: str) -> None:
    with pytest.raises(ApiError) as caught:
        schema_of({}, parameters)
    assert f"tools[1].parameters{'' if message.startswith('must') else ':'} {message}" in str(caught.value)
    assert (caught.value.status, caught.value.param) == (400, "tools[1].parameters")


def test_a_schema_that_is_nested_too_deeply_is_rejected() -> None:
    deep: Any = {}
    for _ in range(5000):
        deep = {"not": deep}
    form = ChatForm(messages=[], tools=[{"name": "t", "parameters": deep}], tool_choice="required")
    with pytest.raises(ApiError, match=r"tools\[0\].parameters is nested too deeply"):
        call_constraint(form)


@pytest.mark.parametrize(
    ("parameters", "arguments", "allowed"),
    [
        (None, {}, True),
        (None, {"b": 1}, False),
        ({}, {"b": 1}, False),
        (PLACE, {"x": 1, "b": 1}, False),
        ({"type": "object"}, {"b": 1}, True),
        ({**PLACE, "additionalProperties": True}, {"x": 1, "b": 1}, True),
        ({**PLACE, "patternProperties": {"^b": {}}}, {"x": 1, "b": 1}, True),
        ({"properties": {"a": PLACE}}, {"a": {"x": 1, "b": 1}}, False),
        ({"properties": {"a": {"allOf": [PLACE]}}}, {"a": {"x": 1, "b": 1}}, False),
        ({"properties": {"a": {"anyOf": [PLACE, {"type": "null"}]}}}, {"a": {"x": 1, "b": 1}}, False),
        ({"properties": {"a": {"type": "array", "items": PLACE}}}, {"a": [{"x": 1, "b": 1}]}, False),
        ({**PLACE, "required": ["b"]}, {"b": 1}, True),
        ({"properties": {"allOf": True, "a": PLACE}}, {"a": {"x": 1}}, True),
        # Two descriptions of one object: closed separately, each would forbid the other's properties.
        ({"properties": {"a": {"allOf": [PLACE, {"properties": {"b": {}}}]}}}, {"a": {"x": 1, "b": 1}}, True),
        ({"properties": {"a": {**PLACE, "$ref": "#/$defs/B"}}, "$defs": {"B": PLACE}}, {"a": {"x": 1}}, True),
        ({**PLACE, "anyOf": [{"properties": {"b": {"type": "integer"}}}]}, {"x": 1, "b": 1}, True),
        ({"properties": {"a": {"not": {"properties": {"x": {"const": 1}}}}}}, {"a": {"x": 1, "b": 1}}, False),
        # The outermost object of such a schema is closed nevertheless.
        ({"properties": {"a": {"allOf": [PLACE, {}]}}}, {"b": 1}, False),
    ],
)
def test_objects_have_their_listed_properties(parameters: Any, arguments: Any, allowed: bool) -> None:
    assert allows(parameters, arguments) is allowed


@pytest.mark.parametrize(
    ("text", "names", "expected", "whole"),
    [
        ('{"name": "a", "arguments": {"x": 1e999}}', ["a", "b"], [("a", '{"x": 1e999}')], True),
        ('{"name": "a", "arguments": {"x": [1, ', ["a", "b"], [("a", '{"x": [1, ')], False),
        ('{"name": "a\\"\\u00e9", "arguments": {}}', ['a"é', "b"], [('a"é', "{}")], True),
        ('{"name": "ab', ["ab", "b"], [("ab", "{")], False),
        ('{"name": "a', ["ab", "ac"], [], False),
        ("", ["ab", "ac"], [], False),
        ("", ["ab"], [("ab", "{")], False),
        (
            '[{"name": "a", "arguments": {"x": "}{"}}, {"name": "b", "arguments": {}}]',
            ["a", "b"],
            [("a", '{"x": "}{"}'), ("b", "{}")],
            True,
        ),
        (
            '[{"name": "a", "arguments": {}}, {"name": "b", "arg',
            ["a", "b"],
            [("a", "{}"), ("b", "{")],
            False,
        ),
        ('[{"name": "a", "arguments": {}}, {"name": "', ["a", "b"], [("a", "{}")], False),
        ('[{"name": "a", "arguments": {}}', ["a", "b"], [("a", "{}")], True),
        ("[", ["a", "b"], [], True),
    ],
)
def test_calls_keep_their_arguments(
    text: str, names: list[str], expected: list[tuple[str, str]], whole: bool
) -> None:
    for pieces in ([text], list(text) or [""]):
        calls = RequiredCalls(names)
        found: list[tuple[str, str]] = []
        for i, piece in enumerate(pieces):
            for name, arguments in calls.step(piece, last=i == len(pieces) - 1):
                if name is None:
                    name, before = found.pop()
                    arguments = before + arguments
                found.append((name, arguments))
        assert found == expected
        assert calls.whole is whole
