"""Completions whole and in a stream, a call, the error of a long prompt, vectors and ranks."""

import json
import sys
from typing import Any

import litellm

url, vectors_url, ranks_url, *texts = sys.argv[1:]
CITY = {"type": "object", "properties": {"city": {"enum": ["Verona", "Padua"]}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
options: dict[str, Any] = {
    "model": "openai/demo",
    "api_base": f"{url}/v1",
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
vectors = litellm.embedding(
    model="openai/vectors", input=texts, api_base=f"{vectors_url}/v1", api_key="none", encoding_format="float"
)
ranks = litellm.rerank(
    model="hosted_vllm/ranks", query=texts[0], documents=texts, top_n=2, api_base=ranks_url, api_key="none"
)
found = {
    "same": whole == streamed,
    "text": whole,
    "overflow": overflow,
    "call": [called.function.name, json.loads(called.function.arguments)],
    "vectors": [one["embedding"] for one in vectors.data],
    "ranks": [[one["index"], one["relevance_score"]] for one in ranks.results],
}
print(json.dumps(found))
