"""Tools of a conversation: which the model may call, which it must, and what it calls."""

from __future__ import annotations

import json
import uuid
from typing import Any

from metal_prefill.serve._errors import ApiError
from metal_prefill.serve._forms import ChatForm, ToolChoice
from metal_prefill.tool_calls import ToolCall, tool_names


def offered_tools(form: ChatForm) -> list[dict[str, Any]] | None:
    """Return the tools that the model is told of; None where there are none."""
    return form.tools if form.tools and form.tool_choice != "none" else None


def call_constraint(form: ChatForm) -> dict[str, Any] | None:
    """Return the schema of a call where the answer must be one, of any of the tools or of one by name."""
    choice = form.tool_choice
    if choice in (None, "none", "auto"):
        return None
    tools = form.tools or []
    wanted = choice.function.name if isinstance(choice, ToolChoice) else None
    names = tool_names(tools)
    if not tools or (wanted is not None and wanted not in names):
        what = "one of the tools" if wanted is None else f"the tool {wanted!r}"
        raise ApiError(
            400,
            f"tool_choice asks for {what}; the tools are: {', '.join(sorted(names))}",
            param="tool_choice",
        )
    return {"anyOf": [_schema(tool) for tool in tools if wanted is None or tool_names([tool]) == {wanted}]}


def _schema(tool: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a call, as :mod:`metal_prefill.tool_calls` reads it without tags."""
    inner = tool.get("function", tool)
    (name,) = tool_names([tool])
    properties = {"name": {"const": name}, "arguments": inner.get("parameters") or {"type": "object"}}
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def call_message(call: ToolCall) -> dict[str, Any]:
    """Return a call as clients expect it: arguments are JSON."""
    return {
        "id": call.id or f"call_{uuid.uuid4().hex}",
        "type": "function",
        "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
    }
