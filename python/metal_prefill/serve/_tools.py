"""Calls of tools that a request requires: their schema, and their parser."""

import copy
import json
import re
from collections.abc import Collection
from typing import Any

from metal_prefill.generation._schema_rewriting import schemas_in
from metal_prefill.serve._errors import ApiError
from metal_prefill.serve._forms import ChatForm, ToolChoice
from metal_prefill.text._json_calls import Brackets
from metal_prefill.text._tool_calls import tool_names


def call_constraint(form: ChatForm) -> dict[str, Any]:
    """Return the JSON schema of the call that `tool_choice` requires.

    With `parallel_tool_calls` it describes a list of calls, unless `tool_choice` names a tool.
    """
    choice, tools = form.tool_choice, form.tools or []
    wanted = choice.function.name if isinstance(choice, ToolChoice) else None
    names = tool_names(tools)
    if not tools or (wanted is not None and wanted not in names):
        what = "a tool" if wanted is None else f"the tool {wanted!r}"
        offered = f"the tools are: {', '.join(sorted(names))}" if tools else "there are no tools"
        raise ApiError(f"tool_choice asks for {what}; {offered}", param="tool_choice")
    calls, definitions = [], {}
    for i, tool in enumerate(tools):
        if wanted is None or tool_names([tool]) == {wanted}:
            calls.append(_schema(tool, i))
            definitions[f"tool{i}"] = _parameters(tool, i)
    schema: dict[str, Any] = {"anyOf": calls}
    if form.parallel_tool_calls and wanted is None:
        schema = {"type": "array", "items": schema, "minItems": 1, "maxItems": MOST_CALLS}
    return {**schema, "$defs": definitions}


def possible_calls(form: ChatForm) -> frozenset[str]:
    """Return the names of the tools that may satisfy a required call."""
    if isinstance(form.tool_choice, ToolChoice):
        return frozenset([form.tool_choice.function.name])
    return tool_names(form.tools or [])


def single_call(form: ChatForm) -> str | None:
    """Return the name of a tool that may satisfy a required call, or None if there may be several calls."""
    several = form.parallel_tool_calls and not isinstance(form.tool_choice, ToolChoice)
    return None if several else min(possible_calls(form), default=None)


def _schema(tool: dict[str, Any], number: int) -> dict[str, Any]:
    """Return the schema of a call in the untagged format of :mod:`metal_prefill.text._tool_calls`."""
    (name,) = tool_names([tool])
    properties = {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/tool{number}"}}
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


# Keywords that describe the properties of the same object. Two of them combine.
_DESCRIBING = ("properties", "allOf", "anyOf", "oneOf", "$ref", "not", "if", "dependentSchemas")
_COMBINING = frozenset({"not", "if", "dependentSchemas"})  # these combine across objects, too
_SAID = frozenset({"additionalProperties", "patternProperties", "unevaluatedProperties"})


def _parameters(tool: dict[str, Any], number: int) -> dict[str, Any]:
    """Return the schema of a tool's arguments, as the definition `tool<number>` of a larger schema.

    References are rewritten to resolve to the same targets. Objects are closed, because small models invent
    properties until the token limit: only named properties are allowed, unless the schema states otherwise.
    If keywords such as ``allOf`` combine several descriptions of an object, only the outermost is closed.
    """
    where = f"tools[{number}].parameters"
    given = tool.get("function", tool).get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(given, dict):
        raise ApiError(f"{where} must be a JSON schema, got {json.dumps(given):.80}", param=where)
    try:
        found: dict[str, Any] = copy.deepcopy(given)
    except RecursionError:
        raise ApiError(f"{where} is nested too deeply", param=where) from None
    found.pop("$id", None)  # no reference is resolved against it
    schemas = list(schemas_in(found))
    closes_all = not any(map(_combines, schemas))
    for schema in schemas:
        if isinstance(reference := schema.get("$ref"), str):
            if reference != "#" and not reference.startswith("#/"):
                raise ApiError(
                    f"{where}: $ref {reference!r:.80} is not supported; references are '#' or begin with "
                    "'#/'",
                    param=where,
                )
            schema["$ref"] = f"#/$defs/tool{number}{reference[1:]}"
        if isinstance(identifier := schema.get("$id"), str):
            raise ApiError(f"{where}: $id {identifier!r:.80} is supported at the top only", param=where)
        if closes_all or schema is found:
            _close(schema)
    return found


def _close(schema: dict[str, Any]) -> None:
    """Forbid unnamed properties of an object, unless its schema states otherwise."""
    describing = [key for key in _DESCRIBING if key in schema]
    if describing != ["properties"] or not schema.keys().isdisjoint(_SAID):
        return
    properties, required = schema["properties"], schema.get("required", [])
    if isinstance(required, list) and all(isinstance(name, str) and name in properties for name in required):
        schema["additionalProperties"] = False


def _combines(schema: dict[str, Any]) -> bool:
    """Whether several parts of a schema may describe the same object."""
    several = sum(key in schema for key in _DESCRIBING) > 1 or not schema.keys().isdisjoint(_COMBINING)
    parts = schema.get("allOf")
    return several or (isinstance(parts, list) and len(parts) > 1)


MOST_CALLS = 16  # that a request may require
_CALL = re.compile(r'\{"name": ("(?:[^"\\]|\\.)*"), "arguments": ', re.DOTALL)


class RequiredCalls:
    """Parser of an answer that is constrained to a call or a list of calls; the answer may be truncated."""

    def __init__(self, names: Collection[str]) -> None:
        self.text = ""  # the answer so far
        self.whole = True  # whether the last call is complete
        self._names = names
        self._brackets = Brackets()
        self._begin: int | None = None  # of the call that arrives
        self._sent = 0  # characters of the answer up to the end of the arguments so far
        self._length: int | None = None  # characters of these arguments; None until the tool is known

    def step(self, piece: str, *, last: bool) -> list[tuple[str | None, str]]:
        """Add a piece; return new arguments of calls, each with the name of the tool if the call begins.

        `last`: the answer ends with the piece. Arguments then have at least their first brace.
        """
        self.text += piece
        self._brackets.scan(piece)
        is_list = self.text.startswith("[")
        made: list[tuple[str | None, str]] = []
        while True:
            if self._begin is None:
                begin = self.text.find("{", self._sent) if is_list else 0
                if begin < 0:
                    return made
                self._begin = self._sent = begin
                self._length = None
            end, _ = self._brackets.pairs.get(self._begin, (None, 0))
            self.whole = end is not None
            made += self._parts(self._begin, len(self.text) if end is None else end, last)
            if end is None or not is_list:
                return made
            self._begin = None

    def _parts(self, begin: int, end: int, last: bool) -> list[tuple[str | None, str]]:
        """Return the new part of a call."""
        name = None
        if self._length is None:
            name = self._name(begin, end, last)
            if name is None:
                return []
            self._length = 0
        # The last bracket is that of the object around the arguments.
        arguments = self.text[self._sent : end - (self.whole or not last)]
        self._sent += len(arguments)
        if last and not (self._length or arguments):
            arguments = "{"  # LangChain takes empty arguments for a whole call without arguments
        self._length += len(arguments)
        return [(name, arguments)] if name is not None or arguments else []

    def _name(self, begin: int, end: int, last: bool) -> str | None:
        """Return the name of the tool once it is known, at the latest at the end of the answer."""
        if (begun := _CALL.match(self.text, begin, end)) is not None:
            self._sent = begun.end()
            return str(json.loads(begun[1]))
        names, text = self._names, self.text[begin:end]
        possible = [name for name in names if len(names) == 1 or call_prefix(name).startswith(text)]
        if not last or len(possible) != 1:
            return None
        self._sent = end
        return possible[0]


def call_prefix(name: str) -> str:
    return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '


def written_call(name: str, arguments: Any, id_: str) -> dict[str, Any]:
    """Return a call in OpenAI's format."""
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}
