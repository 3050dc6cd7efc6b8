"""An agent returns a typed result and calls a tool; the result of a set has distinct items."""

import json
import sys
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings


class Report(BaseModel):
    """Weather of a city."""

    city: Literal["Verona", "Padua"]
    days: Literal[1, 2]


class Colors(BaseModel):
    """Colors of a sky."""

    colors: set[Literal["red", "blue"]]


provider = OpenAIProvider(base_url=f"{sys.argv[1]}/v1", api_key="none")
model = OpenAIChatModel("demo", provider=provider)
settings = ModelSettings(temperature=0, max_tokens=80)
report = Agent(model, output_type=Report, model_settings=settings).run_sync("How is it in Verona?").output
colors = (
    Agent(model, output_type=NativeOutput(Colors), model_settings=settings).run_sync("Which colors?").output
)
print(json.dumps({"report": report.model_dump(), "colors": sorted(colors.colors)}))
