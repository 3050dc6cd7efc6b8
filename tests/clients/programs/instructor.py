"""Typed answers by tools, by schemas and in parts."""

import json
import sys
from typing import Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel, ConfigDict


class Report(BaseModel):
    """Weather of a city."""

    model_config = ConfigDict(extra="forbid")  # the model would invent further fields
    city: Literal["Verona", "Padua"]
    days: Literal[1, 2]


found = {}
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none"), mode=mode)
    asked = {
        "model": "demo",
        "messages": [{"role": "user", "content": "How is it in Verona?"}],
        "max_retries": 1,
        "temperature": 0,
        "max_tokens": 80,
    }
    report = client.chat.completions.create(response_model=Report, **asked)
    partial = list(client.chat.completions.create_partial(response_model=Report, **asked))
    found[mode.name] = [report.model_dump(), partial[-1].model_dump()]
print(json.dumps(found))
