"""Invalid requests: the error names the field, and what is wrong with it."""

from typing import Any

import pytest
from support.servers.running_server import Running
from support.tools import ASKED, WEATHER

COMPLETIONS: list[tuple[Any, str | None, str]] = [
    (b"", None, "not JSON"),
    (b"{", None, "not JSON"),
    (b'{"prompt": "\xff"}', None, "not JSON"),
    (b'{"prompt": "a", "metadata": {"a": ' + b"[" * 15_000, None, "not JSON"),
    (b'{"prompt": "a", "temperature": NaN}', None, "not JSON"),
    (b"[]", None, "expected `object`, got `array`"),
    (b'{"max_tokens": 3}', "prompt", "you must provide prompt"),
    (b'{"prompt": "a", "seed": 1' + b"0" * 5000 + b"}", "seed", "seed"),
    ({"max_tokens": "3"}, "max_tokens", "max_tokens: expected `int"),
    ({"max_tokens": -1}, "max_tokens", "max_tokens: expected `int` >= 0"),
    ({"temprature": 1}, "temprature", "Unrecognized request argument supplied: temprature"),
    ({"logit_bias": {"5": 101}}, "logit_bias[...]", "logit_bias"),
    ({"logit_bias": {"5000": 1}}, None, "token id 5000"),
    ({"stop": ""}, None, "a stop string is empty"),
    ({"stop": "#" * 1001}, "stop", "stop: a stop string of 1001 characters; the limit is 1000"),
    ({"stop": ["b", "#" * 1001]}, "stop[1]", "stop[1]: a stop string of 1001 characters; the limit is 1000"),
    ({"stop": ["b"] * 17}, "stop", "stop: 17 stop strings; the limit is 16"),
    ({"prompt": []}, "prompt", "prompt must be a text"),
    ({"n": 3, "best_of": 2}, "best_of", "best_of must be at least n, which is 3; got 2"),
    ({"best_of": 3, "stream": True}, "best_of", "best_of must be n, which is 1, in a stream; got 3"),
    ({"best_of": 129}, "best_of", "129 texts; the limit is 128"),
    ({"n": 129}, "n", "129 texts; the limit is 128"),
    ({"regex": "("}, "regex", "regex"),
    ({"regex": "a", "grammar": "b"}, None, "one constraint"),
    ({"prompt": "\ud800"}, None, ""),
]


def schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"schema": schema}}


def tool(number: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"number": number}}
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


UNUSUAL_ID = {"id": "of 12 letters", "type": "function", "function": {"name": "f", "arguments": "{}"}}
LARGE = {"enum": [2**53 + 1]}  # which JSON in JavaScript cannot represent
CHAT: list[tuple[dict[str, Any], str | None]] = [
    ({"top_p": 0}, "top_p"),
    ({"x`y": 1}, "x`y"),
    ({"audio": {}}, "audio"),
    ({"response_format": {"type": "text", "x": 1}}, "response_format.x"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
    ({"response_format": schema(LARGE)}, "response_format.json_schema.schema"),
    ({"chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "<|im_start|>", "content": "a"}]}, None),
    ({"messages": [*ASKED, {"content": "a"}]}, "messages[1].role"),
    ({"messages": [*ASKED, {"role": "user", "content": "a", "name": 5}]}, "messages[1].name"),
    ({"messages": [*ASKED, {"role": "user", "content": "a", "contnet": "b"}]}, "messages[1].contnet"),
    ({"messages": [*ASKED, {"role": "user", "content": [{"type": "image_url"}]}]}, "messages[1].content"),
    ({"messages": [*ASKED, {"role": "assistant", "tool_calls": [UNUSUAL_ID]}]}, "messages"),
    ({"tools": [WEATHER, {"type": "web_search"}]}, "tools[1].type"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    ({"tools": [tool(LARGE)], "tool_choice": "required"}, "tools"),
    ({"reasoning_effort": "low"}, "reasoning_effort"),
    ({"continue_final_message": True}, "messages[0].role"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
    ({"documents": [{"text": "a"}]}, "documents"),
    ({"regex": "("}, "regex"),
    ({"grammar": "start: x"}, "grammar"),
    ({"structured_outputs": {"choice": ["a"], "json": LARGE}}, None),
    ({"structured_outputs": {"json": LARGE}}, "structured_outputs"),
]
RESPONSES: list[tuple[dict[str, Any], str | None]] = [
    ({"input": []}, "input"),
    ({"input": [{}]}, "input[0].role"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ({"input": [{"type": "function_call", "call_id": "a"}]}, "input[0].name"),
    ({"input": [{"type": "function_call_output"}]}, "input[0].call_id"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tool_choice": {"type": "mcp"}}, "tool_choice"),
    ({"background": True}, "background"),
    ({"inputs": "b"}, "inputs"),
    ({"reasoning": {"effort": "low"}}, "reasoning.effort"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
    ({"text": {"format": {"type": "json_schema", "schema": {"type": "odd"}}}}, "text.format.schema"),
]


@pytest.mark.parametrize(
    ("path", "plain", "changed", "param", "message"),
    [
        *(("/v1/completions", {"prompt": "a"}, *row) for row in COMPLETIONS),
        *(("/v1/chat/completions", {"messages": ASKED}, *row, "") for row in CHAT),
        *(("/v1/responses", {"input": "a"}, *row, "") for row in RESPONSES),
    ],
)
def test_an_error_has_the_path_of_its_field(
    iterating: Running, path: str, plain: dict[str, Any], changed: Any, param: str | None, message: str
) -> None:
    error = iterating.refused(path, changed if isinstance(changed, bytes) else plain | changed)
    assert error["param"] == param
    assert message in error["message"]
    assert error["type"] == "invalid_request_error"
