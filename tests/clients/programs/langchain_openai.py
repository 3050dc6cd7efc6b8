"""Answers whole and in a stream, a required call and its result, a typed result, and vectors."""

import json
import sys
from typing import Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


@tool
def weather(city: Literal["Verona", "Padua"]) -> str:
    """Return the weather of a city."""
    return f"Rain in {city}."


class Report(BaseModel):
    """Weather of a city."""

    city: Literal["Verona", "Padua"]


model = ChatOpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", model="demo", temperature=0, max_tokens=40)
question = HumanMessage("How is it in Verona?")
whole = model.invoke([question]).content
streamed = "".join(str(chunk.content) for chunk in model.stream([question]))
call = model.bind_tools([weather], tool_choice="required").invoke([question])
(made,) = call.tool_calls
result = ToolMessage(weather.invoke(made["args"]), tool_call_id=made["id"])
after = model.bind_tools([weather]).invoke([question, call, result]).content
report = model.with_structured_output(Report, method="json_schema").invoke([question])
try:
    model.invoke([HumanMessage("word " * 9000)])
    overflow = ""
except Exception as error:
    overflow = type(error).__name__
found = {"same": whole == streamed, "text": whole, "after": after, "overflow": overflow}
print(json.dumps({**found, "call": [made["name"], made["args"]], "city": report.city}))
