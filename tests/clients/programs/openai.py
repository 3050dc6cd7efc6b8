"""Chat completions, responses and completions: whole, in a stream, typed, and with calls."""

import json
import sys
from typing import Any, Literal

import openai
from pydantic import BaseModel

City = Literal["Verona", "Padua"]


class Report(BaseModel):
    """Weather of a city."""

    city: City


class Weather(BaseModel):
    """Return the weather of a city."""

    city: City


client = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)
question = "How is it in Verona?"
messages: Any = [{"role": "user", "content": question}]
options: dict[str, Any] = {"model": "demo", "temperature": 0}
limit = {"max_tokens": 60}
chat = client.chat.completions.create(messages=messages, **limit, **options).choices[0].message.content
with client.chat.completions.stream(messages=messages, **limit, **options) as stream:
    streamed = "".join(event.delta for event in stream if event.type == "content.delta")
tools = [openai.pydantic_function_tool(Weather)]
required = {"messages": messages, "tools": tools, "tool_choice": "required", **limit, **options}
parsed = client.chat.completions.parse(**required).choices[0].message.tool_calls[0].function
with client.chat.completions.stream(**required) as stream:
    parts = [event.arguments_delta for event in stream if event.type == "tool_calls.function.arguments.delta"]
    final = stream.get_final_completion().choices[0].message.tool_calls[0].function
typed = client.chat.completions.parse(messages=messages, response_format=Report, **limit, **options)

output = {"max_output_tokens": 60, **options}
response = client.responses.create(input=question, **output)
with client.responses.stream(input=question, **output) as events:
    again = "".join(event.delta for event in events if event.type == "response.output_text.delta")
report = client.responses.parse(input=question, text_format=Report, **output).output_parsed
called = client.responses.parse(
    input=question,
    tools=[openai.pydantic_function_tool(Weather)["function"] | {"type": "function"}],
    tool_choice="required",
    **output,
)
(item,) = called.output
result: Any = [{"type": "function_call_output", "call_id": item.call_id, "output": "rain"}]
after = client.responses.create(input=result, previous_response_id=called.id, **output).output_text
text = client.completions.create(prompt="ROMEO:", max_tokens=8, **options).choices[0].text
pieces = client.completions.create(prompt="ROMEO:", max_tokens=8, stream=True, **options)
try:
    client.chat.completions.create(messages=[{"role": "user", "content": "word " * 9000}], **options)
    overflow = ""
except openai.BadRequestError as error:
    overflow = str(error.code)
found = {
    "version": openai.__version__,
    "same": chat == streamed == response.output_text == again,
    "text": chat,
    "call": [parsed.name, parsed.parsed_arguments.city],
    "streamed_call": [final.name, final.parsed_arguments.city],
    "parts": len(parts),
    "cities": [typed.choices[0].message.parsed.city, report.city, json.loads(item.arguments)["city"]],
    "after": after,
    "completion": text == "".join(piece.choices[0].text for piece in pieces if piece.choices),
    "overflow": overflow,
}
print(json.dumps(found))
