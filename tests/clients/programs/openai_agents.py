"""An agent calls a tool and returns a type, over chat completions and responses, whole and in a stream."""

import asyncio
import json
import sys
from typing import Any, Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

City = Literal["Verona", "Padua"]


class Report(BaseModel):
    """Weather of a city."""

    city: City


@function_tool
def weather(city: City) -> str:
    """Return the weather of a city."""
    return f"Rain in {city}."


async def main(url: str) -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
    found: dict[str, Any] = {}
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        agent = Agent(
            name="Reporter",
            instructions="Be brief.",
            tools=[weather],
            output_type=Report,
            model=kind(model="demo", openai_client=client),
            model_settings=ModelSettings(tool_choice="required", temperature=0, max_tokens=80),
        )
        whole = await Runner.run(agent, "How is it in Verona?")
        streamed = Runner.run_streamed(agent, "How is it in Verona?")
        async for _ in streamed.stream_events():
            pass
        found[kind.__name__] = [
            [[item.type for item in result.new_items], result.final_output.city]
            for result in (whole, streamed)
        ]
    print(json.dumps(found))


asyncio.run(main(sys.argv[1]))
