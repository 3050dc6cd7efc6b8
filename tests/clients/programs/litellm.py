"""Completions whole and in a stream, a call, and the error of a prompt that is too long."""

import json
import sys
from typing import Any

import litellm

CITY = {"type": "object", "properties": {"city": {"enum": ["Verona", "Padua"]}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
options: dict[str, Any] = {
    "model": "openai/demo",
    "api_base": f"{sys.argv[1]}/v1",
    "api_key": "none",
    "max_tokens": 40,
    "temperature": 0,
}
messages = [{"role": "user", "content": "Who art thou?"}]
whole = litellm.completion(messages=messages, **options).choices[0].message.content
stream = litellm.completion(messages=messages, stream=True, **options)
streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
call = litellm.completion(messages=messages, tools=[TOOL], tool_choice="required", **options)
(called,) = call.choices[0].message.tool_calls
try:
    litellm.completion(messages=[{"role": "user", "content": "word " * 9000}], **options)
    overflow = ""
except litellm.ContextWindowExceededError as error:
    overflow = type(error).__name__
found = {"same": whole == streamed, "text": whole, "overflow": overflow}
print(json.dumps({**found, "call": [called.function.name, json.loads(called.function.arguments)]}))
