"""Answers whole and in a stream, a call and its result, numbers of tokens, the error of a long prompt."""

import json
import sys
from typing import Any

import anthropic

client = anthropic.Anthropic(base_url=sys.argv[1], api_key="none", max_retries=0)
CITY = {"type": "object", "properties": {"city": {"enum": ["Verona", "Padua"]}}, "required": ["city"]}
TOOL: Any = {"name": "weather", "description": "Weather of a city", "input_schema": CITY}
question: Any = {"role": "user", "content": "How is it in Verona?"}
options: dict[str, Any] = {"model": "demo", "max_tokens": 60, "extra_body": {"temperature": 0}}
whole = client.messages.create(messages=[question], system="Be brief.", **options)
with client.messages.stream(messages=[question], system="Be brief.", **options) as stream:
    streamed = "".join(stream.text_stream)
asked: dict[str, Any] = {"tools": [TOOL], "tool_choice": {"type": "any"}}
called = client.messages.create(messages=[question], **asked, **options)
with client.messages.stream(messages=[question], **asked, **options) as stream:
    again = stream.get_final_message()
(call,) = called.content
result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
history: Any = [
    question,
    {"role": "assistant", "content": called.content},
    {"role": "user", "content": [result]},
]
after = client.messages.create(messages=history, tools=[TOOL], **options)
counted = client.messages.count_tokens(model="demo", messages=history, tools=[TOOL]).input_tokens
try:
    client.messages.create(messages=[{"role": "user", "content": "word " * 9000}], **options)
    overflow = ""
except anthropic.BadRequestError as error:
    overflow = error.message
found = {
    "same": whole.content[0].text == streamed,
    "text": streamed,
    "call": [call.name, call.input, called.stop_reason],
    "streamed_call": [again.content[0].name, again.content[0].input, again.stop_reason],
    "after": after.content[0].text,
    "counted": counted == after.usage.input_tokens + (after.usage.cache_read_input_tokens or 0),
    "overflow": overflow,
}
print(json.dumps(found))
